"""Hydra composes in half of the time, and to the same config: most tests, and all commands, begin with it."""

import os
import pickle
from typing import Any

from hydra._internal import defaults_list
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult

_load = FileConfigSource.load_config
_choices = defaults_list._create_interpolation_map
_files: dict[tuple[Any, ...], bytes] = {}


def compose_faster() -> None:
    """In this process, and in those that are forked from it."""
    FileConfigSource.load_config = _load_once  # type: ignore[method-assign]
    defaults_list._create_interpolation_map = _choices_if_asked


def _load_once(source: FileConfigSource, config_path: str) -> ConfigResult:
    """A file as it was read before, unless it has changed. Who reads it changes it, so each has a copy."""
    try:
        file = os.stat(os.path.join(source.path, source._normalize_file_name(config_path)))
    except OSError:
        return _load(source, config_path)
    key = (source.path, source.provider, config_path, file.st_ino, file.st_mtime_ns, file.st_size)
    if key not in _files:
        _files[key] = pickle.dumps(_load(source, config_path))
    return pickle.loads(_files[key])


def _choices_if_asked(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """What ${...} in defaults stands for. Hydra makes it anew for each of dozens of files, but here few have one."""
    asked = any(default.is_interpolation() for default in defaults)
    return _choices(overrides, defaults, self_added) if asked else None
