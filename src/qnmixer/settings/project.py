"""A project's own options and experiment, which its pyproject.toml names.

    [tool.qnmixer]
    conf = "conf"
    experiment = "mine"

So a command that starts in the folder of the project needs no flag for them.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from qnmixer.errors import ConfigError, first_line
from qnmixer.settings.compose import FLAGS, SEARCH_PATH, key_of
from qnmixer.settings.options import OF_A_RUN
from qnmixer.settings.validation import Section, validated

FILE = Path("pyproject.toml")


class ProjectConfig(Section):
    """The table of a project."""

    command: ClassVar[str] = FILE.name

    conf: str | None = None
    experiment: str | None = None


def in_project(words: Sequence[str], command: str, folder: Path = Path()) -> list[str]:
    """The words of a command line, with the config folder of a project and its experiment, unless they choose one.

    Words that name a config folder stay as they are: the processes of a run and the jobs of a sweep have such words.
    A run that resumes has an experiment.

    Args:
        words: as they were typed.
        command: such as train. Commands with the config of a run take the experiment.
        folder: of the project.

    Raises ConfigError for a table that names no folder, or has an unknown key.
    """
    file = folder / FILE
    names_folder = any(key_of(word) == SEARCH_PATH or word.startswith(FLAGS) for word in words)
    if names_folder or not file.is_file():
        return [*words]
    try:
        tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool")
    except ValueError as error:  # bad TOML, or bytes that are no text
        raise ConfigError(f"{file} of this folder cannot be read ({first_line(error)}): mend it") from error
    table = tool.get("qnmixer", {}) if isinstance(tool, dict) else {}
    project = validated(ProjectConfig, table, "tool.qnmixer")
    if project.conf is not None and not (folder / project.conf).is_dir():
        raise ConfigError(f'{file}: no folder {project.conf}: write conf = "FOLDER" in [tool.qnmixer]')
    takes_experiment = command in OF_A_RUN and {"experiment", "resume"}.isdisjoint(map(key_of, words))
    experiment = [f"experiment={project.experiment}"] if project.experiment and takes_experiment else []
    conf = [] if project.conf is None else [f"--config-dir={folder / project.conf}"]
    return [*conf, *experiment, *words]
