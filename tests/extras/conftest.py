"""Tests of `qnmixer.extras`. A copy without extras has none of them."""

from ..hub_server import hub_server
from ..schemas import EXTRAS

__all__ = ["hub_server"]

collect_ignore_glob = [] if EXTRAS else ["*"]
