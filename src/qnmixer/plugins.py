"""Classes of a user's own, named in a config as `module.Class`: of an installed package, or a file in this folder.

A checkpoint names them too, and brings no code along: what is run is this machine's, and only what is the kind of class
that is asked for.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qnmixer.errors import PluginError, first_line


@dataclass(frozen=True)
class Kind:
    """What a class must be; `fits` is asked of nothing but classes."""

    what: str
    fits: Callable[[type], bool]


def check_plugin(key: str, target: str) -> None:
    """Raise PluginError where the module of `key=target` cannot be found; only packages on the way to it are run."""
    module, _, name = target.rpartition(".")
    if not module or not name.isidentifier():
        raise PluginError(f"{key}={target} is not module.Class: give for example my_file.MyClass")
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


def load_plugin(key: str, target: str, kind: Kind) -> Any:
    """The class that `key=target` names; PluginError where it is not there, does not load or is not of the kind."""
    check_plugin(key, target)
    module, _, name = target.rpartition(".")
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # whatever somebody's module does when it is imported
        raise PluginError(f"{key}={target}: {module} does not load ({first_line(error)})") from error
    if not hasattr(loaded, name):
        raise PluginError(f"{key}={target}: there is no {name} in {getattr(loaded, '__file__', module)}")
    cls = getattr(loaded, name)
    if not isinstance(cls, type) or not kind.fits(cls):
        raise PluginError(f"{key}={target} is not {kind.what}")
    return cls


def make_plugin(key: str, target: str, kind: Kind, *args: Any, **arguments: Any) -> Any:
    """An object of the class that `key=target` names. Raises PluginError where it does not take these arguments too."""
    cls = load_plugin(key, target, kind)
    try:
        inspect.signature(cls).bind(*args, **arguments)
    except TypeError as error:
        raise PluginError(f"{key}={target} does not take what it is given: {first_line(error)}") from error
    return cls(*args, **arguments)
