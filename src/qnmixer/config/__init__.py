"""The settings of every command: a file for each folder of conf/, with the same name, and what all of them share.

No torch here: a wrong override is answered in a moment.
"""

from qnmixer.config.run import Config, effective_batch, override, parse, to_plain, without_places

__all__ = ["Config", "effective_batch", "override", "parse", "to_plain", "without_places"]
