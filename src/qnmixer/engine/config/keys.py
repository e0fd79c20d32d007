"""The message for a key that does not exist, and for keys and options that people know from elsewhere."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from qnmixer.engine.config.overrides import key_of
from qnmixer.engine.config.sections import PASSED_ON
from qnmixer.engine.config.target import groups, keys_of_options, names_targets, options
from qnmixer.errors import ConfigError, suggest


@cache
def answers() -> dict[str, dict[str, str]]:
    """What to write instead: of habits from elsewhere, and of arguments of Lightning's Trainer that are refused."""
    values = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("answers.yaml")))
    assert isinstance(values, dict)
    return {str(key): its for key, its in values.items()}


def habit(overrides: list[str]) -> str | None:
    """The message for the first override that is a key or option of elsewhere; None if no override is."""
    habits = answers()["habits"]
    for override in overrides:
        for given in (override.lstrip("+~"), key_of(override)):
            if given in habits:
                return f"{given} is not known here: {habits[given]}"
    return None


def check_trainer(names: Collection[str]) -> None:
    """Raise ConfigError for the first argument of Lightning's Trainer that would break a run."""
    for name in names:
        if why := answers()["trainer"].get(name):
            raise ConfigError(f"trainer.{name} cannot be set: {why}")


def unknown_key(key: str, known: Collection[str] = ()) -> ConfigError:
    """The error for a key that does not exist: what the key works with, or the nearest key.

    known: keys beside those of the options in conf/.
    """
    section, _, name = key.partition(".")
    for prefix, way in answers()["prefixes"].items():
        if f"{key}.".startswith(f"{prefix}."):
            return ConfigError(f"{key} is not known here: {way}")
    if section in groups():
        if name == "name" and names_targets(section):
            return ConfigError(f"{key} is no key: choose an option by its name, as in {section}={options(section)[0]}")
        if owners := [option for option, keys in keys_of_options(section).items() if name in keys]:
            return ConfigError(
                f"{key} works with {section}={' or '.join(owners)} only: choose that, or leave {key} out"
            )
    if section == "trainer":
        if name in PASSED_ON:
            return ConfigError(f"{key} is an argument of Lightning's Trainer: write +{key}=…")
        try:
            check_trainer([name])
        except ConfigError as refused:
            return refused
    of_options = {f"{group}.{its}" for group in groups() for keys in keys_of_options(group).values() for its in keys}
    if key.startswith("data.sources."):
        source, _, own = key.rpartition(".")
        near = difflib.get_close_matches(own, {it for keys in keys_of_options("data").values() for it in keys}, n=1)
        if near and near[0] != own:
            return ConfigError(f"unknown key {key}: did you mean {source}.{near[0]}?")
        return ConfigError(f"unknown key {key}: choose data=mixed, or add it to a source of your own as +{key}=…")
    everything = {*known, *of_options, *(f"trainer.{name}" for name in PASSED_ON)} - {key}
    leaf = key.rpartition(".")[2]
    same = sorted(k for k in everything if "." in k and k.rpartition(".")[2] == leaf)
    if same := [k for k in same if k.startswith(f"{section}.")] or same:
        return ConfigError(f"unknown key {key}: did you mean {' or '.join(same)}?")
    siblings = {k.partition(".")[2]: k for k in everything if name and k.startswith(f"{section}.")}
    if near := difflib.get_close_matches(name, siblings, n=1):
        return ConfigError(f"unknown key {key}: did you mean {siblings[near[0]]}?")
    if siblings:  # by its section alone, the whole key is near to any sibling
        return ConfigError(f"unknown key {key}: {suggest(name, sorted(siblings.values()))}")
    return ConfigError(f"unknown key {key}: {suggest(key, [k for k in everything if ('.' in k) == ('.' in key)])}")


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys, groups included."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat_keys(value, f"{prefix}{key}.")
