"""The words of a command line, the user's own config folders, and the config that Hydra composes from them and conf/.

Hydra is imported when something is composed. A program that only loads a network does not need it.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from traceback import walk_tb
from typing import Any

import yaml
from omegaconf import DictConfig

from qnmixer.engine.config.checking import answer
from qnmixer.engine.config.files import CONF, is_group, options
from qnmixer.errors import ConfigError, first_line
from qnmixer.files import path_of

OF_A_RUN = ("train", "plan", "doctor")
"""Commands with the full config of a run; the others read it from a run folder."""
LENGTH = ("trainer.max_steps", "trainer.max_epochs")
"""The keys that set the length of a run."""
SEARCH_PATH = "hydra.searchpath"
_FLAGS = ("--config-dir", "-cd")
_FILE, _PACKAGE = "file://", "pkg://"
NO_EXPERIMENT = "experiment=null"
_MOST_BYTES, _MOST_VALUES = 2**18, 2000
"""Of a config file. One of ours has 2 kB, and 60 values."""


def quoted(path: Path | str) -> str:
    """A path or address, quoted for Hydra's command line."""
    text = str(path)
    if all((c.isascii() and c.isalnum()) or c in "/-_.:" for c in text):  # Hydra's grammar knows ASCII letters only
        return text
    return '"' + text.replace('"', '\\"') + '"'  # single quotes are for the shell around it


def is_override(word: str) -> bool:
    """Whether a word of a command line is an override: KEY=VALUE or ~KEY, no flag and no value of a flag."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def key_of(override: str) -> str:
    """The key of an override, without Hydra's signs before it."""
    return override.lstrip("+~").partition("=")[0]


def values_of(overrides: list[str]) -> dict[str, str]:
    """Values of overrides by key, without quotes."""
    pairs = [(key_of(override), override.partition("=")[2]) for override in overrides]
    return {key: value.strip("'\"").replace("\\'", "'").replace('\\"', '"') for key, value in pairs}


def of_hydra(override: str) -> bool:
    """Whether an override is for Hydra itself, also in the forms hydra={…} and …@hydra.…."""
    return re.search(r"(^|@)\s*hydra\b", key_of(override)) is not None


def without_null(overrides: list[str]) -> list[str]:
    """Overrides without `experiment=null`, the default of conf/train.yaml, and without the experiments before it.

    Hydra takes null for a group in a file only.
    """
    last_null = max((i for i, word in enumerate(overrides) if word == NO_EXPERIMENT), default=-1)
    return [word for i, word in enumerate(overrides) if i > last_null or key_of(word) != "experiment"]


def with_search_path(arguments: list[str]) -> list[str]:
    """Put the user's config folders into one override, `hydra.searchpath=[…]`, with absolute paths.

    They come from `--config-dir FOLDER` and from that override. The record of a run then has them, like any other
    override. Raises ConfigError for a folder that does not exist, or that has a file with the name of one of ours:
    Hydra would take ours.
    """
    other_words, folders, searched = [], [], list[str]()
    words = iter(arguments)
    for word in words:
        flag, equal, value = word.partition("=")
        if flag in _FLAGS:
            folders.append(value if equal else next(words, ""))
        elif key_of(word) == SEARCH_PATH:
            searched = _places(word)
        else:
            other_words.append(word)
    places = [*map(_located, [*folders, *searched])]
    return [f"{SEARCH_PATH}=[{','.join(map(quoted, places))}]", *other_words] if places else other_words


def search_path_in(overrides: list[str]) -> list[str]:
    """The override that names the config folders, in a list; [] if there is none."""
    return [override for override in overrides if key_of(override) == SEARCH_PATH]


def names_folder(words: Iterable[str]) -> bool:
    """Whether a command line names a config folder of the user's."""
    return any(key_of(word) == SEARCH_PATH or word.startswith(_FLAGS) for word in words)


