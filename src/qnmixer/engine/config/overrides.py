"""Overrides of a command line: their keys and values, and how to write a path as a value."""

import re
from os.path import expanduser
from pathlib import Path

LENGTH = ("trainer.max_steps", "trainer.max_epochs")
"""The keys that set the length of a run."""
_LOOKUP = re.compile(r"\$\{.*:", re.DOTALL)
_PATHS = ("finetune", "resume", "tags")


def quoted(path: Path | str) -> str:
    """A path or address, quoted for Hydra's command line."""
    text = str(path)
    if all((c.isascii() and c.isalnum()) or c in "/-_.:" for c in text):  # Hydra's grammar knows ASCII letters only
        return text
    return '"' + text.replace('"', '\\"') + '"'  # single quotes are for the shell around it


def values_of(overrides: list[str]) -> dict[str, str]:
    """Values of overrides by key, without quotes."""
    pairs = [(key_of(override), override.partition("=")[2]) for override in overrides]
    return {key: value.strip("'\"").replace("\\'", "'").replace('\\"', '"') for key, value in pairs}


def with_home(overrides: list[str]) -> list[str]:
    """The overrides, with the user's folder for ~ in the folders of runs and sweeps. Hydra would make a folder `~`."""
    found = []
    for override in overrides:
        ((key, value),) = values_of([override]).items()
        home = key in ("hydra.run.dir", "hydra.sweep.dir") and value.startswith("~")
        found.append(f"{key}={quoted(expanduser(value))}" if home else override)
    return found


def depth_of(text: str) -> int:
    """How deep the brackets of a text are nested."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def is_override(word: str) -> bool:
    """Whether a word of a command line is an override: KEY=VALUE or ~KEY, no flag and no value of a flag."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def key_of(override: str) -> str:
    """The key of an override, without Hydra's signs before it."""
    return override.lstrip("+~").partition("=")[0]


def of_hydra(override: str) -> bool:
    """Whether an override is for Hydra itself, also in the forms hydra={…} and …@hydra.…."""
    return re.search(r"(^|@)\s*hydra\b", key_of(override)) is not None


def looks_up(text: str) -> bool:
    """Whether OmegaConf would call a resolver for a text, such as ${oc.env:NAME}. Names of keys do not count."""
    return _LOOKUP.search(text.replace("\\", "")) is not None  # Hydra removes the backslashes


def looks_elsewhere(override: str) -> bool:
    """Whether an override needs something outside the config folders: a resolver, or a file outside (GROUP=../x)."""
    key = key_of(override)
    is_choice = "@" in key or ("." not in key and key not in _PATHS)
    return looks_up(override) or (is_choice and ".." in override)


def with_length(overrides: list[str]) -> list[str]:
    """The overrides, with max_steps=-1 if they set max_epochs only: max_steps of a config file must not end the run."""
    given = values_of(overrides)
    if given.get("trainer.max_epochs", "null") in ("null", "") or "trainer.max_steps" in given:
        return overrides
    return [*overrides, "trainer.max_steps=-1"]
