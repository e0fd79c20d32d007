"""Values of keys, converted to the types that a dataclass or a signature declares, with their bounds. By pydantic.

`Annotated[int, Ge(1)]`, `Literal["a", "b"]` and `float | None` say all that a key may be.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import isfinite
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from qnmixer.engine.plugins import parameters_of
from qnmixer.errors import ConfigError, suggest

_SMALLEST, _LARGEST = 1.2e-38, 3.4e38
"""Magnitudes of 32-bit floats, in which networks and optimizers compute."""
_SAYS = {
    "greater_than_equal": " is too small: give {ge} or more",
    "greater_than": " is too small: give more than {gt}",
    "less_than_equal": " is too large: give {le} or less",
    "less_than": " is too large: give less than {lt}",
    "multiple_of": " is not a multiple of {multiple_of}: choose {nearest}",
    "finite_number": " is not a finite number: give one",
    "int": " is not a whole number: give one",
    "float": " is not a number: give one",
    "bool": " is neither true nor false: give one of them",
    "string": " is not a text: give one",
    "callable": " is no class or function: give module.name",
    "literal": " is not known: {nearest}",
    "tuple": " is not a list: write {key}=[{value}]",
    "list": " is not a list: write {key}=[{value}]",
    "dict": " is not a group of keys: give {key}.NAME=…",
    "missing": " has too few values",
    "too_long": " has too many values: give {max_length}",
}
"""What a message says after KEY=VALUE, by pydantic's name of the error, or its first word."""


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


def converted(key: str, value: Any, hint: Any) -> Any:
    """A value as the type that its hint declares. Types that pydantic does not know fit all values.

    Raises ConfigError for a value that does not fit.
    """
    from pydantic import ValidationError  # late: it takes a tenth of a second
    from pydantic.errors import PydanticUserError

    try:
        found = _adapter(hint).validate_python(value)
    except ValidationError as error:
        if isinstance(value, int | float) and error.errors()[0]["type"] == "literal_error":  # precision=32
            return converted(key, str(value), hint)
        # The error of the value itself says more than those of the other types of a union.
        first = max(error.errors(), key=lambda its: its["type"] in _SAYS)
        raise ConfigError(_line(key, value, dict(first))) from error
    except (PydanticUserError, NameError):
        return value
    for given, taken in zip(_items(value), _items(found), strict=False):
        if isinstance(given, bool) and isinstance(taken, int | float) and not isinstance(taken, bool):
            raise ConfigError(f"{key}={_as_typed(value)} is not a number: give one")  # pydantic takes true as 1
        if isinstance(taken, float) and isfinite(taken) and taken and not _SMALLEST < abs(taken) < _LARGEST:
            says = "large for 32-bit floats: give at most 3e38"
            if abs(taken) < 1:
                says = "small for 32-bit floats: give 0, or at least 1e-37"
            raise ConfigError(f"{key}={_as_typed(value)} is too {says}")
    return found


def _items(value: Any) -> list[Any]:
    """The items of a list, or the value alone."""
    return [*value] if isinstance(value, list | tuple) else [value]


def _line(key: str, value: Any, error: dict[str, Any]) -> str:
    """The message for an error of pydantic, which names the innermost key."""
    for part in error["loc"]:
        if isinstance(value, Mapping) and part in value:
            key, value = f"{key}.{part}", value[part]
    kind, message, context = error["type"], error["msg"], error.get("ctx", {})
    if kind == "literal_error":
        value = error["input"]  # of a list: the item
        choices = re.findall(r"'?([^', ]+)'?(?:, | or |$)", context["expected"])
        context = {"nearest": suggest(str(value), choices)}
    elif kind == "multiple_of":
        context = context | {"nearest": value + -value % context["multiple_of"]}
    given = _as_typed(value)
    if says := _SAYS.get(kind) or _SAYS.get(kind.partition("_")[0]):
        return f"{key}={given}{says.format(key=key, value=given, **context)}"
    return f"{key}={given}: {message[0].lower()}{message[1:]}"


def converted_arguments(section: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a function or class as the types that its signature declares.

    Args:
        section: what messages put before their names, such as model.
        function: it.
        arguments: by name. Those without a declared type stay as they are.

    Raises ConfigError for a value that does not fit.
    """
    hints = {it.name: _hint(function, it) for it in parameters_of(function) or () if it.name in arguments}
    return {
        name: converted(f"{section}.{name}", value, hints[name]) if name in hints else value
        for name, value in arguments.items()
    }


def _hint(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The declared type of an argument. Any if it has none, or one whose names are known to type checkers only."""
    hint = parameter.annotation
    if isinstance(hint, str):
        where = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]  # it is only read
        try:
            hint = eval(hint, getattr(inspect.unwrap(where), "__globals__", {}))  # as typing.get_type_hints does
        except Exception:
            return Any
    return Any if hint is inspect.Parameter.empty else hint


@lru_cache(None)
def _known_adapter(hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    settings = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, coerce_numbers_to_str=True)
    return TypeAdapter(hint, config=settings)


def _adapter(hint: Any) -> Any:
    """Pydantic's validator of a type; most types stand at several keys."""
    try:
        return _known_adapter(hint)
    except TypeError:  # a hint that has no hash
        return _known_adapter.__wrapped__(hint)


def _as_typed(value: Any) -> str:
    """A value as on the command line, shortened."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) < 200 else f"{text[:60]}…"


def as_text(value: Any) -> Any:
    """Values with every ${…} as plain text, which OmegaConf will not resolve. `plain_values` resolved the others."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {key: as_text(item) for key, item in value.items()}
    return [as_text(item) for item in value] if isinstance(value, list) else value
