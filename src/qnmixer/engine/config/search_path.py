"""The user's own config folders, from `--config-dir FOLDER` and `hydra.searchpath=[…]`, as one override."""

import os
from pathlib import Path

from qnmixer.engine.config.overrides import key_of, quoted
from qnmixer.errors import ConfigError

CONF = (Path(__file__).parents[2] / "conf").resolve()
"""In a clone, a link to conf/ of the repository; in a wheel, a copy of the files."""
SEARCH_PATH = "hydra.searchpath"
_FLAGS = ("--config-dir", "-cd")
_FILE, _PACKAGE = "file://", "pkg://"


def with_search_path(arguments: list[str]) -> list[str]:
    """Put all config folders into one override, `hydra.searchpath=[…]`, with absolute paths.

    The record of a run then has it, like any other override. Raises ConfigError for a folder that does not exist, or
    that has a file with the name of one of ours: Hydra would take ours.
    """
    rest, folders, given = [], [], ""
    words = iter(arguments)
    for word in words:
        flag, equal, value = word.partition("=")
        if flag in _FLAGS:
            folders.append(value if equal else next(words, ""))
        elif key_of(word) == SEARCH_PATH:
            given = word
        else:
            rest.append(word)
    places = [*map(_located, [*folders, *places_of(given)])]
    return [f"{SEARCH_PATH}=[{','.join(map(quoted, places))}]", *rest] if places else rest


def search_path_in(overrides: list[str]) -> list[str]:
    """The override that names the config folders, in a list; [] if there is none."""
    return [override for override in overrides if key_of(override) == SEARCH_PATH]


def places_of(override: str) -> list[str]:
    """The folders that such an override names; [] if it is empty. Raises ConfigError if it is no list of texts."""
    if not override:
        return []
    from hydra.core.override_parser.overrides_parser import OverridesParser  # the library loads without Hydra

    (parsed,) = OverridesParser.create().parse_overrides([override])
    value = parsed.value()
    if not isinstance(value, list):
        raise ConfigError(f"{override} is no list of folders: write {SEARCH_PATH}=[file:///abs/my_conf]")
    return [str(getattr(place, "text", place)) for place in value]


def _located(place: str) -> str:
    if place.startswith(_PACKAGE):
        return place
    folder = Path(place.removeprefix(_FILE)).expanduser()
    if not place or not folder.is_dir():
        raise ConfigError(f"no config folder at {place or folder}: give it as --config-dir FOLDER")
    ours = [path.relative_to(CONF) for path in sorted(CONF.rglob("*.yaml")) if folder.resolve() != CONF]
    if same := next((path for path in ours if (folder / path).is_file()), None):
        raise ConfigError(f"{folder / same} has the name of a file of qnmixer, which would be used instead: rename it")
    return _FILE + os.path.abspath(folder)
