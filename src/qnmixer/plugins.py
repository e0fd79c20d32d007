"""Import classes and functions that a config names as `module.name`: of qnmixer, an installed package or a user's file.

A checkpoint also names classes, but contains no code. Only code on this machine runs, and only if it is of the expected
kind.
"""

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from qnmixer.errors import ConfigError, PluginError, first_line, suggest


@dataclass(frozen=True)
class Kind:
    """A kind of target, such as a loss. `fits` checks an imported object."""

    what: str
    fits: Callable[[Any], bool]


class Section(Protocol):
    """A config section that names a target; see `qnmixer.config.target.Target`."""

    group: ClassVar[str]
    _target_: str

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the target."""
        ...


def subclass_of(base: str, but: str = "") -> Kind:
    """The kind of classes that can be built and derive from the class `base`, which is imported when it is needed."""

    def fits(it: Any) -> bool:
        module, _, name = base.rpartition(".")
        of = getattr(importlib.import_module(module), name)
        return isinstance(it, type) and issubclass(it, of) and not inspect.isabstract(it)

    return Kind(f"a subclass of {base}{but}", fits)


def check_plugin(key: str, target: str) -> None:
    """Raise PluginError if the module of `key=target` does not exist. Imports only the packages around the module."""
    module, _, name = target.rpartition(".")
    if not module or not name.isidentifier():
        raise PluginError(f"{key}={target} is not module.name: give for example {key}=my_file.MyClass")
    if os.getcwd() not in sys.path:  # `qnmixer-train` starts without it, `python -m` with it
        sys.path.append(os.getcwd())
    try:
        found = importlib.util.find_spec(module) is not None
    except Exception:  # a package that contains it is missing, or fails to import
        found = False
    if not found:
        raise PluginError(
            f"{key}={target}, but there is no module {module}: put {module.replace('.', '/')}.py into the folder that "
            "you start from, or install its package"
        )


def module_of(target: str) -> str:
    """The module of a target."""
    return target.rpartition(".")[0]


def is_trusted(target: str, trust: Collection[str]) -> bool:
    """Whether a target that a file names may be imported: it is in qnmixer, Lightning or a module in `trust`."""
    module = module_of(target)
    return any(module == name or module.startswith(f"{name}.") for name in ("qnmixer", "lightning.pytorch", *trust))


def trust_words(targets: Iterable[str]) -> list[str]:
    """The `trust=` override for a file that names these targets, as a list; [] if none is needed."""
    modules = sorted({module_of(target) for target in targets if not is_trusted(target, ())})
    return [f"trust={modules[0]}" if len(modules) == 1 else f"trust=[{','.join(modules)}]"] if modules else []


def check_trusted(source: str, targets: Mapping[str, str], trust: Collection[str]) -> None:
    """Raise PluginError for the first target of a file that this command line does not allow.

    The message names the modules of all its targets, so that one more try is enough.

    Args:
        source: the file, for the message.
        targets: the targets that the file names, by key.
        trust: modules that the user named.
    """
    for key, target in targets.items():
        if not is_trusted(target, trust):
            raise PluginError(
                f"{source} names {key}={target}, which is not part of qnmixer: if you trust that code, "
                f"add {shlex.join(trust_words(targets.values()))}"
            )


def load_plugin(key: str, target: str, kind: Kind) -> Any:
    """Import the target of `key=target`. Raises PluginError if this fails, or if the target is of another kind."""
    check_plugin(key, target)
    module, _, name = target.rpartition(".")
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # a user's module can raise anything when it is imported
        raise PluginError(f"{key}={target}: importing {module} fails ({first_line(error)})") from error
    if not hasattr(loaded, name):
        raise PluginError(f"{key}={target}: there is no {name} in {getattr(loaded, '__file__', module)}")
    found = getattr(loaded, name)
    if not kind.fits(found):
        raise PluginError(f"{key}={target} is not {kind.what}")
    return found


def build(section: Section, kind: Kind, *args: Any, offered: Mapping[str, Any] | None = None, **ours: Any) -> Any:
    """Build the target of a config section from the section's keys. Raises as `make_plugin` does."""
    key, keywords = f"{section.group}._target_", section.keywords()
    return make_plugin(key, section._target_, kind, *args, arguments=keywords, offered=offered, **ours)


def load(section: Section, kind: Kind) -> Any:
    """Import the class or function that a config section names, as `load_plugin` does."""
    return load_plugin(f"{section.group}._target_", section._target_, kind)


