"""Classes and functions that a config names as `module.name`: of this package, of an installed one or of a file here.

A checkpoint names them too, and brings no code along: what is run is this machine's, and only what is the kind that is
asked for.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from qnmixer.errors import PluginError, first_line


@dataclass(frozen=True)
class Kind:
    """What a target must be; `fits` is asked of whatever its name stands for."""

    what: str
    fits: Callable[[Any], bool]


class Section(Protocol):
    """A section of the config that names a target, see `qnmixer.config.target.Target`."""

    group: ClassVar[str]
    _target_: str

    def keywords(self) -> dict[str, Any]:
        """What the target is called with by name."""
        ...


def subclass_of(base: type, name: str, but: str = "") -> Kind:
    """Classes that can be built and derive from `base`, which users know by `name`."""

    def fits(it: Any) -> bool:
        return isinstance(it, type) and issubclass(it, base) and not inspect.isabstract(it)

    return Kind(f"a subclass of {name}{but}", fits)


def check_plugin(key: str, target: str) -> None:
    """Raise PluginError where the module of `key=target` cannot be found; only packages on the way to it are run."""
    module, _, name = target.rpartition(".")
    if not module or not name.isidentifier():
        raise PluginError(f"{key}={target} is not module.name: give for example {key}=my_file.MyClass")
    if os.getcwd() not in sys.path:  # `qnmixer-train` starts without it, `python -m` with it
        sys.path.append(os.getcwd())
    try:
        found = importlib.util.find_spec(module) is not None
    except Exception:  # a package on the way to it is not there, or does not load
        found = False
    if not found:
        raise PluginError(
            f"{key}={target}: there is no module {module}; put {module.replace('.', '/')}.py into the folder that you "
            "start from, or install its package"
        )


def module_of(target: str) -> str:
    """The module that a target lies in."""
    return target.rpartition(".")[0]


def is_trusted(target: str, trust: Collection[str]) -> bool:
    """Whether a target that a file names may be imported: of this package, of Lightning, or of a module in `trust`."""
    module = module_of(target)
    return any(module == name or module.startswith(f"{name}.") for name in ("qnmixer", "lightning.pytorch", *trust))


def trust_words(targets: Iterable[str]) -> list[str]:
    """The override that allows these targets, as a command line needs it for a file that names them; [] for none."""
    modules = sorted({module_of(target) for target in targets if not is_trusted(target, ())})
    return [f"trust={modules[0]}" if len(modules) == 1 else f"trust=[{','.join(modules)}]"] if modules else []


def check_trusted(source: str, targets: Mapping[str, str], trust: Collection[str]) -> None:
    """Raise PluginError for the first target of a file that the user did not allow on this command line.

    Args:
        source: the file, for the message.
        targets: what the file names, by key.
        trust: modules that the user named.
    """
    for key, target in targets.items():
        if not is_trusted(target, trust):
            raise PluginError(
                f"{source} names {key}={target}, which is not part of qnmixer: if you trust that code, "
                f"add trust={module_of(target)}"
            )


def load_plugin(key: str, target: str, kind: Kind) -> Any:
    """What `key=target` names; PluginError where it is not there, does not load or is not of the kind."""
    check_plugin(key, target)
    module, _, name = target.rpartition(".")
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # whatever somebody's module does when it is imported
        raise PluginError(f"{key}={target}: {module} does not load ({first_line(error)})") from error
    if not hasattr(loaded, name):
        raise PluginError(f"{key}={target}: there is no {name} in {getattr(loaded, '__file__', module)}")
    found = getattr(loaded, name)
    if not kind.fits(found):
        raise PluginError(f"{key}={target} is not {kind.what}")
    return found


def build(section: Section, kind: Kind, *args: Any, offered: Mapping[str, Any] | None = None, **ours: Any) -> Any:
    """What a section of the config names, built from its keys: as `make_plugin`, which says what is raised."""
    key, keywords = f"{section.group}._target_", section.keywords()
    return make_plugin(key, section._target_, kind, *args, arguments=keywords, offered=offered, **ours)


def load(section: Section, kind: Kind) -> Any:
    """The class or function that a section of the config names, as `load_plugin` has it."""
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
    """An object of the class that `key=target` names.

    Args:
        key, target, kind: as in `load_plugin`.
        args, ours: what this program gives to every class of the kind.
        arguments: the user's own, from the same section of the config.
        offered: what this program gives to those classes that take it, by its name.

    Raises PluginError where the class does not take them.
    """
    cls = load_plugin(key, target, kind)
    ours |= taken(cls, {name: value for name, value in (offered or {}).items() if name not in (arguments or {})})
    check_call(key, target, cls, args, ours, arguments or {})
    return cls(*args, **ours, **(arguments or {}))


def taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Of what is offered, what a function or class has a parameter for."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some that are written in C have none
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
    """Raise PluginError, naming the key, where a call `function(*args, **ours, **arguments)` cannot be."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    section, parameters = key.rpartition(".")[0], [*signature.parameters.values()]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        named = [p.name for p in parameters[len(args) :] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        own = [name for name in named if name not in ours]
        for name in arguments:
            if name not in own:
                takes = f"only {', '.join(own)}" if own else "no argument of its own"
                raise PluginError(f"{section}.{name}: {target} does not take it, {takes}")
    try:
        signature.bind(*args, **ours, **arguments)
    except TypeError as error:
        hint = f": give it as +{section}.NAME=VALUE" if key.endswith("._target_") and "missing" in str(error) else ""
        raise PluginError(f"{key}={target} does not take what it is given: {first_line(error)}{hint}") from error