def folders_in(words: Iterable[str]) -> list[Path]:
    """The user's config folders of a command line. Those in packages are left out."""
    places = [place for override in search_path_in(with_search_path([*words])) for place in _places(override)]
    return [Path(place.removeprefix(_FILE)) for place in places if place.startswith(_FILE)]


def _places(override: str) -> list[str]:
    """The folders that such an override names. Raises ConfigError if it is no list of texts."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (parsed,) = OverridesParser.create().parse_overrides([override])
    value = parsed.value()
    if not isinstance(value, list):
        raise ConfigError(f"{override} is no list of folders: write {SEARCH_PATH}=[file:///abs/my_conf]")
    return [str(getattr(place, "text", place)) for place in value]


def _located(place: str) -> str:
    if place.startswith(_PACKAGE):
        return place
    folder = path_of(place.removeprefix(_FILE))
    if not place or not folder.is_dir():
        raise ConfigError(f"no config folder at {place or folder}: give it as --config-dir FOLDER")
    our_files = [path.relative_to(CONF) for path in sorted(CONF.rglob("*.yaml")) if folder.resolve() != CONF]
    if clash := next((path for path in our_files if (folder / path).is_file()), None):
        raise ConfigError(f"{folder / clash} has the name of a file of qnmixer, which would be used instead: rename it")
    _check_sizes(folder)
    return _FILE + os.path.abspath(folder)


def _check_sizes(folder: Path) -> None:
    """Raise ConfigError for a config file that Hydra would read for minutes: aliases may double a value many times.

    Hydra reads no file of a hidden folder, unless that is the config folder itself.
    """
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in files if name.endswith((".yaml", ".yml"))):
            if not path.is_file():  # a pipe would never end
                continue
            with path.open("rb") as stream:
                content = stream.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise ConfigError(f"{path} has more than {_MOST_BYTES >> 10} KiB, too many for a config: remove it")
            if b"*" in content and b"&" in content and _count_of_values(content) > _MOST_VALUES:
                raise ConfigError(
                    f"{path} has more than {_MOST_VALUES:,} values, because its aliases (*NAME) repeat them: write "
                    "them out, or remove it"
                )


def _count_of_values(content: bytes) -> float:
    """The values of a YAML file with its aliases written out; inf if one contains itself; 0 if it is no YAML."""
    counts: dict[int, float] = {}

    def count(node: yaml.Node) -> float:
        if id(node) not in counts:
            counts[id(node)] = math.inf  # until it is counted
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            flat = [part_of_pair for part in parts for part_of_pair in (part if isinstance(part, tuple) else (part,))]
            counts[id(node)] = 1 + sum(map(count, flat))
        return counts[id(node)]

    try:
        roots = [*yaml.compose_all(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))]
        return sum(count(root) for root in roots if root is not None)
    except (yaml.YAMLError, ValueError, RecursionError):  # Hydra says what is wrong with it
        return 0


def with_one_limit(words: list[str]) -> list[str]:
    """max_epochs alone is the only limit of a run: max_steps of a file must not end it. Nothing is added twice."""
    values = values_of([*filter(is_override, words)])
    has_epochs_only = values.get("trainer.max_epochs", "null") not in ("null", "") and "trainer.max_steps" not in values
    return [*words, "trainer.max_steps=-1"] if has_epochs_only else words


def compose(config_name: str, overrides: list[str], with_hydra: bool = False) -> DictConfig:
    """The config of a command, without running anything. `with_hydra`: with Hydra's own part. Raises ConfigError."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    if not CONF.is_dir():
        raise ConfigError(f"no configs at {CONF}: in a clone, `git config core.symlinks true` and check it out again")
    if nameless := next((word for word in overrides if word[:1] in ("+", "~", "=") and not key_of(word)), None):
        raise ConfigError(f"{nameless} has no key: write KEY=VALUE, without blanks around the =")
    if config_name in OF_A_RUN:
        overrides = with_one_limit(overrides)
    # Hydra refuses a second initialisation in one process, and a program may compose many configs.
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            return hydra.compose(config_name, without_null(overrides), return_hydra_config=with_hydra)
        except Exception as error:
            if fault := fault_of_file(error):
                raise ConfigError(fault) from error
            # Of Hydra: data=null, trainer=3, data=${oc.select:seed}, a number of 5,000 digits, or hundreds of brackets
            if not isinstance(error, ValueError | TypeError | AssertionError | RecursionError):
                raise
            raise ConfigError(_unreadable(overrides, first_line(error))) from error


