"""The options of the groups: the files of conf/, their keys, and the values that a class or function takes for them.

No other list of options exists. So a key that does not exist is compared with the keys of these files. Types and bounds
stand in the signature of the class, and pydantic checks them: `Annotated[int, Ge(1)]`, `Literal["a", "b"]` and
`float | None` say all that a key may be.
"""

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from functools import cache, lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from qnmixer.engine.config.compose import CONF
from qnmixer.engine.plugins import parameters_of
from qnmixer.errors import ConfigError, PluginError

# Options and their keys

TARGET = "_target_"
_NO_OPTIONS = ("_", "as_trained", "custom")  # parts of other files; for evaluate only; for the user's classes


@cache
def options(group: str) -> list[str]:
    """The options of a group in conf/, by name."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith(_NO_OPTIONS))


def files_of(group: str, option: str) -> list[tuple[Path, str]]:
    """The files of an option, those that it includes first. Each with the key at which it stands (FILE@KEY), or ""."""
    path = CONF / group / f"{option}.yaml"
    if not path.is_file():
        return []
    defaults = OmegaConf.select(OmegaConf.load(path), "defaults", default=[])
    names = [name.partition("@") for name in defaults if isinstance(name, str)]
    return [(file, at) for name, _, at in names for file, _ in files_of(group, name)] + [(path, "")]


def values_of_option(group: str, option: str) -> dict[str, Any]:
    """The values in the files of an option, not resolved."""
    merged = OmegaConf.create()
    for path, at in files_of(group, option):
        if at:
            OmegaConf.update(merged, at, OmegaConf.load(path))
        else:
            merged.merge_with(OmegaConf.load(path))
    values = OmegaConf.to_container(merged, resolve=False)
    assert isinstance(values, dict)
    values.pop("defaults", None)
    return {str(key): value for key, value in (values.get(group) or values).items()}  # _global_: its group


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


_WITHOUT_KEYS = ("experiment", "hydra", "local")  # groups that set keys of other groups


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


# Keys that do not exist

_MOST_LISTED = 14
"""Keys in a message: those of trainer. Those of model or data have many that fit other options only."""


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
    others = sorted(it for it in {*known, *owners()} if not it.endswith(TARGET))
    same = [it for it in others if it.endswith(f".{leaf}")]
    beside = {it.rpartition(".")[2]: it for it in others if it.rpartition(".")[0] == parent}
    near = [beside[its] for its in difflib.get_close_matches(leaf, beside, n=1)]
    if found := [it for it in same if it.startswith(f"{section}.")] or same or near:
        return ConfigError(f"unknown key {key}: did you mean {' or '.join(found)}?")
    if parent and 0 < len(beside) <= _MOST_LISTED:
        return ConfigError(f"unknown key {key}: choose {', '.join(sorted(beside.values()))}")
    return ConfigError(f"unknown key {key}: --cfg job prints all keys, --cfg hydra those of Hydra")


def answer(word: str) -> str | None:
    """The message for a key, or an option as GROUP=OPTION, that people know from elsewhere; None for another word."""
    ways = (way for known, way in _answers().items() if f"{word}.".startswith(f"{known}."))
    return next((f"{word} is not known here: {way}" for way in ways), None)


@cache
def _answers() -> dict[str, str]:
    values = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("answers.yaml")))
    assert isinstance(values, dict)
    return {str(key): str(way) for key, way in values.items()}


# Values


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


def as_text(value: Any) -> Any:
    """Values with every ${…} as plain text, which OmegaConf will not resolve. `plain_values` resolved the others."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {key: as_text(item) for key, item in value.items()}
    return [as_text(item) for item in value] if isinstance(value, list) else value


def has_no_value(key: str) -> ConfigError:
    """The error for a key that needs a value."""
    return ConfigError(f"{key} has no value: give one with {key}=…")


_SMALLEST, _LARGEST = 1.2e-38, 3.4e38
"""Magnitudes of 32-bit floats, in which networks and optimizers compute."""


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
        if way := answer(f"{key}={_shortened(first['input'])}"):
            raise ConfigError(way) from error
        says = first["msg"]  # "Input should be …"
        says = says.removeprefix("Input") if says.startswith("Input ") else f": {says[0].lower()}{says[1:]}"
        if first["type"] == "string_type" and not isinstance(first["input"], Mapping | list):
            says = f'{says}: put quotes around it, as in "{as_typed(first["input"])}"'
        if first["type"] in ("list_type", "tuple_type"):
            says = f"{says}: write {key}=[…]"
        raise ConfigError(f"{key}={_shortened(first['input'])}{says}") from error
    except (PydanticUserError, NameError):
        return value
    pairs = zip(value, found, strict=False) if isinstance(found, list | tuple) else [(value, found)]
    for given, taken in pairs:
        if isinstance(given, bool) and isinstance(taken, int | float) and not isinstance(taken, bool):
            raise ConfigError(f"{key}={_shortened(value)} should be a number")  # pydantic takes true as 1
        if isinstance(taken, float) and isfinite(taken) and taken and not _SMALLEST < abs(taken) < _LARGEST:
            raise ConfigError(f"{key}={_shortened(value)} should be a 32-bit float: 0, or between 1e-37 and 3e38")
    return found


def as_typed(value: Any) -> str:
    """A value as on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _shortened(value: Any) -> str:
    """A value as on the command line, but not all of a long one."""
    text = as_typed(value)
    return text if len(text) < 200 else f"{text[:60]}…"


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


# Arguments of a class or function


def converted_arguments(prefix: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a function or class as the types that its signature declares.

    Args:
        prefix: what messages put before their names, such as "model."; "" for root keys.
        function: it.
        arguments: by name. Those without a declared type stay as they are.

    Raises ConfigError for a value that does not fit.
    """
    hints = {it.name: _hint(function, it) for it in parameters_of(function) or () if it.name in arguments}
    return {
        name: converted(f"{prefix}{name}", value, hints[name]) if name in hints else value
        for name, value in arguments.items()
    }


def check_names(
    section: str,
    target: str,
    function: Callable[..., Any],
    arguments: Collection[str],
    n_ours: int = 0,
    ours: Collection[str] = (),
) -> None:
    """Raise PluginError for an argument that a target does not have, or that is missing.

    Args:
        section: what messages put before their names, such as model.
        target: the name of the function or class.
        function: it.
        arguments: names of those from the config section.
        n_ours: positional arguments that come from qnmixer.
        ours: names of arguments that come from qnmixer.
    """
    parameters = parameters_of(function)
    if parameters is None:
        return
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    own = {it.name: it for it in parameters[n_ours:] if it.kind in named and it.name not in ours}
    takes_all = any(it.kind is inspect.Parameter.VAR_KEYWORD for it in parameters)
    for odd in (name for name in arguments if name not in own and not takes_all):
        if f"{section}.{odd}" in owners() and option_of(section, target) == target:  # of the option before `_target_`
            choice = f"{section}=custom {section}.{TARGET}={target}"
            raise PluginError(f"{target} has no argument {odd}, which {section}=… sets: write {choice}")
        if answer(f"{section}.{odd}") or f"{section}.{odd}" in owners():
            raise unknown_key(f"{section}.{odd}")
        if near := difflib.get_close_matches(odd, own, n=1):
            raise PluginError(f"unknown key {section}.{odd}: did you mean {section}.{near[0]}?")
        takes = f"only {', '.join(own)}" if own else "and takes none"
        raise PluginError(f"{section}.{odd}: {target} has no such argument, {takes}")
    for name, parameter in own.items():
        if parameter.default is parameter.empty and name not in arguments:
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
