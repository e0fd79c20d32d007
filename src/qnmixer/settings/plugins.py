"""Import classes and functions that a config names as `module.name`: of qnmixer, an installed package or a user's file.

A checkpoint also names classes, but contains no code. Only code on this machine runs, and only if it is of the expected
kind.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from qnmixer.errors import PluginError, first_line
from qnmixer.files import digest
from qnmixer.installed import without_extras

_ARGUMENTS = re.compile(r"^    (\w+(?:, \w+)*)(?: \(.*?\))?: (.*(?:\n {5,}.*)*)", re.MULTILINE)
"""Entries in the section "Args:" of a docstring: names, and what is said of them."""


@dataclass(frozen=True)
class Kind:
    """A kind of target, such as a loss. `fits` checks an imported object."""

    description: str
    fits: Callable[[Any], bool]


def subclass_of(base: str, but: str = "") -> Kind:
    """The kind of classes that can be built and derive from the class `base`, which is imported when it is needed."""

    def fits(loaded: Any) -> bool:
        module, _, name = base.rpartition(".")
        base_class = getattr(importlib.import_module(module), name)
        return isinstance(loaded, type) and issubclass(loaded, base_class) and not inspect.isabstract(loaded)

    return Kind(f"a subclass of {base}{but}", fits)


def check_plugin(key: str, target: str) -> None:
    """Raise PluginError if the module of `key=target` does not exist. Imports only the packages around the module."""
    module, _, name = target.rpartition(".")
    if not module or not name.isidentifier():
        raise PluginError(f"{key}={target} is not module.name: give for example {key}=my_file.MyClass")
    if os.getcwd() not in sys.path:  # `qnmixer-train` starts without it, `python -m` with it
        sys.path.append(os.getcwd())
    with suppress(Exception):  # a package that contains it is missing, or fails to import
        if importlib.util.find_spec(module) is not None:
            return
    raise without_extras(f"{key}={target}", module) or PluginError(
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


def untrusted_modules(targets: Iterable[str]) -> list[str]:
    """The modules of those targets that a file may not name without a word of trust."""
    return sorted({module_of(target) for target in targets if not is_trusted(target, ())})


def digests_of_code(modules: Iterable[str]) -> dict[str, str]:
    """Digests of the user's modules, by name: each of its own file and of the user's files that it imports."""
    return {module: digest(sorted(_files_of(module, {}).values())) for module in modules}


def _files_of(module: str, found: dict[str, str]) -> dict[str, str]:
    """The source files of a module and of what it imports, without installed packages, as digests by path."""
    try:
        spec = importlib.util.find_spec(module)
        origin = str(spec and spec.origin)
    except Exception:  # no module, or a package around it that fails
        return found
    is_installed = "site-packages" in origin or "dist-packages" in origin
    if origin in found or not origin.endswith(".py") or (found and is_installed):
        return found
    content = Path(origin).read_bytes()
    found[origin] = hashlib.sha256(content).hexdigest()
    if module_of(module):
        _files_of(module_of(module), found)  # the packages around it run too
    package = module if origin.endswith("__init__.py") else module_of(module)
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*parents, *filter(None, [node.module])])
                names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            else:
                continue
            for name in names:
                if name.partition(".")[0] not in (*sys.stdlib_module_names, "qnmixer"):
                    _files_of(name, found)
    return found


def trust_words(targets: Iterable[str]) -> list[str]:
    """The `trust=` override for a file that names these targets, as a list; [] if none is needed."""
    modules = untrusted_modules(targets)
    return [f"trust={modules[0]}" if len(modules) == 1 else f"trust=[{','.join(modules)}]"] if modules else []


def check_trusted(source: str, targets: Mapping[str, str], trust: Collection[str]) -> None:
    """Raise PluginError for the first target of a file that this command line does not allow.

    The message names the file (`source`) and the modules of all its targets, so that one more try is enough.
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
    target_object = getattr(loaded, name)
    if not kind.fits(target_object):
        raise PluginError(f"{key}={target} is not {kind.description}")
    return target_object


@functools.cache
def parameters_of(function: Any) -> tuple[inspect.Parameter, ...]:
    """The parameters of a function or class."""
    try:
        return (*inspect.signature(function).parameters.values(),)
    except (TypeError, ValueError):  # it is written in C and has no signature, so it may take anything
        return parameters_of(lambda *_, **__: None)


def defaults_of(parameters: Iterable[inspect.Parameter]) -> dict[str, Any]:
    """The defaults of those parameters that have one, by name."""
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def taken(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The offered arguments that a function or class has a parameter for."""
    parameters = {parameter.name for parameter in parameters_of(function)}
    return {name: value for name, value in arguments.items() if name in parameters}


def documented(target: str) -> dict[str, str]:
    """What docstrings say of the arguments of a target and of its bases, by name; {} if there is no source.

    Nothing is imported, as torch takes a second. To parse whole files, or those of Lightning, would take as long as all
    the rest of a help.
    """
    module, _, name = target.rpartition(".")
    if module.partition(".")[0] in ("lightning", "torch") or not name.isidentifier():
        return {}
    with suppress(OSError, SyntaxError, ValueError, ImportError, AttributeError):
        file = _source_file(module)
        text = file.read_text(encoding="utf-8")
        if definition := re.search(rf"^(?:class|def) {name}\b(?s:.*?)(?=^[^\s)]|\Z)", text, re.MULTILINE):
            return _documented_in(ast.parse(definition[0]).body[0], module)
        package = module if file.name == "__init__.py" else module_of(module)
        for origin in _origins(name, text, package):
            if module_of(origin) != module:
                return documented(origin)
    return {}


def _source_file(module: str) -> Path:
    """The file of a module, which is not imported, nor are the packages around it."""
    top, *inner = module.split(".")
    spec: Any = importlib.util.find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
    place = Path(spec.submodule_search_locations[0] if spec.submodule_search_locations else spec.origin, *inner)
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def _documented_in(definition: Any, module: str) -> dict[str, str]:
    """What the docstring of a class or function, and those of the bases of a class, say under "Args:"."""
    meanings: dict[str, str] = {}
    for base in getattr(definition, "bases", ()):
        if isinstance(base, ast.Name) and base.id != definition.name:
            meanings |= documented(f"{module}.{base.id}")
    section = (ast.get_docstring(definition) or "").partition("Args:\n")[2].partition("\n\n")[0]
    for names, meaning in _ARGUMENTS.findall(section):
        meanings |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    return meanings


def _origins(name: str, text: str, package: str) -> Iterator[str]:
    """Where the source of a module imports a name from. `package`: in which the module is."""
    for line in re.findall(rf"^ *(from .+ import (?:\([^)]*\b{name}\b[^)]*\)|.*\b{name}\b))", text, re.MULTILINE):
        statement: Any = ast.parse(line).body[0]
        source = importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
        yield from (f"{source}.{alias.name}" for alias in statement.names if name == (alias.asname or alias.name))
