"""Config sections that name what they build: `_target_`, with its arguments as keys beside it.

The options of a group are the files of its folder in conf/. No other list exists.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import OmegaConf

from qnmixer.config.search_path import CONF
from qnmixer.errors import ConfigError

if TYPE_CHECKING:
    from qnmixer.config.run import Config

TARGET = "_target_"
_NO_OPTIONS = ("_", "as_trained", "custom")  # parts of other files; for evaluate only; for the user's classes


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

    @classmethod
    def schema_of(cls, section: Mapping[str, Any]) -> type["Target"]:
        """The schema of a section of this group. Raises ConfigError for a section without a target."""
        if not isinstance(section.get(TARGET), str):
            first = next(iter(options(cls.group)), "…")
            raise ConfigError(
                f"{cls.group} has no {TARGET} (as_trained is for evaluate only): choose an option, as in "
                f"{cls.group}={first}"
            )
        return cls

    @classmethod
    def odd_argument(cls, target: str, arguments: Mapping[str, Any]) -> str | None:
        """The first argument that a section with this target cannot have. None: the target itself decides."""
        return None

    @property
    def name(self) -> str:
        """The option that chooses it, as in `GROUP=NAME`; the target itself if conf/ has no such option."""
        return option_of(self.group, self._target_)

    def targets(self) -> dict[str, str]:
        """All classes and functions that it names, by key."""
        return {f"{self.group}.{TARGET}": self._target_}

    def check(self, run: "Config") -> None:
        """Check the rules between its keys, and with other sections. Raises ConfigError."""

    def choice(self) -> list[str]:
        """The overrides that choose this target."""
        if self.name != self._target_:
            return [f"{self.group}={self.name}"]
        return [f"{self.group}=custom", f"{self.group}.{TARGET}={self._target_}"]


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
