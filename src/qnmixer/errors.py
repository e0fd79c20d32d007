"""Errors that a user can fix, one type each. `qnmixer.commands.command` prints each as one line.

Every message says what is wrong, where (file or key), and how to fix it. Plain Python: any module may import it.
"""

import difflib
import re
import signal
import unicodedata
from collections.abc import Collection
from typing import TextIO


def visible(text: str, keep: str = "") -> str:
    """A text of elsewhere, such as a file's name, with its control characters as escapes: "a\\x1b" instead of ESC.

    Raw ones would rule the terminal, or begin another line of a table. `keep`: characters that stay.
    """
    # Python calls only one of the space characters (Zs) printable.
    shown = (letter.isprintable() or letter in keep or unicodedata.category(letter) == "Zs" for letter in text)
    return "".join(letter if plain else ascii(letter)[1:-1] for letter, plain in zip(text, shown, strict=True))


def say(text: object, file: TextIO | None = None) -> None:
    """Print a text of elsewhere as `visible`, lines kept. What has names of files, jobs or metrics goes through here.

    A rich console of ours does the same by itself. `file`: None for standard output.
    """
    print(visible(str(text), keep="\n"), file=file, flush=True)


def in_a_line(text: str) -> str:
    """As `visible`. Words of more than 300 letters are shortened."""
    return visible(re.sub(r"\S{300,}", lambda match: f"{match[0][:60]}…{match[0][-20:]}", text))


class UserError(Exception):
    """An error that the user can fix. Its message is one line. The user sees nothing else."""

    def __str__(self) -> str:
        """The message, without a data worker's traceback, which torch puts before it."""
        text = re.sub(r"(?s)Caught \w+ in DataLoader worker .*\n\S*Error: ", "", super().__str__())
        return in_a_line(text.rstrip())


class ConfigError(UserError):
    """An override or config value that is unknown, has the wrong type, or contradicts another one."""


class PluginError(ConfigError):
    """A class of the user that the config names, but that does not exist or does not fit."""


class GeometryError(UserError):
    """A scan geometry that is impossible or cannot see the object."""


class DataError(UserError):
    """Input files that are missing, unreadable, or of an unexpected kind."""


class CheckpointError(UserError):
    """A checkpoint that is missing, or was written by another program, or for another geometry or network."""


class OutOfMemory(UserError):
    """A training step that needs more memory than the device has."""


class RankFailed(UserError):
    """A rank that failed and ended the run. The message says which rank, and why."""


class SweepFailed(UserError):
    """Jobs of a sweep that failed. The message names each job, and why it failed."""


class Stopped(KeyboardInterrupt):
    """A run that was stopped by a signal. Its message is the line for the user.

    Args:
        number: the signal; None if another rank received it.
        line: the message.
        together: all ranks end with this error, at the same step.
    """

    def __init__(self, number: int | None, line: str = "interrupted", together: bool = False) -> None:
        super().__init__(line)
        self.number, self.together = number, together
        self.code = 128 + (number if number in (signal.SIGINT, signal.SIGHUP) else signal.SIGTERM)


def first_line(error: BaseException | str) -> str:
    """The first line of a message; the type of the error if the message is empty."""
    text = str(error).strip()
    return text.splitlines()[0] if text else "" if isinstance(error, str) else type(error).__name__


def suggest(word: str, choices: Collection[str], limit: int = 12) -> str:
    """How to fix an unknown word: the nearest choice, or a list of all choices if there are at most `limit`."""
    lowered = {choice.lower(): choice for choice in choices if choice != word}
    begun = [choice for name, choice in lowered.items() if word and name.startswith(word.lower())]
    if len(begun) > 1:
        return f"choose {', '.join(begun)}"
    if matches := begun or [lowered[name] for name in difflib.get_close_matches(word.lower(), lowered, n=1)]:
        return f"did you mean {matches[0]}?"
    return f"choose {', '.join(choices)}" if len(choices) <= limit else "run with --cfg job to see all keys"
