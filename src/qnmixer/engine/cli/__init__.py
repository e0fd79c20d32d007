"""Start and end of every command."""

from qnmixer.engine.cli.explain import explain, warnings_in_one_line
from qnmixer.engine.cli.run import TRACEBACK, completed, run
from qnmixer.engine.config.compose import compose

__all__ = ["TRACEBACK", "completed", "compose", "explain", "run", "warnings_in_one_line"]
