"""The names of keys, and the answer to one that does not exist."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

from qnmixer.config.groups import GROUPS
from qnmixer.config.option import suggest
from qnmixer.config.trainer import PASSED_ON, REFUSED, refusal
from qnmixer.errors import ConfigError

_OF_LIGHTNING = [f"trainer.{name}" for name in PASSED_ON]


def unknown_key(key: str, known: Collection[str]) -> ConfigError:
    """The error for a key that does not exist, with where it belongs or the nearest that does."""
    section, _, name = key.partition(".")
    owners = [owner for owner, schema in GROUPS.get(section, {}).items() if name in {f.name for f in fields(schema)}]
    if owners:
        return ConfigError(f"{key} goes with {section}={' or '.join(owners)} only: choose that, or leave {key} out")
    if section == "trainer" and name in PASSED_ON:
        return ConfigError(f"{key} is an argument of Lightning's Trainer: write +{key}=…")
    if section == "trainer" and name in REFUSED:
        return ConfigError(refusal(name))
    if key.startswith("data.sources."):
        source, _, own = key.rpartition(".")
        if own not in _keys_of("data") and (near := difflib.get_close_matches(own, _keys_of("data"), n=1)):
            return ConfigError(f"unknown key {key}: did you mean {source}.{near[0]}?")
        return ConfigError(f"unknown key {key}: choose data=mixed, or add it to a source of your own as +{key}=…")
    everything = {*known, *(f"{group}.{key}" for group in GROUPS for key in _keys_of(group)), *_OF_LIGHTNING} - {key}
    leaf = key.rpartition(".")[2]
    same = sorted(k for k in everything if "." in k and k.rpartition(".")[2] == leaf)
    if same:
        return ConfigError(f"unknown key {key}: did you mean {' or '.join(same)}?")
    siblings = {k.partition(".")[2]: k for k in everything if name and k.startswith(f"{section}.")}
    if near := difflib.get_close_matches(name, siblings, n=1):
        return ConfigError(f"unknown key {key}: did you mean {siblings[near[0]]}?")
    return ConfigError(f"unknown key {key}: {suggest(key, [k for k in everything if ('.' in k) == ('.' in key)])}")


def _keys_of(group: str) -> set[str]:
    """Keys of all variants of a group."""
    return {f.name for schema in GROUPS[group].values() for f in fields(schema)} - {"name", "arguments"}


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys, groups included."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat_keys(value, f"{prefix}{key}.")
