"""Overrides as they stand on a command line: their keys and values, and how a path is written in one."""

import re
from pathlib import Path

LENGTH = ("trainer.max_steps", "trainer.max_epochs")
"""What says how long a run is."""
_LOOKUP = re.compile(r"\$\{.*:", re.DOTALL)
_PATHS = ("finetune", "resume", "tags")


def quoted(path: Path | str) -> str:
    """A path or an address as Hydra takes it on its command line, whatever is in it."""
    text = str(path)
    if all(c.isalnum() or c in "/-_.:" for c in text):
        return text
    return "'" + text.replace("'", "\\'") + "'"


def values_of(overrides: list[str]) -> dict[str, str]:
    """Values of overrides by key, without quotes."""
    pairs = [(key_of(override), override.partition("=")[2]) for override in overrides]
    return {key: value.strip("'\"").replace("\\'", "'") for key, value in pairs}


def key_of(override: str) -> str:
    """The key of an override, without the signs that Hydra has before it."""
    return override.lstrip("+~").partition("=")[0]


def of_hydra(override: str) -> bool:
    """Whether an override is for Hydra itself, also as one value (hydra={…}) or as the place of a group (…@hydra.…)."""
    return re.search(r"(^|@)\s*hydra\b", key_of(override)) is not None


def looks_up(text: str) -> bool:
    """Whether OmegaConf would call a resolver for a text, as ${oc.env:NAME}; another key of the config it may name."""
    return _LOOKUP.search(text.replace("\\", "")) is not None  # Hydra removes the backslashes


def looks_elsewhere(override: str) -> bool:
    """Whether an override names what no config folder holds: something to look up, or a file outside (GROUP=../x)."""
    key = key_of(override)
    is_choice = "@" in key or ("." not in key and key not in _PATHS)
    return looks_up(override) or (is_choice and ".." in override)


def with_length(overrides: list[str]) -> list[str]:
    """Overrides in which a number of epochs, given alone, is not cut short by steps that a config file has."""
    given = values_of(overrides)
    if given.get("trainer.max_epochs", "null") in ("null", "") or "trainer.max_steps" in given:
        return overrides
    return [*overrides, "trainer.max_steps=-1"]
