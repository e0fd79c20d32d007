"""Values of keys, checked against the types and bounds that a dataclass or a signature declares. By pydantic.

`Annotated[int, Ge(1)]`, `Literal["a", "b"]` and `float | None` say all that a key may be.
"""

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from math import isfinite
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from qnmixer.engine.config.options import answer, owners, unknown_key
from qnmixer.engine.plugins import parameters_of
from qnmixer.errors import ConfigError, PluginError

_SMALLEST, _LARGEST = 1.2e-38, 3.4e38
"""Magnitudes of 32-bit floats, in which networks and optimizers compute."""
_OWN_WORDS = {
    "callable_type": "Input is no class or function: give module.name",
    "missing": "Input has too few values",
}
"""By pydantic's type of an error, where its own words do not say what to type."""


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
        first = error.errors()[0]
        if isinstance(value, int | float) and first["type"] == "literal_error":  # precision=32
            return converted(key, str(value), hint)
        for part in first["loc"]:
            if isinstance(value, Mapping) and part in value:
                key, value = f"{key}.{part}", value[part]
        if way := answer(f"{key}={_as_typed(first['input'])}"):
            raise ConfigError(way) from error
        says = _OWN_WORDS.get(first["type"], first["msg"])  # "Input should be …"
        says = says.removeprefix("Input") if says.startswith("Input ") else f": {says[0].lower()}{says[1:]}"
        if first["type"] in ("list_type", "tuple_type"):
            says = f"{says}: write {key}=[…]"
        raise ConfigError(f"{key}={_as_typed(first['input'])}{says}") from error
    except (PydanticUserError, NameError):
        return value
    for given, taken in zip(_items(value), _items(found), strict=False):
        if isinstance(given, bool) and isinstance(taken, int | float) and not isinstance(taken, bool):
            raise ConfigError(f"{key}={_as_typed(value)} should be a number")  # pydantic takes true as 1
        if isinstance(taken, float) and isfinite(taken) and taken and not _SMALLEST < abs(taken) < _LARGEST:
            raise ConfigError(f"{key}={_as_typed(value)} should be a 32-bit float: 0, or between 1e-37 and 3e38")
    return found


def _items(value: Any) -> list[Any]:
    """The items of a list, or the value alone."""
    return [*value] if isinstance(value, list | tuple) else [value]


def _as_typed(value: Any) -> str:
    """A value as on the command line, shortened."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) < 200 else f"{text[:60]}…"


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


def check_names(
    section: str,
    target: str,
    function: Callable[..., Any],
    arguments: Collection[str],
    n_ours: int = 0,
    ours: Collection[str] = (),
    *,
    partial: bool = False,
) -> None:
    """Raise PluginError for an argument that a target does not have, or that is missing.

    Args:
        section: what messages put before their names, such as model.
        target: the name of the function or class.
        function: it.
        arguments: names of those from the config section.
        n_ours: positional arguments that come from qnmixer.
        ours: names of arguments that come from qnmixer.
        partial: others may be missing.
    """
    parameters = parameters_of(function)
    if parameters is None:
        return
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    own = {it.name: it for it in parameters[n_ours:] if it.kind in named and it.name not in ours}
    takes_all = any(it.kind is inspect.Parameter.VAR_KEYWORD for it in parameters)
    for odd in (name for name in arguments if name not in own and not takes_all):
        if f"{section}.{odd}" in owners():
            raise unknown_key(f"{section}.{odd}")
        if near := difflib.get_close_matches(odd, own, n=1):
            raise PluginError(f"unknown key {section}.{odd}: did you mean {section}.{near[0]}?")
        takes = f"only {', '.join(own)}" if own else "and takes none"
        raise PluginError(f"{section}.{odd}: {target} has no such argument, {takes}")
    for name, parameter in own.items():
        if parameter.default is parameter.empty and name not in arguments and not partial:
            raise PluginError(f"{section} needs an argument {name}: give it as +{section}.{name}=VALUE")


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


def as_text(value: Any) -> Any:
    """Values with every ${…} as plain text, which OmegaConf will not resolve. `plain_values` resolved the others."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {key: as_text(item) for key, item in value.items()}
    return [as_text(item) for item in value] if isinstance(value, list) else value
