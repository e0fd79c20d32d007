"""Imported first by all that needs `qnmixer[train]`: where that is not installed, one line says it at once."""

from qnmixer.installed import one_line_of_a_command, require

with one_line_of_a_command():
    require("train", "this part of qnmixer")
