"""The files of conf/: the options of each group, their keys, and their values. No other list of options exists."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import Container, OmegaConf

CONF = (Path(__file__).parents[1] / "conf").resolve()
"""In a clone, a link to conf/ of the repository; in a wheel, a copy of the files."""
TARGET = "_target_"
OF_A_RUN = ("train", "plan", "doctor")  # commands with the full config of a run; the others read it from a run folder
_COMMANDS_OF = {
    "as_trained": ("evaluate", "compare", "robustness", "reconstruct"),
    "task": ("evaluate",),
    "uncertainty": ("evaluate",),
}
"""The commands that have an option which is for trained networks."""


def is_group(word: str) -> bool:
    """Whether a key of the command line is a group, so that its value is the name of an option."""
    return bool(word) and (CONF / word).is_dir()


def option_files(group: str, command: str, folders: Iterable[Path] = ()) -> dict[str, Path]:
    """The files of a group that a command can choose, by the name of the option. `folders`: of the user's, after conf/.

    A name that begins with _ is part of other files.
    """
    files = (path for folder in (CONF, *folders) for path in sorted((folder / group).glob("[!_]*.yaml")))
    return {path.stem: path for path in files if command in _COMMANDS_OF.get(path.stem, (command,))} if group else {}


@cache
def options(group: str, command: str = "train") -> list[str]:
    """The options of a group in conf/, by name, without `custom`, which names a class of the user's."""
    return sorted(option_files(group, command).keys() - {"custom"})


@cache
def _read(path: Path) -> Container:
    """A file of conf/. To read one takes longer than to copy it, and several options include the same."""
    return OmegaConf.load(path)


def files_of(group: str, option: str) -> list[tuple[Path, str]]:
    """The files of an option, those that it includes first. Each with the key at which it stands (FILE@KEY), or ""."""
    path = CONF / group / f"{option}.yaml"
    if not path.is_file():
        return []
    defaults = OmegaConf.select(_read(path), "defaults", default=[])
    names = [name.partition("@") for name in defaults if isinstance(name, str)]
    return [(file, key) for name, _, key in names for file, _ in files_of(group, name)] + [(path, "")]


@cache
def values_of_option(group: str, option: str) -> Mapping[str, Any]:
    """The values in the files of an option, not resolved."""
    merged = OmegaConf.create()
    for path, key in files_of(group, option):
        if key:
            OmegaConf.update(merged, key, _read(path))
        else:
            merged.merge_with(_read(path))
    values = OmegaConf.to_container(merged, resolve=False)
    assert isinstance(values, dict)
    values.pop("defaults", None)
    return {str(key): value for key, value in (values.get(group) or values).items()}  # _global_: its group


@cache
def _options_by_target(group: str) -> dict[str, str]:
    """If several options have the same target, the shortest name wins: qn_mixer, not qn_mixer_paper."""
    named = sorted(options(group), key=len, reverse=True)
    return {str(values_of_option(group, option).get(TARGET)): option for option in named}


def option_of(group: str, target: str) -> str:
    """The option of a target; the target itself if conf/ has none."""
    return _options_by_target(group).get(target, target)


def flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All keys by their dotted names, groups included, and their values."""
    for key, value in values.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
