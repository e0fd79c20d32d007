"""Sections that say what they build: `_target_`, and the arguments of the target as keys beside it.

A schema has the types, bounds and rules of a target's keys. It stands in the config file of its group, and is found by
the target. Nothing lists the options of a group but its folder in conf/.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from omegaconf import OmegaConf

from qnmixer.config.search_path import CONF
from qnmixer.errors import ConfigError

if TYPE_CHECKING:
    from qnmixer.config.run import Config

TARGET = "_target_"
_NO_OPTIONS = ("_", "as_trained", "custom")  # parts of others, for evaluate alone, of the user's own
_OURS = "qnmixer."


@dataclass(kw_only=True)
class Custom:
    """A class or function, and its arguments.

    Attributes:
        _target_: module.name of the class or function.
        arguments: what the section has beside the keys of its schema. The target gets them by name.
    """

    _target_: str
    arguments: dict[str, Any] = field(default_factory=dict)


def split_arguments(schema: type[Custom], value: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of a section that its schema knows, and its arguments."""
    known = {f.name for f in fields(schema)} - {"arguments"}
    return (
        {key: item for key, item in value.items() if key in known},
        {str(key): item for key, item in value.items() if key not in known},
    )


def keys_of(section: Any) -> dict[str, Any]:
    """The keys of a section as a command line has them: arguments of a target stand beside the others."""
    keys = asdict(section)
    return keys | keys.pop("arguments") if isinstance(section, Custom) else keys


@dataclass(kw_only=True)
class Target(Custom):
    """A section that names a class or function, in a group whose options stand in conf/ alone.

    Attributes:
        group: the section's name.
    """

    group: ClassVar[str]

    @property
    def name(self) -> str:
        """The option that chooses it, as in `GROUP=NAME`; the target itself where conf/ has none."""
        return option_of(self.group, self._target_)

    def keywords(self) -> dict[str, Any]:
        """What the target is called with by name, but for those that are targets themselves."""
        named = {key.removeprefix(f"{self.group}.") for key in self.targets()}
        return {key: value for key, value in keys_of(self).items() if key not in named}

    def targets(self) -> dict[str, str]:
        """All classes and functions that it names, by their keys."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("target")}
        return {f"{self.group}.{key}": it for key, it in {TARGET: self._target_, **named}.items() if it is not None}

    def check(self, run: "Config") -> None:
        """The rules between its keys, and with those of the run. Raises ConfigError."""

    def choice(self) -> list[str]:
        """The overrides that choose this target."""
        if self.name != self._target_:
            return [f"{self.group}={self.name}"]
        return [f"{self.group}=custom", f"{self.group}.{TARGET}={self._target_}"]


_T = TypeVar("_T", bound=Target)
_SCHEMAS: dict[str, type[Target]] = {}
_OPEN: list[type[Target]] = []


def schema(*targets: str) -> Callable[[type[_T]], type[_T]]:
    """Have a dataclass be the schema of these targets; without any, of all targets of its group that have no other."""

    def register(cls: type[_T]) -> type[_T]:
        _SCHEMAS.update(dict.fromkeys(targets, cls))
        if not targets:
            _OPEN.append(cls)
        return cls

    return register


def schema_of_target(group: type[Target], section: Mapping[str, Any]) -> type[Target]:
    """The schema of a section: its target's own, or the richest of those without a target whose keys it has.

    Args:
        group: what all schemas of the group derive from.

    Raises ConfigError for a section that names no target.
    """
    target = section.get(TARGET)
    if not isinstance(target, str):
        first = next(iter(options(group.group)), "…")
        raise ConfigError(
            f"{group.group} has no {TARGET} (as_trained is for evaluate alone): choose an option, as in "
            f"{group.group}={first}"
        )
    if target in _SCHEMAS:
        if not issubclass(_SCHEMAS[target], group):
            raise ConfigError(f"{group.group}.{TARGET}={target} is no {group.group}: choose another")
        return _SCHEMAS[target]
    known = sorted((it for it in _OPEN if issubclass(it, group)), key=lambda it: len(_needed(it)))
    return next((it for it in reversed(known) if _needed(it) <= section.keys()), known[0])


def _needed(cls: type[Target]) -> set[str]:
    return {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}


def check_arguments(cls: type[Target], target: str, arguments: Mapping[str, Any]) -> str | None:
    """The first argument that a section cannot have, if any: one that its schema does not know, or another option's.

    A schema of this package's own classes knows all keys. Of other targets the signature is asked, when they are built.

    Raises ConfigError for words of Hydra that have no use here.
    """
    if odd := next((key for key in arguments if key.startswith("_")), None):
        raise ConfigError(f"{cls.group}.{odd} is not known: beside {TARGET} there are the arguments of the target")
    if target in _SCHEMAS and target.startswith(_OURS):
        return next(iter(arguments), None)
    if not arguments or (mine := option_of(cls.group, target)) == target:
        return None
    keys = keys_of_options(cls.group)
    others = {key for option, its in keys.items() if option != mine for key in its} - {*keys[mine]} | {"name"}
    return next((key for key in arguments if key in others), None)


def groups() -> list[str]:
    """The groups of a run whose options have keys of one section."""
    others = ("callbacks", "experiment", "hydra", "local", "logger")
    return sorted(path.name for path in CONF.glob("*/") if path.name not in others)


def options(group: str) -> list[str]:
    """The options of a group that conf/ has ready, by name."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith(_NO_OPTIONS))


