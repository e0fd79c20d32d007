"""Check values by pydantic, and say in one line what is wrong: the key as typed, and pydantic's own words."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from math import isfinite
from typing import Any, ClassVar, Self

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from qnmixer.errors import ConfigError

NAMED = "callbacks", "logger", "metrics"  # groups with several sections, each under a name
VALUES = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, coerce_numbers_to_str=True)
_SMALLEST, _LARGEST = 1.2e-38, 3.4e38  # magnitudes of 32-bit floats, in which networks and optimizers compute


class Section(BaseModel):
    """Keys of the config with their types, bounds and defaults. Values of another type are refused, so are other keys.

    A rule between its keys is a validator that raises ValueError. Its message begins with the key.
    """

    command: ClassVar[str] = ""  # whose config it is, also its file in conf/; or another file. "": a part of a run

    model_config = VALUES | ConfigDict(extra="forbid", protected_namespaces=(), defer_build=True)

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """Check a composed config. Raises ConfigError, which names the key and how to fix it."""
        return validated(cls, plain_values(cfg))

    def plain(self) -> dict[str, Any]:
        """Its keys as on a command line, as numbers, texts, lists and dicts."""
        return self.model_dump(by_alias=True, serialize_as_any=True)

    def changed(self, **values: Any) -> "Any":
        """The same section with other values of some keys, checked again."""
        return validated(type(self), self.plain() | values)


def validated(schema: Any, values: Any, section: str = "") -> Any:
    """Values of a composed config, resolved, as a model or a type. Raises ConfigError, which names the key.

    section: what messages put before the keys, such as model; "" for root keys.
    """
    is_model = isinstance(schema, type) and issubclass(schema, BaseModel)
    try:
        read = schema.model_validate if is_model else adapter_of(schema).validate_python
        checked = read(values)
    except ValidationError as error:
        raise _line_of(error, schema, values, section) from error
    _check_numbers(section, values, checked)
    return checked


@cache
def _adapter_of(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=VALUES)


def adapter_of(hint: Any) -> TypeAdapter[Any]:
    """What checks values of a type. To build it takes longer than to check a hundred values, so it is kept."""
    try:
        return _adapter_of(hint)
    except TypeError:  # the type has no hash, or pydantic does not know it, and says so again
        return TypeAdapter(hint, config=VALUES)


def _check_numbers(key: str, value: Any, checked: Any) -> None:
    """Raise ConfigError for what pydantic takes: true as 1, 1.1 as text, and numbers that 32 bits cannot hold."""
    checked = dict(checked) if isinstance(checked, BaseModel) else checked
    if isinstance(value, Mapping) and isinstance(checked, Mapping):
        for name in [name for name in checked if name in value]:
            _check_numbers(f"{key}.{name}".lstrip("."), value[name], checked[name])
    elif isinstance(value, list | tuple) and isinstance(checked, list | tuple):
        for part, item in zip(value, checked, strict=False):
            _check_numbers(key, part, item)
    elif isinstance(value, bool) and isinstance(checked, int | float) and not isinstance(checked, bool):
        raise ConfigError(f"{key}={as_typed(value)} should be a number")
    elif isinstance(value, int | float) and isinstance(checked, str) and not key.endswith("precision"):  # 32 is one
        raise ConfigError(f"{key}={as_typed(value)} should be text, not a number: put quotes around it, as '\"1.10\"'")
    elif isinstance(checked, float) and isfinite(checked) and checked and not _SMALLEST < abs(checked) < _LARGEST:
        raise ConfigError(f"{key}={_shortened(value)} should be a 32-bit float: 0, or between 1e-37 and 3e38")


def _line_of(error: ValidationError, schema: Any, values: Any, section: str) -> ConfigError:
    """The first error of pydantic: its key, its value, and pydantic's own words."""
    fault = error.errors()[0]
    kind, says = fault["type"], fault["msg"].removeprefix("Value error, ")
    key, fields = _place_of(fault["loc"], schema, values, section)
    if kind == "extra_forbidden":
        return unknown_key(key, [f"{key.rpartition('.')[0]}.{field}".lstrip(".") for field in fields])
    if kind == "value_error":  # a rule inside a section, which begins with a key of it
        return ConfigError(f"{key}.{says}".lstrip("."))
    if kind == "missing":
        return has_no_value(f"{key}.{fault['loc'][-1]}".lstrip("."))
    says = says.removeprefix("Input") if says.startswith("Input ") else f": {says[0].lower()}{says[1:]}"
    return ConfigError(f"{key}={_shortened(fault['input'])}{says}")


def _place_of(loc: Iterable[int | str], schema: Any, values: Any, section: str) -> tuple[str, Collection[str]]:
    """The key of a fault, and the fields beside it. `loc` also has names of members of unions, and numbers of items."""
    key = section
    for part in loc:
        if isinstance(values, Mapping) and part in values:
            key, values = f"{key}.{part}".lstrip("."), values[part]
            if part in getattr(schema, "model_fields", ()):
                schema = schema.model_fields[part].annotation
    return key, getattr(schema, "model_fields", ())


def as_typed(value: Any) -> str:
    """A value as on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _shortened(value: Any) -> str:
    """A value as on the command line, but not all of a long one."""
    text = as_typed(value)
    return text if len(text) < 200 else f"{text[:60]}…"


def plain_values(cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The values of a composed config, resolved; plain values unchanged. Raises ConfigError for a missing value."""
    if not isinstance(cfg, DictConfig):
        return {str(key): value for key, value in cfg.items()}
    try:
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise has_no_value(str(error.full_key)) from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def has_no_value(key: str) -> ConfigError:
    """The error for a key that needs a value."""
    return ConfigError(f"{key} has no value: give one with {key}=…")


_MOST_KEYS, _NEAREST = 24, 12  # so many keys are in a message, and so many of a longer list


def unknown_key(key: str, keys: Iterable[str] = (), owner: str = "the config") -> ConfigError:
    """The error for a key that its owner does not have: the nearest of the `keys` that it has, or those beside it."""
    parent, _, name = key.rpartition(".")
    split = [(other, *other.rpartition(".")[::2]) for other in keys]
    beside = {last: other for other, place, last in split if place == parent}
    near = [other for other, _, last in split if last == name]
    if not 0 < len(near) < 3:
        near = [beside[last] for last in difflib.get_close_matches(name, beside, n=1)]
    if near:
        return ConfigError(f"unknown key {key}: did you mean {' or '.join(near)}?")
    is_long = len(beside) > _MOST_KEYS
    listed = difflib.get_close_matches(name, beside, n=_NEAREST, cutoff=0) if is_long else [*beside]
    more = f", … ({len(beside)} keys, which --help=all lists)" * is_long
    return ConfigError(f"unknown key {key}: {owner} has {', '.join(listed) or 'no such key'}{more}")
