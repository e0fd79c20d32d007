"""Config sections that name what they build: `_target_`, with its arguments as keys beside it.

A schema has the types, bounds and rules of these keys. It is in the file of its group, and is found by the target. The
options of a group are the files of its folder in conf/. No other list exists.
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
_NO_OPTIONS = ("_", "as_trained", "custom")  # parts of other files; for evaluate only; for the user's classes
_OURS = "qnmixer."


@dataclass(kw_only=True)
class Custom:
    """A class or function, and its arguments.

    Attributes:
        _target_: module.name of the class or function.
        arguments: keys of the section that are not in its schema. They become keyword arguments of the target.
    """

    _target_: str
    arguments: dict[str, Any] = field(default_factory=dict)


def split_arguments(schema: type[Custom], value: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a section into the keys of its schema and the arguments of its target."""
    known = {f.name for f in fields(schema)} - {"arguments"}
    return (
        {key: item for key, item in value.items() if key in known},
        {str(key): item for key, item in value.items() if key not in known},
    )


def keys_of(section: Any) -> dict[str, Any]:
    """The keys of a section as on a command line: arguments of the target stand beside the other keys."""
    keys = asdict(section)
    return keys | keys.pop("arguments") if isinstance(section, Custom) else keys


@dataclass(kw_only=True)
class Target(Custom):
    """A section that names a class or function. The options of its group are listed in conf/ only.

    Attributes:
        group: the section's name.
    """

    group: ClassVar[str]

    @property
    def name(self) -> str:
        """The option that chooses it, as in `GROUP=NAME`; the target itself if conf/ has no such option."""
        return option_of(self.group, self._target_)

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the target, except those that are targets themselves."""
        named = {key.removeprefix(f"{self.group}.") for key in self.targets()}
        return {key: value for key, value in keys_of(self).items() if key not in named}

    def targets(self) -> dict[str, str]:
        """All classes and functions that it names, by key."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("target")}
        return {f"{self.group}.{key}": it for key, it in {TARGET: self._target_, **named}.items() if it is not None}

    def check(self, run: "Config") -> None:
        """Check the rules between its keys, and with other sections. Raises ConfigError."""

    def choice(self) -> list[str]:
        """The overrides that choose this target."""
        if self.name != self._target_:
            return [f"{self.group}={self.name}"]
        return [f"{self.group}=custom", f"{self.group}.{TARGET}={self._target_}"]


_T = TypeVar("_T", bound=Target)
_SCHEMAS: dict[str, type[Target]] = {}
_OPEN: list[type[Target]] = []


def schema(*targets: str) -> Callable[[type[_T]], type[_T]]:
    """Register a dataclass as the schema of these targets. Without targets it is that of all others in its group."""

    def register(cls: type[_T]) -> type[_T]:
        _SCHEMAS.update(dict.fromkeys(targets, cls))
        if not targets:
            _OPEN.append(cls)
        return cls

    return register


def schema_of_target(group: type[Target], section: Mapping[str, Any]) -> type[Target]:
    """The schema of a section with this target.

    Without a schema of its own, it is the schema without a target that shares the most keys. Raises ConfigError for a
    section without a target.

    Args:
        group: the base class of the group's schemas.
    """
    target = section.get(TARGET)
    if not isinstance(target, str):
        first = next(iter(options(group.group)), "…")
        raise ConfigError(
            f"{group.group} has no {TARGET} (as_trained is for evaluate only): choose an option, as in "
            f"{group.group}={first}"
        )
    if target in _SCHEMAS:
        if not issubclass(_SCHEMAS[target], group):
            raise ConfigError(f"{group.group}.{TARGET}={target} is no {group.group}: choose another")
        return _SCHEMAS[target]
    # A user's own reader of files has the schema of our readers. Its keys, such as root and split, show that it is one.
    known = sorted((it for it in _OPEN if issubclass(it, group)), key=lambda it: len(_needed(it)))
    return next((it for it in reversed(known) if _needed(it) <= section.keys()), known[0])


def _needed(cls: type[Target]) -> set[str]:
    return {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}


def check_arguments(cls: type[Target], target: str, arguments: Mapping[str, Any]) -> str | None:
    """The first argument that a section cannot have: not in its schema, or a key of another option. None if all fit.

    Schemas of qnmixer's own classes know all keys. For other targets, the signature is checked when they are built.
    Raises ConfigError for Hydra's own keys that have no use here.
    """
    if odd := next((key for key in arguments if key.startswith("_")), None):
        raise ConfigError(f"{cls.group}.{odd} is not known: give {TARGET} and arguments of the target only")
    if target in _SCHEMAS and target.startswith(_OURS):
        return next(iter(arguments), None)
    if not arguments or (mine := option_of(cls.group, target)) == target:
        return None
    keys = keys_of_options(cls.group)
    others = {key for option, its in keys.items() if option != mine for key in its} - {*keys[mine]} | {"name"}
    return next((key for key in arguments if key in others), None)


def groups() -> list[str]:
    """The groups of a run whose options set the keys of one section."""
    others = ("callbacks", "experiment", "hydra", "local", "logger", "metrics")
    return sorted(path.name for path in CONF.glob("*/") if path.name not in others)


def options(group: str) -> list[str]:
    """The options of a group in conf/, by name."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith(_NO_OPTIONS))


@cache
def names_of(group: str) -> list[str]:
    """The names of the options of a group that have a name and no target."""
    texts = [(CONF / group / f"{option}.yaml").read_text() for option in options(group)]
    return list(dict.fromkeys(re.findall(r'^(?:debug: {)?name: "?(\w+)', "\n".join(texts), re.MULTILINE)))


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
        if line := re.search(rf"^{TARGET}: (\S+)", (CONF / group / f"{option}.yaml").read_text(), re.MULTILINE):
            found[line[1]] = option
    return found


def option_of(group: str, target: str) -> str:
    """The option of a target; the target itself if conf/ has none."""
    return _by_target(group).get(target, target)


def with_names(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The result of `to_plain` for readers: each section with a target also has the name of its option."""
    return {
        key: {"name": option_of(key, value[TARGET]), **value} if isinstance(value, dict) and TARGET in value else value
        for key, value in plain.items()
    }
