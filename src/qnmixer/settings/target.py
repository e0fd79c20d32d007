"""A section that names a class or function, `_target_`, with its arguments as keys beside it.

The signature of the target has the types, bounds and defaults of these keys. To read a signature is to import the
target. So `checked` does that: for the user's own command line, and for a file only after its targets are trusted.
"""

import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, PrivateAttr
from pydantic.errors import PydanticUserError

from qnmixer.errors import PluginError, first_line
from qnmixer.settings.options import TARGET, option_of
from qnmixer.settings.plugins import Kind, defaults_of, is_trusted, load_plugin, parameters_of, subclass_of, taken
from qnmixer.settings.validation import Section, adapter_of, unknown_key, validated

_WORDS = ("_partial_", "_recursive_", "_convert_")
"""Hydra's words. The target is always called by qnmixer, with the missing arguments: `_partial_` changes nothing."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
FUNCTION_OR_MODULE = Kind(
    "a function (image, truth) or a subclass of torch.nn.Module, such as a metric of torchmetrics",
    lambda loaded: subclass_of("torch.nn.Module").fits(loaded) if isinstance(loaded, type) else callable(loaded),
)


class Target(Section):
    """A section whose keys are the arguments of its target. `section.KEY` is the value of one that the config gives."""

    model_config = ConfigDict(extra="allow")

    group: ClassVar[str]  # its folder in conf/
    kind: ClassVar[Kind]  # what the target must be
    n_positional: ClassVar[int] = 0  # first arguments, which qnmixer gives; to a module that may be a function, none
    supplied: ClassVar[tuple[str, ...]] = ()  # arguments that qnmixer gives by name, if the config does not

    target: str = Field(alias="_target_", strict=True)
    _place: str = PrivateAttr("")

    def at(self, place: str) -> Self:
        """The same section, at this place in the config, such as metrics.psnr. Else it is at its group."""
        self._place = place
        return self

    def changed(self, **values: Any) -> Self:
        """The same section with other values of some keys and arguments, checked again."""
        return validated(type(self), self.plain() | values, self.section).at(self._place)

    @property
    def section(self) -> str:
        """Its place in the config."""
        return self._place or self.group

    @property
    def name(self) -> str:
        """The option that chooses it, as in `GROUP=NAME`; the target itself if conf/ has no such option."""
        return option_of(self.group, self.target)

    @property
    def key(self) -> str:
        """The key of its target."""
        return f"{self.section}.{TARGET}"

    @property
    def as_typed(self) -> str:
        """Its target as on the command line, for messages."""
        return f"{self.key}={self.target}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The keys that it does not declare."""
        return dict(self.model_extra or {})

    def keywords(self) -> dict[str, Any]:
        """The arguments, without Hydra's words."""
        return {key: value for key, value in self.arguments.items() if key not in _WORDS}

    def targets(self) -> dict[str, str]:
        """All classes and functions that it names, by key, also inside values."""
        named_inside = {f"{key}.{TARGET}": str(part[TARGET]) for key, part in _parts(self.section, self.arguments)}
        return {self.key: self.target} | named_inside

    def load(self) -> Any:
        """Import the target. Raises PluginError if this fails, or if it is of another kind."""
        return load_plugin(self.key, self.target, self.kind)

    @property
    def is_class(self) -> bool:
        """Whether the target is a class. Imports it."""
        return isinstance(self.load(), type)

    def defaults(self) -> dict[str, Any]:
        """The defaults of the arguments that the config may give. Imports the target."""
        defaults = defaults_of(parameters_of(self.load()))
        return {name: _listed(value) for name, value in defaults.items() if name not in self.supplied}

    def settings(self) -> dict[str, Any]:
        """The arguments that the config may give, given or default. Imports the target."""
        return self.defaults() | self.keywords()

    def checked(self) -> Self:
        """The same section, with arguments of the declared types. Imports the target. Raises ConfigError."""
        arguments = self._typed(self.load(), self.keywords())
        for key, part in _parts(self.section, self.keywords()):  # Hydra checks their arguments when it builds them
            _load_part(key, part)
        section = self.model_copy()
        section.__pydantic_extra__ = {key: _listed(arguments.get(key, value)) for key, value in self.arguments.items()}
        return section

    def build(self, *args: Any, supplied: Mapping[str, Any] | None = None, **keywords: Any) -> Any:
        """Call the target with these arguments and those of the config. Raises PluginError if it does not take them."""
        target = self.bound(supplied, **keywords)
        try:
            return target(*args)
        except (TypeError, ValueError, KeyError) as error:  # KeyError is torch's for a name that a module has already
            raise PluginError(f"{self.as_typed} refuses its arguments ({first_line(error)})") from error

    def bound(self, supplied: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
        """The target with all but its positional arguments. It gets `supplied` ones that it has a parameter for."""
        function, keywords = self.load(), self.keywords()
        arguments |= taken(function, {name: value for name, value in (supplied or {}).items() if name not in keywords})
        return partial(function, **arguments, **self.built(function, arguments))

    def built(self, function: Any, of_caller: Collection[str] = ()) -> dict[str, Any]:
        """The arguments of the config for its imported target, with the objects that they name built.

        of_caller: names of the arguments that the caller gives, and the config need not.
        """
        arguments = {key: self._with_parts(f"{self.section}.{key}", value) for key, value in self.keywords().items()}
        return self._typed(function, arguments, of_caller)

    def positional(self, function: Any) -> int:
        """How many of its first arguments qnmixer gives."""
        return 0 if self.kind is FUNCTION_OR_MODULE and isinstance(function, type) else self.n_positional

    def _typed(self, function: Any, arguments: dict[str, Any], of_caller: Collection[str] = ()) -> dict[str, Any]:
        """The arguments as the types that its signature declares. Raises ConfigError for those it lacks or misses."""
        parameters = parameters_of(function)
        by_config = parameters[self.positional(function) :]  # qnmixer gives the first
        named = {p.name: p for p in by_config if p.kind in _BY_NAME and p.name not in of_caller}
        self._check_names(arguments, named, takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters))
        typed = {}
        for name, value in arguments.items():
            hint = _type_of(function, named[name]) if name in named else _type_in_parents(function, name)
            becomes_anything = [*_parts(name, value)] and not _is_plain(hint)  # what a part builds has any type
            is_checked = hint is not None and not becomes_anything
            typed[name] = validated(hint, value, f"{self.section}.{name}") if is_checked else value
        return typed

    def _check_names(self, names: Iterable[str], named: Mapping[str, inspect.Parameter], takes_all: bool) -> None:
        """Raise PluginError for an argument that the target does not have, or for one that it needs and does not get.

        takes_all: it has **keywords.
        """
        stray = next((name for name in names if name not in named), None)
        if stray is not None and not takes_all:
            keys = [f"{self.section}.{name}" for name in named]
            raise PluginError(str(unknown_key(f"{self.section}.{stray}", keys, self.target)))
        for name, parameter in named.items():
            if parameter.default is parameter.empty and name not in (*names, *self.supplied):
                raise PluginError(f"{self.section} needs an argument {name}: give it as +{self.section}.{name}=VALUE")

    def _with_parts(self, key: str, value: Any) -> Any:
        """The value of an argument, with the targets inside it built as by Hydra."""
        parts = [*_parts(key, value)] if self.arguments.get("_recursive_", True) else []
        if not parts:
            return value
        from hydra.errors import InstantiationException
        from hydra.utils import instantiate
        from lightning_utilities.core.apply_func import apply_to_collection

        for name, part in parts:  # Hydra would also find a.b.c where a only imports b
            _load_part(name, part)
        try:
            return instantiate(apply_to_collection(value, str, _as_text), _convert_="all")
        except InstantiationException as error:
            raise PluginError(f"{key} cannot be built: {first_line(error.__cause__ or error)}") from error


