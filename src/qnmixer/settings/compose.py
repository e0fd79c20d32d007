"""The words of a command line, the user's own config folders, and the config that Hydra composes from them and conf/.

Hydra is imported when something is composed. A program that only loads a network does not need it.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qnmixer.errors import ConfigError, first_line
from qnmixer.files import path_of
from qnmixer.settings.options import CONF, OF_A_RUN, option_files
from qnmixer.settings.validation import as_typed

SEARCH_PATH = "hydra.searchpath"
SWEEP_MODE = "hydra.mode=MULTIRUN"
FLAGS = ("--config-dir", "-cd")
_FILE, _PACKAGE = "file://", "pkg://"
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[+-]?\d[\d_]*)?|[+-]?inf|nan|true|false", re.IGNORECASE)
"""What Hydra reads as a number or a truth value."""
_PLAIN = re.compile(r"(?!\s)[\w/+.$%*@?|:\s-]*(?<!\s)", re.ASCII)
"""What Hydra takes as a text. It drops blanks around one."""
_MOST_BYTES, _MOST_ALIASES = 2**17, 12  # of a config file. One of ours has 2 kB, and none


def quoted(value: Path | str) -> str:
    """A text as Hydra's command line takes it: in quotes if it looks like a number, or has what Hydra does not take.

    The quotes are double ones, since single quotes are for the shell around it.
    """
    text = str(value)
    if _PLAIN.fullmatch(text) and not _NUMBER.fullmatch(text):
        return text
    escaped = re.sub(r'(\\*)("|$)', lambda match: match[1] * 2 + match[2].replace('"', '\\"'), text)
    return f'"{escaped}"'


def value_as_typed(value: Any) -> str:
    """A plain value as Hydra's command line takes it."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{value_as_typed(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(value_as_typed, value))}]"
    return quoted(value) if isinstance(value, str) else as_typed(value)


def is_override(word: str) -> bool:
    """Whether a word of a command line is an override: KEY=VALUE or ~KEY, no flag and no value of a flag."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def is_sweep(words: Iterable[str]) -> bool:
    """Whether a command line is that of a sweep."""
    return not {"-m", "--multirun", SWEEP_MODE}.isdisjoint(words)


def key_of(override: str) -> str:
    """The key of an override, without Hydra's signs before it."""
    return override.lstrip("+~").partition("=")[0]


def values_of(overrides: Iterable[str]) -> dict[str, str]:
    """Values of overrides by key, without quotes."""
    return {key_of(override): _unquoted(override.partition("=")[2]) for override in overrides}


