"""Start and end of every command."""

from qnmixer.cli.explain import explain
from qnmixer.cli.run import TRACEBACK, completed, run
from qnmixer.config.compose import compose

__all__ = ["TRACEBACK", "completed", "compose", "explain", "run"]
