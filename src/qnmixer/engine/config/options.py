"""The options of the groups: the files of conf/, their keys, and the class or function that each names.

No other list of options exists. So a key that does not exist is compared with the keys of these files.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from qnmixer.engine.config.compose import CONF
from qnmixer.errors import ConfigError

TARGET = "_target_"
_NO_OPTIONS = ("_", "as_trained", "custom")  # parts of other files; for evaluate only; for the user's classes
_MOST_LISTED = 14
"""Keys in a message: those of trainer. Those of model or data have many that fit other options only."""
_WITHOUT_KEYS = ("experiment", "hydra", "local")  # groups that set keys of other groups


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
    named = sorted(options(group), key=len, reverse=True)
    return {str(values_of_option(group, option).get(TARGET)): option for option in named}


def option_of(group: str, target: str) -> str:
    """The option of a target; the target itself if conf/ has none."""
    return _by_target(group).get(target, target)


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


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys, groups included."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat_keys(value, f"{prefix}{key}.")


@cache
def owners() -> dict[str, list[str]]:
    """The options that have a key, by the key as on a command line."""
    found: dict[str, list[str]] = {}
    for path in sorted(CONF.glob("*/*.yaml")):
        group, option = path.parent.name, path.stem
        if group not in _WITHOUT_KEYS and option in options(group):
            prefix = f"logger.{option}." if group == "logger" else f"{group}."
            for key in flat_keys(values_of_option(group, option), prefix):
                found.setdefault(key, []).append(option)
    return found


@cache
def _answers() -> dict[str, str]:
    values = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("answers.yaml")))
    assert isinstance(values, dict)
    return {str(key): str(way) for key, way in values.items()}


def answer(word: str) -> str | None:
    """The message for a key, or an option as GROUP=OPTION, that people know from elsewhere; None for another word."""
    ways = (way for known, way in _answers().items() if f"{word}.".startswith(f"{known}."))
    return next((f"{word} is not known here: {way}" for way in ways), None)


def unknown_key(key: str, known: Collection[str] = ()) -> ConfigError:
    """The error for a key that does not exist: the options that have it, or the nearest key.

    known: keys beside those of the options in conf/.
    """
    section, _, name = key.partition(".")
    parent, _, leaf = key.rpartition(".")
    if way := answer(key):
        return ConfigError(way)
    if name == "name":
        return ConfigError(f"{key} is no key: choose an option by its name, as in {section}={options(section)[0]}")
    if its := owners().get(key):
        return ConfigError(f"{key} works with {section}={' or '.join(its)} only: choose that, or leave {key} out")
    everything = {*known, *owners()} - {key}
    if parent.startswith("data.sources."):  # a source has the keys of its own option
        near = difflib.get_close_matches(leaf, {it.rpartition(".")[2] for it in everything}, n=1)
        way = f"did you mean {parent}.{near[0]}?" if near and near[0] != leaf else "choose data=mixed"
        return ConfigError(f"unknown key {key}: {way}")
    same = [it for it in sorted(everything) if "." in it and it.rpartition(".")[2] == leaf]
    if same := [it for it in same if it.startswith(f"{section}.")] or same:
        return ConfigError(f"unknown key {key}: did you mean {' or '.join(same)}?")
    siblings = {it.rpartition(".")[2]: it for it in sorted(everything) if name and it.startswith(f"{section}.")}
    beside = {it.rpartition(".")[2]: it for it in siblings.values() if it.rpartition(".")[0] == parent}
    for names in (beside, siblings):
        if alike := difflib.get_close_matches(leaf, names, n=1):
            return ConfigError(f"unknown key {key}: did you mean {names[alike[0]]}?")
    if 0 < len(beside) <= _MOST_LISTED:
        return ConfigError(f"unknown key {key}: choose {', '.join(sorted(beside.values()))}")
    if parent in everything and not beside:
        return ConfigError(f"unknown key {key}: did you mean {parent}?")
    if not name and (alike := difflib.get_close_matches(key, everything, n=1)):
        return ConfigError(f"unknown key {key}: did you mean {alike[0]}?")
    return ConfigError(f"unknown key {key}: run with --cfg job to see all keys")