@cache
def names_of(group: str) -> list[str]:
    """The names of the options of a group that have a name and no target."""
    texts = [(CONF / group / f"{option}.yaml").read_text() for option in options(group)]
    return list(dict.fromkeys(re.findall(r'^(?:debug: {)?name: "?(\w+)', "\n".join(texts), re.MULTILINE)))


def files_of(path: Path, *, below: bool = False) -> list[Path]:
    """The file of an option, after those of its group that it includes; `below`: also for a part of it (FILE@KEY)."""
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=False) if path.is_file() else {}
    names = values.get("defaults", []) if isinstance(values, dict) else []
    parts = [name.partition("@") for name in names if isinstance(name, str)]
    included = [path.with_name(f"{name}.yaml") for name, at, _ in parts if below or not at]
    return [file for one in included if one.is_file() for file in files_of(one, below=below)] + [path] * path.is_file()


def values_of_option(group: str, option: str) -> dict[str, Any]:
    """What the files of an option say, nothing resolved."""
    merged = OmegaConf.merge(*[{}, *map(OmegaConf.load, files_of(CONF / group / f"{option}.yaml"))])
    values = OmegaConf.to_container(merged, resolve=False)
    assert isinstance(values, dict)
    values.pop("defaults", None)
    return {str(key): value for key, value in (values.get(group) or values).items()}  # of package _global_: its group


@cache
def keys_of_options(group: str) -> dict[str, Collection[str]]:
    """The keys of each option of a group."""
    return {option: values_of_option(group, option).keys() - {TARGET, "name"} for option in options(group)}


@cache
def _by_target(group: str) -> dict[str, str]:
    """Option by target; of several with one target the shortest, as qn_mixer of qn_mixer_paper."""
    found = {}
    for option in sorted(options(group), key=len, reverse=True):
        if line := re.search(rf"^{TARGET}: (\S+)", (CONF / group / f"{option}.yaml").read_text(), re.MULTILINE):
            found[line[1]] = option
    return found


def option_of(group: str, target: str) -> str:
    """The option that stands for a target; the target itself where conf/ has none."""
    return _by_target(group).get(target, target)


def with_names(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What `to_plain` made, for who reads it: each section that has a target with the name of its option."""
    return {
        key: {"name": option_of(key, value[TARGET]), **value} if isinstance(value, dict) and TARGET in value else value
        for key, value in plain.items()
    }
