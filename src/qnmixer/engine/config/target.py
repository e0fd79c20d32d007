"""The options of the groups: the files of conf/, their keys, and the class or function that each names.

No other list of options exists.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from qnmixer.engine.config.search_path import CONF

TARGET = "_target_"
_NO_OPTIONS = ("_", "as_trained", "custom")  # parts of other files; for evaluate only; for the user's classes
_SEVERAL = ("callbacks", "experiment", "hydra", "local", "logger", "metrics")


@cache
def groups() -> list[str]:
    """The groups of a run whose options set the keys of one section."""
    return sorted(path.name for path in CONF.glob("*/") if path.name not in _SEVERAL)


@cache
def options(group: str) -> list[str]:
    """The options of a group in conf/, by name."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith(_NO_OPTIONS))


def files_of(path: Path, *, below: bool = False) -> list[Path]:
    """The files of an option: those that it includes, then its own. `below`: also files for a part of it (FILE@KEY)."""
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=False) if path.is_file() else {}
    names = values.get("defaults", []) if isinstance(values, dict) else []
    parts = [name.partition("@") for name in names if isinstance(name, str)]
    included = [path.with_name(f"{name}.yaml") for name, at, _ in parts if below or not at]
    return [file for one in included if one.is_file() for file in files_of(one, below=below)] + [path] * path.is_file()


def values_of_option(group: str, option: str) -> dict[str, Any]:
    """The values in the files of an option, not resolved."""
    merged = OmegaConf.merge(*[{}, *map(OmegaConf.load, files_of(CONF / group / f"{option}.yaml"))])
    values = OmegaConf.to_container(merged, resolve=False)
    assert isinstance(values, dict)
    values.pop("defaults", None)
    return {str(key): value for key, value in (values.get(group) or values).items()}  # _global_: its group


@cache
def keys_of_options(group: str) -> dict[str, Collection[str]]:
    """The keys of each option of a group."""
    return {option: values_of_option(group, option).keys() - {TARGET, "name"} for option in options(group)}


@cache
def _by_target(group: str) -> dict[str, str]:
    """Option by target. If several have the same target, the shortest name wins: qn_mixer, not qn_mixer_paper."""
    found = {}
    for option in sorted(options(group), key=len, reverse=True):
        if line := re.search(
            rf"^{TARGET}: (\S+)", (CONF / group / f"{option}.yaml").read_text(encoding="utf-8"), re.MULTILINE
        ):
            found[line[1]] = option
    return found


def option_of(group: str, target: str) -> str:
    """The option of a target; the target itself if conf/ has none."""
    return _by_target(group).get(target, target)


def names_targets(group: str) -> bool:
    """Whether the options of a group name a target each. Else they have a name."""
    return bool(_by_target(group))


def with_names(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The result of `to_plain` for readers: each section with a target also has the name of its option."""
    return {
        key: {"name": option_of(key, value[TARGET]), **value} if isinstance(value, dict) and TARGET in value else value
        for key, value in plain.items()
    }


def keys_of(section: Any) -> dict[str, Any]:
    """The keys of a section as on a command line: arguments of the target stand beside the other keys."""
    keys = asdict(section)
    keys.pop("section", None)
    return keys | keys.pop("arguments", {})
