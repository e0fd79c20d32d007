"""Overrides as they stand on a command line: their keys and values, and how a path is written in one."""

from pathlib import Path
from typing import Any

from qnmixer.errors import ConfigError

LENGTH = ("trainer.max_steps", "trainer.max_epochs")
"""What says how long a run is."""


SEARCH = "hydra.searchpath"
"""What names folders of the user's own configs."""


def with_own_configs(arguments: list[str]) -> list[str]:
    """Arguments in which `--config-dir FOLDER` is the override that Hydra has for it, which jobs and runs are given on.

    Raises ConfigError for a folder that is not there.
    """
    kept: list[str] = []
    folders: list[Path] = []
    rest = iter(arguments)
    for argument in rest:
        flag, equal, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            folders.append(Path(value if equal else next(rest, "")).expanduser())
        else:
            kept.append(argument)
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder} is no folder: give the one that holds groups such as model/")
    if not folders:
        return kept
    return [*kept, f"{SEARCH}=[{','.join(quoted(f'file://{folder.resolve()}') for folder in folders)}]"]


def searched(hydra_config: Any) -> list[str]:
    """The override that names folders of the user's own configs, where Hydra was given one."""
    return [str(it) for it in hydra_config.overrides.hydra if key_of(str(it)) == SEARCH]


def quoted(path: Path | str) -> str:
    """A path as Hydra takes it on its command line, whatever is in it."""
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


def with_length(overrides: list[str]) -> list[str]:
    """Overrides in which a number of epochs, given alone, is not cut short by steps that a config file has."""
    given = values_of(overrides)
    if given.get("trainer.max_epochs", "null") in ("null", "") or "trainer.max_steps" in given:
        return overrides
    return [*overrides, "trainer.max_steps=-1"]
