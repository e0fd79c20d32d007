"""Check values by pydantic, and say in one line what is wrong: the key as typed, why, and what then works."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from math import isfinite
from typing import Any, ClassVar, Self

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from qnmixer.engine.config.files import OF_A_RUN, TARGET, answers, is_group, options, owners
from qnmixer.errors import ConfigError

NAMED = "callbacks", "logger", "metrics"
"""Groups with several sections, each under a name."""
VALUES = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, coerce_numbers_to_str=True)
_SMALLEST, _LARGEST = 1.2e-38, 3.4e38
"""Magnitudes of 32-bit floats, in which networks and optimizers compute."""
_MOST_LISTED = 14
"""Keys in a message: those of trainer. Those of model or data have many that fit other options only."""


class Section(BaseModel):
    """Keys of the config with their types, bounds and defaults. Values of another type are refused, so are other keys.

    A rule between its keys is a validator that raises ValueError. Its message begins with the key.

    Attributes:
        command: whose config it is, which is also its file in conf/; or another file of keys. "" for a part of a run.
    """

    command: ClassVar[str] = ""

    model_config = VALUES | ConfigDict(extra="forbid", protected_namespaces=(), defer_build=True)

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """Check a composed config. Raises ConfigError, which names the key and how to fix it."""
        config: Self = validated(cls, plain_values(cfg))
        return config

    def plain(self) -> dict[str, Any]:
        """Its keys as on a command line, as numbers, texts, lists and dicts."""
        return self.model_dump(by_alias=True, serialize_as_any=True)

    def changed(self, **values: Any) -> "Any":
        """The same section with other values of some keys, checked again."""
        return validated(type(self), self.plain() | values)


def validated(schema: Any, values: Any, section: str = "") -> Any:
    """Values as a model, or as a type. Raises ConfigError, which names the key and how to fix it.

    Args:
        schema: a model or a type.
        values: of a composed config, resolved.
        section: what messages put before the keys, such as model; "" for root keys.
    """
    is_model = isinstance(schema, type) and issubclass(schema, BaseModel)
    try:
        checked = (
            schema.model_validate(values) if is_model else TypeAdapter(schema, config=VALUES).validate_python(values)
        )
    except ValidationError as error:
        raise _line_of(error, schema, values, section) from error
    _check_numbers(section, values, checked)
    return checked


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
        raise ConfigError(
            f"{key}={as_typed(value)} should be text, but was read as a number: put quotes around it, as '\"1.10\"'"
        )
    elif isinstance(checked, float) and isfinite(checked) and checked and not _SMALLEST < abs(checked) < _LARGEST:
        raise ConfigError(f"{key}={_shortened(value)} should be a 32-bit float: 0, or between 1e-37 and 3e38")


def _line_of(error: ValidationError, schema: Any, values: Any, section: str) -> ConfigError:
    """The first error of pydantic, in words of the command line."""
    fault = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")  # a key of another option first
    kind, says, wrong = fault["type"], fault["msg"], fault["input"]
    key, fields = _place_of(fault["loc"], schema, values, section)
    if is_missing := kind == "missing" and isinstance(fault["loc"][-1], str):
        key = f"{key}.{fault['loc'][-1]}".lstrip(".")
    group, _, name = key.partition(".")
    if kind == "extra_forbidden" and key == "experiment":  # a file without that line sets keys of its group
        return ConfigError("the file of the experiment has another package: begin it with # @package _global_")
    if kind == "extra_forbidden":
        only = None if getattr(schema, "command", "") in ("", *OF_A_RUN) else [*schema.model_fields]
        return unknown_key(key, [f"{_parent(key)}.{field}".lstrip(".") for field in fields], only)
    if kind == "value_error":  # a rule inside a section, which begins with a key of it
        return ConfigError(f"{key}.{says.removeprefix('Value error, ')}".lstrip("."))
    if is_missing and group in NAMED and name.endswith(TARGET):
        key = key.removesuffix(f".{TARGET}")
        if name.partition(".")[0] in options(group):
            return ConfigError(f"{key} works with {group}={name.partition('.')[0]} only: choose that, or leave it out")
        return ConfigError(f"{key} names no class: give +{key}.{TARGET}=my_file.MyClass")
    if (is_missing and name == TARGET) or (kind == "union_tag_invalid" and "name" not in (wrong or ())):
        return ConfigError(f"{group} has no {TARGET}: choose one of its options, {', '.join(options(group))}")
    if kind == "union_tag_invalid":
        return ConfigError(
            f"{key}.name={as_typed(wrong['name'])} is not known: choose one of {', '.join(options(group))}"
        )
    if kind == "union_tag_not_found":
        return has_no_value(f"{key}.name")
    if is_missing:
        return ConfigError(f"the config has no {key}: choose one with {key}=…") if is_group(key) else has_no_value(key)
    if kind.startswith("model") and not isinstance(wrong, Mapping):
        way = f"name a key of it, as in {key}.KEY=VALUE" if name else "choose one of its options by name"
        return ConfigError(f"{key}={as_typed(wrong)} is not a group of keys: {way}")
    if line := answer(word := f"{key}={_shortened(wrong)}"):
        return ConfigError(line)
    says = says.removeprefix("Input") if says.startswith("Input ") else f": {says[0].lower()}{says[1:]}"
    if kind in ("list_type", "tuple_type"):
        says = f"{says}: write {key}=[…]"
    if wrong == "None":
        says = f"{says}: write {key}=null for none"
    return ConfigError(f"{word}{says}")


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


def unknown_key(key: str, more_keys: Collection[str] = (), only: Collection[str] | None = None) -> ConfigError:
    """The error for a key that does not exist: the options that have it, or the nearest key.

    Args:
        key: as typed.
        more_keys: keys beside those of the options in conf/.
        only: the keys of a command that has no others; None: all of a run.
    """
    section, _, name = key.partition(".")
    if line := answer(key, only):
        return ConfigError(line)
    if name == "name":
        example = f"{section}={options(section)[0]}" if is_group(section) else "model=qn_mixer"
        return ConfigError(f"{key} is no key: choose an option by its name, as in {example}")
    if having := owners("train" if only is None else "evaluate").get(key):
        return ConfigError(f"{key} works with {section}={' or '.join(having)} only: choose that, or leave {key} out")
    if having := owners("evaluate").get(key):
        return ConfigError(f"{key} is for evaluate with {section}={' or '.join(having)}: leave it out")
    if meant := near_keys(key, more_keys, only):
        return ConfigError(f"unknown key {key}: did you mean {' or '.join(meant)}?")
    beside = [candidate for candidate in _candidates(section, more_keys, only) if _parent(candidate) == _parent(key)]
    if _parent(key) and 0 < len(beside) <= _MOST_LISTED:
        return ConfigError(f"unknown key {key}: choose {', '.join(beside)}")
    return ConfigError(f"unknown key {key}: --cfg job prints all keys, --cfg hydra those of Hydra")


def near_keys(key: str, more_keys: Collection[str] = (), only: Collection[str] | None = None) -> list[str]:
    """The keys that somebody may have meant: those with the same last name, else the nearest. As in `unknown_key`."""
    section, leaf = key.partition(".")[0], key.rpartition(".")[2]
    keys, letters = _candidates(section, more_keys, only), re.sub(r"[._]", "", key)
    if spelled := [candidate for candidate in keys if re.sub(r"[._]", "", candidate) == letters != candidate]:
        return spelled
    same = [candidate for candidate in keys if candidate.endswith(f".{leaf}")]
    beside = {candidate.rpartition(".")[2]: candidate for candidate in keys if _parent(candidate) == _parent(key)}
    near = [beside[word] for word in difflib.get_close_matches(leaf, beside, n=1, cutoff=0.7)]
    return [candidate for candidate in same if candidate.startswith(f"{section}.")] or same or near


def _candidates(section: str, more_keys: Collection[str], only: Collection[str] | None) -> list[str]:
    sections = {key.partition(".")[0] for key in only or ()}
    of_section = {key for key in owners() if key.startswith(f"{section}.") and section in sections}
    keys = {*more_keys, *(owners() if only is None else of_section)}
    return sorted(key for key in keys if not key.endswith(TARGET))


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def answer(word: str, only: Collection[str] | None = None) -> str | None:
    """The line for a word that people know from elsewhere, as in `way_of`; None for other words."""
    way = way_of(word, only)
    return way and f"{word} is not known here: {way}"


def way_of(word: str, only: Collection[str] | None = None) -> str | None:
    """What to do instead of a key, or an option as GROUP=OPTION, that people know from elsewhere; None for other words.

    only: the keys of a command that has no others. Ways that name others are no ways there.
    """
    for word_from_elsewhere, ways in answers().items():
        is_below = "=" not in word_from_elsewhere and word.startswith(f"{word_from_elsewhere}.")
        for way in ways if is_below or word == word_from_elsewhere else ():
            if only is None or {*re.findall(r"(?:^|\buse )([a-z][\w.]*)=", way)} <= {"hydra.run.dir", *only}:
                return way
    return None