def _type_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The declared type of an argument. None if it has none, or one that is known to type checkers only."""
    if parameter.annotation is parameter.empty:
        return None
    where: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]  # it is only read
    declared = types.SimpleNamespace(__annotations__={"value": parameter.annotation})
    try:
        hint = get_type_hints(declared, getattr(inspect.unwrap(where), "__globals__", {}), include_extras=True)["value"]
        adapter_of(hint)
    except (PydanticUserError, NameError, TypeError, AttributeError):
        return None
    return hint


def _type_in_parents(function: Any, name: str) -> Any:
    """The declared type of an argument that a class passes on to a parent by **keywords. None if no parent has it."""
    for parent in function.__mro__[1:] if isinstance(function, type) else ():
        for parameter in parameters_of(vars(parent).get("__init__", object)):
            if parameter.name == name and parameter.kind in _BY_NAME:
                return _type_of(parent, parameter)
    return None


def _is_plain(hint: Any) -> bool:
    """Whether a type is of numbers and texts, with which rules compute before anything is built."""
    if get_origin(hint) in (Annotated, Literal):
        return get_origin(hint) is Literal or _is_plain(get_args(hint)[0])
    args = get_args(hint)
    return all(map(_is_plain, args)) if args else hint in (int, float, str, bool, type(None), ...)


def _parts(key: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sections with a target inside a value, at any depth, by key."""
    if isinstance(value, Mapping):
        if TARGET in value:
            yield key, value
        for name, item in value.items():
            yield from _parts(f"{key}.{name}", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _parts(f"{key}.{i}", item)


def _load_part(key: str, part: Mapping[str, Any]) -> Any:
    """Import the target of a section inside a value.

    A file may name anything in qnmixer without being trusted. So parts from there are layers, and no functions.
    """
    target = str(part[TARGET])
    kind = subclass_of("torch.nn.Module") if is_trusted(target, ()) else Kind("a class or function", callable)
    return load_plugin(f"{key}.{TARGET}", target, kind)


def _listed(value: Any) -> Any:
    """The value in the form that a checkpoint stores."""
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _as_text(value: str) -> str:
    """A text with every ${…} as plain text, which OmegaConf will not resolve. `plain_values` resolved the others."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
