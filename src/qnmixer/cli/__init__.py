"""How every command starts and ends."""

from qnmixer.cli.explain import explain
from qnmixer.cli.run import TRACEBACK, completed, run
from qnmixer.config.compose import compose

__all__ = ["TRACEBACK", "completed", "compose", "explain", "run"]