def make_plugin(
    key: str,
    target: str,
    kind: Kind,
    *args: Any,
    arguments: Mapping[str, Any] | None = None,
    offered: Mapping[str, Any] | None = None,
    **ours: Any,
) -> Any:
    """Build an object of the class that `key=target` names.

    Args:
        key, target, kind: as in `load_plugin`.
        args, ours: arguments that every class of the kind gets from qnmixer.
        arguments: the user's own, from the same config section.
        offered: optional arguments by name. A class gets those that it has a parameter for.

    Raises PluginError if the class does not take them, see `check_names`.
    """
    cls = load_plugin(key, target, kind)
    ours |= taken(cls, {name: value for name, value in (offered or {}).items() if name not in (arguments or {})})
    check_names(key, target, cls, arguments or {}, len(args), ours)
    return cls(*args, **ours, **(arguments or {}))


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function or class. None: it is written in C and has no signature."""
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return None


def taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The offered arguments that a function or class has a parameter for."""
    parameters = {it.name for it in parameters_of(function) or ()}
    return {name: value for name, value in offered.items() if name in parameters}


def check_names(
    key: str,
    target: str,
    function: Callable[..., Any],
    arguments: Collection[str],
    n_ours: int = 0,
    ours: Collection[str] = (),
    *,
    partial: bool = False,
) -> None:
    """Raise PluginError for an argument that `function` does not have, or that is missing.

    Args:
        key: of the target, such as model._target_; messages name the keys beside it.
        target: its name, for messages.
        arguments: names of those from a config section.
        n_ours: positional arguments that come from qnmixer.
        ours: names of arguments that come from qnmixer.
        partial: others may be missing.
    """
    parameters, section = parameters_of(function), key.rpartition(".")[0]
    if parameters is None:
        return
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    own = {it.name: it for it in parameters[n_ours:] if it.kind in named and it.name not in ours}
    if not any(it.kind is inspect.Parameter.VAR_KEYWORD for it in parameters):
        for name in arguments:
            if name not in own:
                if near := difflib.get_close_matches(name, own, n=1):
                    raise PluginError(f"unknown key {section}.{name}: did you mean {section}.{near[0]}?")
                takes = f"only {', '.join(own)}" if own else "and takes none"
                raise PluginError(f"{section}.{name}: {target} has no such argument, {takes}")
    for name, parameter in own.items():
        if parameter.default is parameter.empty and name not in arguments and not partial:
            raise PluginError(f"{key}={target} needs an argument {name}: give it as +{section}.{name}=VALUE")


def converted(section: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the types that `function` declares: `Annotated[int, Ge(1)]`, `Literal[…]`, `float`.

    Args:
        section: what messages put before their names, such as model.
        arguments: by name. Those without a declared type stay as they are.

    Raises ConfigError for a value that does not fit.
    """
    hints = {it.name: _hint(function, it) for it in parameters_of(function) or () if it.name in arguments}
    return {
        name: _converted(f"{section}.{name}", value, hints[name]) if name in hints else value
        for name, value in arguments.items()
    }


def _hint(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The declared type of an argument. Any if it has none, or one whose names are known to type checkers only."""
    hint = parameter.annotation
    if isinstance(hint, str):
        where = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
        try:
            hint = eval(hint, getattr(inspect.unwrap(where), "__globals__", {}))  # as typing.get_type_hints does
        except Exception:
            return Any
    return Any if hint is inspect.Parameter.empty else hint


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
    "callable": " is no class or function: give module.name",
    "literal": " is not known: {nearest}",
    "tuple": " is not a list: write {key}=[…]",
    "list": " is not a list: write {key}=[…]",
    "missing": " has too few values",
    "too_long": " has too many values: give {max_length}",
}
"""What a message says after KEY=VALUE, by pydantic's name of the error, or its first word."""


def _converted(key: str, value: Any, hint: Any) -> Any:
    """A value as the type that its hint declares. Raises ConfigError. Types that pydantic does not know fit all."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # late: it takes a tenth of a second
    from pydantic.errors import PydanticUserError

    settings = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, coerce_numbers_to_str=True)
    try:
        return TypeAdapter(hint, config=settings).validate_python(value)
    except ValidationError as error:
        # The error of the value itself says more than those of the other types of a union.
        first = max(error.errors(), key=lambda its: its["type"] in _SAYS)
        kind, context = first["type"], first.get("ctx", {})
        if kind == "literal_error":
            choices = re.findall(r"'?([^', ]+)'?(?:, | or |$)", context["expected"])
            context = {"nearest": suggest(str(value), choices)}
        elif kind == "multiple_of":
            context["nearest"] = value + -value % context["multiple_of"]
        says = _SAYS.get(kind) or _SAYS.get(kind.partition("_")[0])
        text = says.format(key=key, **context) if says else f": {first['msg'][0].lower()}{first['msg'][1:]}"
        raise ConfigError(f"{key}={value}{text}") from error
    except (PydanticUserError, NameError):
        return value
