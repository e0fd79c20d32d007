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

from qnmixer.engine.config.checking import Section, validated
from qnmixer.engine.config.compose import key_of, names_folder
from qnmixer.engine.config.files import OF_A_RUN
from qnmixer.errors import ConfigError, first_line

FILE = Path("pyproject.toml")


class ProjectConfig(Section):
    """The table of a project."""

    command: ClassVar[str] = FILE.name

    conf: str | None = None
    experiment: str | None = None


def in_project(words: Sequence[str], command: str) -> list[str]:
    """The words of a command line, with the config folder of the project in the current folder, and its experiment.

    Words that name a config folder stay as they are: the processes of a run and the jobs of a sweep have such words.

    Args:
        words: as they were typed.
        command: such as train. Commands with the config of a run take the experiment.

    Raises ConfigError for a table that names no folder, or has an unknown key.
    """
    if names_folder(words) or not FILE.is_file():
        return [*words]
    try:
        tool = tomllib.loads(FILE.read_text(encoding="utf-8")).get("tool")
    except ValueError as error:  # bad TOML, or bytes that are no text
        raise ConfigError(f"{FILE} of this folder cannot be read ({first_line(error)}): mend it") from error
    table = tool.get("qnmixer", {}) if isinstance(tool, dict) else {}
    project = validated(ProjectConfig, table, "tool.qnmixer")
    if project.conf is not None and not Path(project.conf).is_dir():
        raise ConfigError(f'{FILE}: no folder {project.conf}: write conf = "FOLDER" in [tool.qnmixer]')
    return with_options_of(project.conf, project.experiment if command in OF_A_RUN else None, words)


def with_options_of(conf: Path | str | None, experiment: str | None, words: Sequence[str]) -> list[str]:
    """The words of a command line, with a config folder and an experiment, unless they choose one.

    A run that resumes has an experiment. A record of it has the folder, so ranks and jobs of a sweep know it.
    """
    is_chosen = not {"experiment", "resume"}.isdisjoint(map(key_of, words))
    folder = [] if conf is None else [f"--config-dir={conf}"]
    return [*folder, *([] if experiment is None or is_chosen else [f"experiment={experiment}"]), *words]