def _unreadable(overrides: list[str], why: str) -> str:
    """The line for values that Hydra cannot read."""
    groups = {key_of(word): word for word in overrides if is_group(key_of(word))}
    if way := next(filter(None, map(answer, groups.values())), None):
        return way
    if not groups:
        return f"a value cannot be read ({why}): check the values"
    *_, group = groups
    choices = f"give {group} the name of one of its options: {', '.join(options(group))}"
    return f"{' '.join(groups.values())} cannot be read ({why}): {choices}"


def fault_of_file(error: BaseException) -> str | None:
    """The line for an error that Hydra met in a config file: file, line and fault. None: in no file.

    Hydra's errors name no file. The frames in which they were raised know it.
    """
    from hydra.errors import HydraException

    for frame, _ in reversed([*walk_tb(error.__traceback__)]):
        function, variables = frame.f_code.co_qualname, frame.f_locals
        if function == "FileConfigSource.load_config":
            path, line = Path(variables["full_path"]), _line_of(error, Path(variables["full_path"]))
            parts = [getattr(error, name, None) for name in ("context", "problem", "reason")]  # of YAML, of encodings
            fault = ", ".join(filter(None, parts)) or first_line(error.__cause__ or error)
            return f"{path} cannot be read ({f'line {line}: ' if line else ''}{fault}): mend the file"
        if function == "ConfigRepository.load_config" and not isinstance(error, RecursionError | HydraException):
            return (
                f"the defaults of {variables['config_path']}.yaml cannot be read ({first_line(error)}): mend the file"
            )
        if function == "_create_defaults_tree_impl" and isinstance(error, RecursionError) and "path" in variables:
            return f"the defaults of {variables['path']}.yaml name itself, or a file that names it: take that name out"
    return None


def _line_of(error: BaseException, path: Path) -> int | None:
    """The line of a file, from 1, in which an error of YAML or of the encoding lies."""
    if mark := getattr(error, "problem_mark", None):
        return int(mark.line) + 1
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as fault:
        return fault.object.count(b"\n", 0, fault.start) + 1
    position = getattr(error, "position", None)
    return None if position is None else text.count("\n", 0, position) + 1


def compose_sweep(config_name: str, overrides: list[str]) -> DictConfig:
    """The config of a sweep's first job, with Hydra's own part.

    Every value is tried with the first values of all other keys. So a misspelt value fails before the first job.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ValueType

    parsed = OverridesParser.create().parse_overrides(overrides)
    # A glob only finds names that exist.
    listed = [override for override in parsed if override.value_type != ValueType.GLOB_CHOICE_SWEEP]
    values = [list(_values(override)) for override in listed]
    if empty := next(
        (override.input_line for override, choices in zip(listed, values, strict=True) if not choices), None
    ):
        raise ConfigError(f"{empty} has no value: give at least one")
    first_words = [choices[0] for choices in values]
    for i, choices in enumerate(values):
        for value in choices[1:]:
            compose(config_name, [*first_words[:i], value, *first_words[i + 1 :]])
    return compose(config_name, first_words, with_hydra=True)


def _values(override: Any) -> Iterator[str]:
    """One override for each value that a sweep gives a key, from Hydra's. An interval gives its start."""
    if override.is_discrete_sweep():
        yield from (f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator())
    elif override.is_interval_sweep():
        yield f"{override.get_key_element()}={override.value().start}"
    else:
        yield override.input_line or ""
