"""The names of keys, and the message for a key that does not exist."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from qnmixer.config.target import groups, keys_of_options, names_of, options
from qnmixer.config.trainer import PASSED_ON, REFUSED, refusal
from qnmixer.errors import ConfigError, suggest

_OF_LIGHTNING = [f"trainer.{name}" for name in PASSED_ON]


def unknown_key(key: str, known: Collection[str]) -> ConfigError:
    """The error for a key that does not exist. It names the section of the key, or the nearest key that exists."""
    section, _, name = key.partition(".")
    if name == "name" and section in groups() and not names_of(section):
        return ConfigError(f"{key} is no key: choose an option by its name, as in {section}={options(section)[0]}")
    if section in groups() and (owners := [it for it, keys in keys_of_options(section).items() if name in keys]):
        return ConfigError(f"{key} works with {section}={' or '.join(owners)} only: choose that, or leave {key} out")
    if section == "trainer" and name in PASSED_ON:
        return ConfigError(f"{key} is an argument of Lightning's Trainer: write +{key}=…")
    if section == "trainer" and name in REFUSED:
        return ConfigError(refusal(name))
    of_data = {key for keys in keys_of_options("data").values() for key in keys}
    if key.startswith("data.sources."):
        source, _, own = key.rpartition(".")
        if own not in of_data and (near := difflib.get_close_matches(own, of_data, n=1)):
            return ConfigError(f"unknown key {key}: did you mean {source}.{near[0]}?")
        return ConfigError(f"unknown key {key}: choose data=mixed, or add it to a source of your own as +{key}=…")
    elsewhere = {f"{group}.{its}" for group in groups() for keys in keys_of_options(group).values() for its in keys}
    everything = {*known, *elsewhere, *_OF_LIGHTNING} - {key}
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
