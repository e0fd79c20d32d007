"""Hydra composes in a third of the time, the same files again in a tenth: most tests, and all commands, begin with it.

The config is the same. It stays as long as `make test` cannot spare the minutes of CPU time that it saves.
"""

import copy
import functools
import os
import pickle
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf, base

from qnmixer.files import atomic_file, digest

_load = ConfigRepository.load_config
_open = CachingConfigRepository.__init__
_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_parse = OverridesParser.parse_rule
_read = base.parse
_version = version._get_version
_choices = getattr(defaults_list, "_create_interpolation_map", None)  # None: Hydra 1.4, which has other internals

_Key = tuple[Any, ...]
_files: dict[_Key, ConfigResult] = {}
_words: dict[_Key, bytes] = {}
_MERGED = Path(os.environ["QNMIXER_TESTS"], "merged")
"""What files came to: one folder for all processes of a session."""


def compose_faster(faster: bool = True) -> None:
    """In this process, and in those that are forked from it, with Hydra 1.3; False: as Hydra does."""
    for owner, name, slow, fast in (
        (ConfigRepository, "load_config", _load, _load_once),
        (CachingConfigRepository, "__init__", _open, _open_once),
        (ConfigLoaderImpl, "_compose_config_from_defaults_list", _merge, _merge_once),
        (OverridesParser, "parse_rule", _parse, _parse_once),
        (base, "parse", _read, functools.cache(_read)),  # of a text with ${…}: a tree, which is only read
        (version, "_get_version", _version, functools.cache(_version)),  # asked for each file
        (defaults_list, "_create_interpolation_map", _choices, _choices_if_asked),
    ):
        if _choices is not None:
            setattr(owner, name, fast if faster else slow)


def _load_once(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """A file as it was read before, unless it has changed. Who asks for its header or its defaults shares it."""
    source = repository._find_object_source(config_path, ObjectType.CONFIG)
    key = source and _file(source, config_path)
    if key is None:
        return _load(repository, config_path)
    if key not in _files:
        result = _load(repository, config_path)
        assert result is not None
        result.file = key  # type: ignore[attr-defined]  # for the key of what is merged
        _files[key] = result
    return _files[key]


def _file(source: ConfigSource, config_path: str) -> _Key | None:
    """What tells a file from others, and from itself once it has changed; None: it cannot be told."""
    place = (source.scheme(), source.path, source.provider, config_path)
    if source.scheme() != "file":
        return place if source.provider in ("hydra", "schema") else None  # Hydra's own never change
    try:
        file = os.stat(os.path.join(source.path, source._normalize_file_name(config_path)))
    except OSError:
        return None
    return (*place, file.st_ino, file.st_mtime_ns, file.st_size)


def _open_once(repository: CachingConfigRepository, delegate: Any) -> None:
    """Hydra copies all sources for each composition, but replaces them at most."""
    repository.delegate, repository.cache = copy.copy(delegate), {}


def _merge_once(loader: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> DictConfig:
    """What the same files came to, in the same order, before keys are overridden."""
    files = [getattr(repo.load_config(default.config_path), "file", None) for default in defaults]
    key = (*files, *((default.config_path, default.package, default.primary) for default in defaults))
    if None in files:
        repo.cache = _copied(repo.cache)  # what is merged may change
        return _merge(loader, defaults, repo)
    file = _MERGED / digest(repr(key))
    if not file.exists():
        repo.cache = _copied(repo.cache)
        config = _merge(loader, defaults, repo)
        OmegaConf.clear_cache(config)  # of ${now:…}
        _MERGED.mkdir(exist_ok=True)
        with atomic_file(file) as stream:
            pickle.dump(config, stream)
    return pickle.loads(file.read_bytes())


def _copied(files: dict[str, ConfigResult | None]) -> dict[str, ConfigResult | None]:
    """Copies of what was read, in a third of the time of deepcopy."""
    return pickle.loads(pickle.dumps(files))


def _parse_once(parser: OverridesParser, text: str, rule: str) -> Any:
    """What Hydra's grammar makes of a word."""
    if (text, rule) not in _words:
        _words[text, rule] = pickle.dumps(_parse(parser, text, rule))
    return pickle.loads(_words[text, rule])


def _choices_if_asked(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """What ${...} in defaults stands for. Hydra makes it anew for each of dozens of files, but here few have one."""
    asked = any(default.is_interpolation() for default in defaults)
    return _choices(overrides, defaults, self_added) if asked else None
