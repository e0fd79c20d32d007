"""Tests of `qnmixer.extras`. A copy without extras has none of them."""

from ..schemas import EXTRAS

collect_ignore_glob = [] if EXTRAS else ["*"]
