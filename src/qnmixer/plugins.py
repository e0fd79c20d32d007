"""Classes of a user's own, named in a config as `module.Class`: of an installed package, or a file in this folder."""

import importlib
import importlib.util
import inspect
import os
import sys
from typing import Any

from qnmixer.errors import PluginError, first_line


def check_plugin(key: str, target: str) -> None:
    """Raise PluginError where the module of `key=target` cannot be found; nothing of it is run yet."""
    module, _, name = target.rpartition(".")
    if not module or not name.isidentifier():
        raise PluginError(f"{key}={target} is not module.Class: give for example my_file.MyClass")
    _look_here_too()
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a package on the way to it is not there
        found = False
    if not found:
        raise PluginError(
            f"{key}={target}: there is no module {module}; put {module.replace('.', '/')}.py into the folder that you "
            "start from, or install its package"
        )


def load_plugin(key: str, target: str) -> Any:
    """The class that `key=target` names. Raises PluginError where it is not there, or its module does not load."""
    check_plugin(key, target)
    module, _, name = target.rpartition(".")
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # whatever somebody's module does when it is imported
        raise PluginError(f"{key}={target}: {module} does not load ({first_line(error)})") from error
    if not hasattr(loaded, name):
        raise PluginError(f"{key}={target}: there is no {name} in {loaded.__file__}")
    return getattr(loaded, name)


def make_plugin(key: str, target: str, *args: Any, **arguments: Any) -> Any:
    """An object of the class that `key=target` names. Raises PluginError where it does not take these arguments."""
    cls = load_plugin(key, target)
    try:
        inspect.signature(cls).bind(*args, **arguments)
    except TypeError as error:
        raise PluginError(f"{key}={target} does not take what it is given: {first_line(error)}") from error
    return cls(*args, **arguments)


def _look_here_too() -> None:
    if os.getcwd() not in sys.path:  # `qnmixer-train` starts without it, `python -m` with it
        sys.path.append(os.getcwd())