def _unquoted(value: str) -> str:
    """The inverse of `quoted`, for both kinds of quotes. Hydra reads a backslash as one, but before a quote."""
    if len(value) < 2 or value[0] not in "'\"" or value[0] != value[-1]:
        return value
    return re.sub(r"""(\\+)(['"]|$)""", lambda match: match[1][: len(match[1]) // 2] + match[2], value[1:-1])


def of_hydra(override: str) -> bool:
    """Whether an override is for Hydra itself, also in the forms hydra={…} and …@hydra.…."""
    return re.search(r"(^|@)\s*hydra\b", key_of(override)) is not None


def with_search_path(arguments: list[str], last: Path | None = None) -> list[str]:
    """Put the user's config folders into one override, `hydra.searchpath=[…]`, with absolute paths.

    They come from `--config-dir FOLDER` and from that override. The record of a run then has them, like any other
    override. Hydra takes an option from the first folder that has it. `last`: the folder of a project.

    Raises ConfigError for a folder that does not exist, or that has a file with the name of one of ours: Hydra would
    take ours.
    """
    other_words, folders, searched = [], [], list[str]()
    words = iter(arguments)
    for word in words:
        flag, equal, value = word.partition("=")
        if flag in FLAGS:
            folder = value if equal else next(words, "")
            if not folder:
                raise ConfigError(f"{flag} has no value: write {flag} FOLDER")
            folders.append(folder)
        elif key_of(word) == SEARCH_PATH:
            searched += _places(word)
        else:
            other_words.append(word)
    project = [] if last is None else [_located(str(last))]
    typed = [place for place in map(_located, [*folders, *searched]) if place not in project]
    places = [*dict.fromkeys(typed), *project]
    return [_search_path(places), *other_words] if places else other_words


def _search_path(places: Iterable[str]) -> str:
    return f"{SEARCH_PATH}=[{','.join(map(quoted, places))}]"


def still_there(override: str) -> str:
    """A search path without its folders that are gone, such as those of a project that was moved."""
    return _search_path(place for place in _places(override) if all(path.is_dir() for path in folders_of([place])))


def search_path_in(overrides: list[str]) -> list[str]:
    """The override that names the config folders, in a list; [] if there is none."""
    return [override for override in overrides if key_of(override) == SEARCH_PATH]


def folders_in(words: Iterable[str]) -> list[Path]:
    """The user's config folders of a command line, without packages."""
    return folders_of([place for override in search_path_in(with_search_path([*words])) for place in _places(override)])


def folders_of(places: Iterable[str]) -> list[Path]:
    """The folders of a search path, without packages."""
    return [Path(place.removeprefix(_FILE)) for place in places if place.startswith(_FILE)]


def _places(override: str) -> list[str]:
    """The folders that such an override names. Raises ConfigError if it is no list of texts."""
    value = _parsed(override).value()
    if not isinstance(value, list):
        raise ConfigError(f"{override} is no list of folders: write {SEARCH_PATH}=[file:///abs/my_conf]")
    return [str(getattr(place, "text", place)) for place in value]


def _parsed(override: str) -> Any:
    """An override as Hydra reads it. Raises HydraException, or ConfigError for what its parser cannot bear."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        return OverridesParser.create().parse_override(override)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, hundreds of brackets
        raise ConfigError(f"{override} cannot be read ({first_line(error)})") from error


def _located(place: str) -> str:
    if place.startswith(_PACKAGE):
        return place
    folder = path_of(place.removeprefix(_FILE))
    if not folder.is_dir():
        raise ConfigError(f"no config folder at {place}: give it as --config-dir FOLDER")
    our_files = [path.relative_to(CONF) for path in sorted(CONF.rglob("*.yaml")) if folder.resolve() != CONF]
    if clash := next((path for path in our_files if (folder / path).is_file()), None):
        raise ConfigError(f"{folder / clash} has the name of a file of qnmixer, which would be used instead: rename it")
    _check_sizes(folder)
    return _FILE + os.path.abspath(folder)


def _check_sizes(folder: Path) -> None:
    """Raise ConfigError for a file that Hydra would read for minutes: each alias may double a value."""
    for path in _files_in(folder):
        with path.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES or len(re.findall(rb"[\s\[{,]\*\w", content)) > _MOST_ALIASES:
            raise ConfigError(f"{path} has more than {_MOST_BYTES >> 10} KiB or {_MOST_ALIASES} aliases (*NAME)")


def _files_in(folder: Path) -> Iterator[Path]:
    """The YAML files of a config folder. Hydra reads none of a hidden folder inside it."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(place, name) for name in sorted(names) if name.endswith((".yaml", ".yml"))]
        yield from (path for path in paths if path.is_file())  # a pipe would never end


_ONLY = {
    "trainer.max_epochs": "trainer.max_steps=-1",
    "trainer.val_check_interval": "trainer.val_every_n_steps=null",
    "trainer.check_val_every_n_epoch": "trainer.val_every_n_steps=null",
}
"""Keys of Lightning. Each turns off a key of a config file that does the same, unless that key is given too."""


def with_one_limit(words: list[str]) -> list[str]:
    """max_epochs alone is the only limit of a run: max_steps of a file must not end it. So it is with validations.

    Nothing is added twice. If a sweep has jobs without max_epochs, its launcher does this for each job.
    """
    for key, off in _ONLY.items():
        values = values_of(filter(is_override, words))
        if not {"null", "", "-1"} & {*values.get(key, "null").split(",")} and key_of(off) not in values:
            words = [*words, off]
    return words


def version_base() -> dict[str, Any]:
    """The argument by which Hydra 1.3 behaves as 1.3. Later ones do by themselves, and warn of it."""
    import hydra

    return {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


@contextmanager
def hydra_of(config_name: str) -> Iterator[None]:
    """Hydra with conf/. It names jobs, and so folders, after the command."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    # Hydra refuses a second initialisation in one process, and a program may compose many configs.
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), job_name=config_name, **version_base()):
        yield


def compose(config_name: str, overrides: list[str], with_hydra: bool = False) -> DictConfig:
    """The config of a command, without running anything. `with_hydra`: with Hydra's own part. Raises ConfigError."""
    import hydra

    if not CONF.is_dir():
        raise ConfigError(f"no configs at {CONF}: in a clone, `git config core.symlinks true` and check it out again")
    if config_name in OF_A_RUN:
        overrides = with_one_limit(overrides)
    with hydra_of(config_name):
        try:
            return hydra.compose(config_name, overrides, return_hydra_config=with_hydra)
        except Exception as error:
            if fault := _fault_of_file(error, overrides):
                raise ConfigError(fault) from error
            # data=null, trainer=3, data=${oc.select:seed}, a number of 5,000 digits, defaults that name their own file
            if not isinstance(error, ValueError | TypeError | AssertionError | RecursionError):
                raise
            raise ConfigError(f"{' '.join(overrides)} cannot be read ({first_line(error)})") from error


def _fault_of_file(error: Exception, overrides: list[str]) -> str | None:
    """The line for an error of YAML or of encodings, in a file of the user's, which Hydra does not name; else None."""
    from hydra.errors import HydraException

    cause = error.__cause__ if isinstance(error, HydraException) else error
    if cause is None:  # of words, mostly: no file need be read again
        return None
    for path in [path for folder in folders_in(overrides) for path in _files_in(folder)]:
        try:
            OmegaConf.load(path)
        except Exception as fault:
            if isinstance(fault, RecursionError) or str(fault) == str(cause):
                return f"{path} cannot be read ({' '.join(str(fault).split())}): mend the file"
    return None


def compose_sweep(config_name: str, overrides: list[str]) -> DictConfig:
    """The config of a sweep's first job, with Hydra's own part.

    Every value is tried with the first values of all other keys. So a misspelt value fails before the first job.
    """
    parsed = [_parsed(override) for override in overrides]
    values = [[*_values(override, config_name, overrides)] for override in parsed]
    for override, choices in zip(parsed, values, strict=True):
        if not choices:
            raise ConfigError(f"{override.input_line} has no value: give at least one")
    first_words = [choices[0] for choices in values]
    for i, choices in enumerate(values):
        for value in choices[1:]:
            compose(config_name, [*first_words[:i], value, *first_words[i + 1 :]])
    config = compose(config_name, first_words, with_hydra=True)
    if "n_trials" not in config.hydra.sweeper:
        for override in filter(lambda override: override.is_interval_sweep(), parsed):
            raise ConfigError(f"{override.input_line} is for a search: add hydra/sweeper=search, or give values")
    return config


def _values(override: Any, config_name: str, overrides: list[str]) -> Iterator[str]:
    """One override for each value that a sweep gives a key, from Hydra's. An interval gives its start."""
    from hydra.core.override_parser.types import Glob

    key, value = override.get_key_element(), override.value()
    if isinstance(value, Glob):
        names = [*option_files(override.key_or_group, config_name, folders_in(overrides))]
        yield from (f"{key}={name}" for name in value.filter(names))
    elif override.is_discrete_sweep():
        yield from (f"{key}={choice}" for choice in override.sweep_string_iterator())
    elif override.is_interval_sweep():
        yield f"{key}={value.start}"
    else:
        yield override.input_line or ""
