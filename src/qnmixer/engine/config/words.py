"""Words of a command line that no config can take: flags of other programs, and words that contradict each other.

Each gets its line before Hydra reads it: what is wrong, and a word that then works.
"""

import difflib
import os
from collections.abc import Callable, Collection
from pathlib import Path

from qnmixer.engine.config.checking import answer
from qnmixer.engine.config.compose import NO_EXPERIMENT, is_override, key_of, quoted
from qnmixer.errors import ConfigError, suggest

Explain = Callable[[str], str]
NOTHING = ("", "null", "none", "false", "off", "no", "~")
"""What people give a group to have none of it."""
_LEAST = {"logger": "csv", "memory": "keep", "schedule": "constant", "strategy": "single"}
"""The option that does nothing more, of groups without one that is called none or off."""


def check_groups(overrides: list[str], conf: Path) -> None:
    """Raise ConfigError for a group that is chosen and deleted, or chosen by a word for nothing.

    Args:
        overrides: of a command line.
        conf: the folder with a folder for each group.
    """
    groups = {path.name for path in conf.iterdir() if path.is_dir()}
    chosen = {key_of(word): word for word in overrides if not word.startswith("~") and key_of(word) in groups}
    for word in overrides:
        group, _, value = word.lstrip("+").partition("=")
        if word.startswith("~") and key_of(word) in chosen:
            raise ConfigError(f"{chosen[key_of(word)]} and {word} contradict each other: leave out {word}")
        names = sorted(path.stem for path in (conf / group).glob("[!_]*.yaml") if path.stem != "as_trained")
        plain = value.strip("'\"").lower()
        nothing = plain in NOTHING and plain not in names and word != NO_EXPERIMENT
        if word.startswith("~") or group not in groups or not nothing:
            continue
        if group == "experiment":
            raise ConfigError(f"{word} chooses nothing: leave it out")
        least = _LEAST.get(group) or next((name for name in ("none", "off") if name in names), None)
        way = f"write {group}={least}" if least else suggest("", names, limit=99)
        raise ConfigError(f"{word} chooses nothing: {way}")


def check_flags(
    arguments: list[str], flags: dict[str, bool], known: Callable[[], Collection[str]], explain: Explain
) -> None:
    """Raise ConfigError for a flag that is not one of Hydra, such as --max-epochs 3: its line says which key it is.

    Args:
        arguments: of a command line.
        flags: those of Hydra, and whether each takes a value.
        known: gives the keys of the command, groups included.
        explain: gives the line for a key that the command does not have.
    """
    words = iter(enumerate(arguments))
    for i, word in words:
        flag, equal, value = word.partition("=")
        following = "" if i + 1 == len(arguments) else arguments[i + 1]
        has_value = bool(following) and not following.startswith("-") and not is_override(following)
        if not word.startswith("-"):
            continue
        name = flag.lstrip("-").replace("-", "_")
        if len(flag) > 2 and all(f"-{letter}" in flags for letter in flag[1:]):  # -mm, which argparse takes for -m -m
            raise ConfigError("flags of one letter stand apart: write -m for a sweep")
        if not flag.startswith("--") and flags.get(flag[:2]):  # its value is attached: -cjob
            continue
        if flag in flags and not (has_value and not flags[flag] and name in known()):  # `--run runs/x` of evaluate
            if flags[flag] and not equal:
                next(words, None)
            continue
        longer = [its for its in flags if its.startswith(flag) and len(flag) > 3]  # Python takes it for one of these
        if longer and not (has_value and name in known()):
            raise ConfigError(f"{flag} is not an option: write {' or '.join(longer)}")
        value = value if equal else quoted(following) if has_value else "…"
        raise ConfigError(f"{flag} is not an option: {_way(name, value, known(), explain)}")


def _way(name: str, value: str, known: Collection[str], explain: Explain) -> str:
    """What to write instead of a flag of that name."""
    if name in known:
        return f"write {name}={value}"
    line = explain(name)
    if " is not known here: " in line:
        return line.partition(" is not known here: ")[2].replace("=…", f"={value}", 1)
    _, meant, key = line.partition("did you mean ")
    return f"write {key.partition(' or ')[0].rstrip('?')}={value}" if meant else line


def explain_key(key: str, command: str, known: Collection[str], trained: Collection[str]) -> str:
    """The line for a key that a command which reads its config from a run does not have.

    Args:
        key: as typed.
        command: such as evaluate.
        known: the keys of the command.
        trained: names of keys that a training run has, without their groups.
    """
    leaf = key.rpartition(".")[2]
    if way := answer(key, known):
        return way
    if same := [its for its in known if its.rpartition(".")[2] == leaf] or difflib.get_close_matches(key, known, n=1):
        return f"unknown key {key}: did you mean {' or '.join(same)}?"
    if leaf in trained:
        return f"{key} comes from the run and cannot change in {command}: leave it out"
    return f"unknown key {key}: choose {', '.join(its for its in known if '.' not in its)}"


def explain_word(word: str, missing: Collection[str], known: Collection[str]) -> str | None:
    """The line for a word without a key that looks like a file or is a key; None for another word.

    Args:
        word: as typed.
        missing: the keys of the command for such a word that are not given, in the order of its file.
        known: all its keys.
    """
    if word in known:
        return f"{word} is not KEY=VALUE: write {word}=…"
    if not ("/" in word or os.path.exists(word) or (missing and Path(word).suffix)):
        return None
    if missing:
        return f"{word} is not KEY=VALUE: write {next(iter(missing))}={quoted(word)}"
    if "resume" not in known:
        return f"{word} is not KEY=VALUE, and nothing is missing: leave it out"
    return f"{word} is not KEY=VALUE: write resume={quoted(word)} or data.root={quoted(word)}"
