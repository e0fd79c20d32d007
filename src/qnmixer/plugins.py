"""Import classes and functions that a config names as `module.name`: of qnmixer, an installed package or a user's file.

A checkpoint also names classes, but contains no code. Only code on this machine runs, and only if it is of the expected
kind.
"""

import importlib
import importlib.util
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from qnmixer.errors import PluginError, first_line


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


def subclass_of(base: type, name: str, but: str = "") -> Kind:
    """The kind of classes that can be built and derive from `base`. Messages call the base `name`."""

    def fits(it: Any) -> bool:
        return isinstance(it, type) and issubclass(it, base) and not inspect.isabstract(it)

    return Kind(f"a subclass of {name}{but}", fits)


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

    Raises PluginError if the class does not take them.
    """
    cls = load_plugin(key, target, kind)
    ours |= taken(cls, {name: value for name, value in (offered or {}).items() if name not in (arguments or {})})
    check_call(key, target, cls, args, ours, arguments or {})
    return cls(*args, **ours, **(arguments or {}))


def taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The offered arguments that a function or class has a parameter for."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return {}
    return {name: value for name, value in offered.items() if name in parameters}


def check_call(
    key: str,
    target: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    ours: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> None:
    """Raise PluginError, naming the key, if `function(*args, **ours, **arguments)` does not fit the signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    section, parameters = key.rpartition(".")[0], [*signature.parameters.values()]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        named = [p.name for p in parameters[len(args) :] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        own = [name for name in named if name not in ours]
        for name in arguments:
            if name not in own:
                takes = f"only {', '.join(own)}" if own else "and takes none"
                raise PluginError(f"{section}.{name}: {target} has no such argument, {takes}")
    try:
        signature.bind(*args, **ours, **arguments)
    except TypeError as error:
        hint = f": give it as +{section}.NAME=VALUE" if key.endswith("._target_") and "missing" in str(error) else ""
        raise PluginError(f"{key}={target} does not take these arguments: {first_line(error)}{hint}") from error
