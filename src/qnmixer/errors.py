"""What a user can get wrong, as typed exceptions; `qnmixer.cli` turns each into one line.

Every message says what is wrong, where (file or key), and how to mend it. Plain Python: anything may import it.
"""


class UserError(Exception):
    """Something the user can mend. Its message is one line and is all that the user sees."""


class ConfigError(UserError):
    """An override or config value that is unknown, of the wrong type, or at odds with another."""


class GeometryError(UserError):
    """A scan geometry that is impossible or cannot see the object."""


class DataError(UserError):
    """Input files that are missing, unreadable, or not what they are said to be."""


class CheckpointError(UserError):
    """A checkpoint that is missing, of another program, or of another geometry or network."""


class OutOfMemory(UserError):
    """A training step that needs more memory than there is."""


class RankFailed(UserError):
    """One of several processes that ended a run; says which, and why."""
