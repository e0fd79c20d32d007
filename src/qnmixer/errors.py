"""What a user can get wrong, as typed exceptions; `qnmixer.cli` turns each into one line.

Every message says what is wrong, where (file or key), and how to mend it. Plain Python: anything may import it.
"""

import signal


class UserError(Exception):
    """Something the user can mend. Its message is one line and is all that the user sees."""


class ConfigError(UserError):
    """An override or config value that is unknown, of the wrong type, or at odds with another."""


class PluginError(ConfigError):
    """A class of the user's own that a config names, and that is not there or does not fit."""


class GeometryError(UserError):
    """A scan geometry that is impossible or cannot see the object."""


class DataError(UserError):
    """Input files that are missing, unreadable, or not what they are said to be."""


class CheckpointError(UserError):
    """A checkpoint that is missing, of another program, or of another geometry or network."""


class UnstableNetwork(UserError):
    """A network whose untrained images are so far from the truth that it would not learn."""


class OutOfMemory(UserError):
    """A training step that needs more memory than there is."""


class RankFailed(UserError):
    """One of several processes that ended a run; says which, and why."""


class SweepFailed(UserError):
    """Jobs of a sweep that failed; names each, and why."""


class Stopped(KeyboardInterrupt):
    """A run that somebody stopped. Its message is the line for the user.

    Args:
        number: the signal; None where another rank had it.
        line: the message.
        together: all ranks end with this, at the same point.
    """

    def __init__(self, number: int | None, line: str = "interrupted", together: bool = False) -> None:
        super().__init__(line)
        self.number, self.together = number, together
        self.code = 128 + (number if number in (signal.SIGINT, signal.SIGHUP) else signal.SIGTERM)


def first_line(error: BaseException | str) -> str:
    """What there is room for in a line: the first one of a message, or what kind of error it is where there is none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else "" if isinstance(error, str) else type(error).__name__
