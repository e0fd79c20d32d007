"""Imported first by all that needs `qnmixer[train]`: where that is not installed, one line says it at once."""

from qnmixer.installed import require

require("train", "this part of qnmixer")
