"""A project's own options and experiment, which its pyproject.toml names.

    [tool.qnmixer]
    conf = "src/mine/conf"
    experiment = "mine"

So a command that starts in the folder of the project needs no flag for them.
"""

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from qnmixer.errors import ConfigError, first_line
from qnmixer.settings.compose import key_of
from qnmixer.settings.options import OF_A_RUN
from qnmixer.settings.validation import Section, validated

FILE = "pyproject.toml"
NO_PROJECT = "QNMIXER_NO_PROJECT"
"""An environment variable for the jobs of a sweep: their words are complete, in whatever folder they start."""


class ProjectConfig(Section):
    """The table of a project."""

    command: ClassVar[str] = FILE

    conf: str | None = None
    experiment: str | None = None


@dataclass(frozen=True)
class Project:
    """The folder of options and the experiment of a project; None for what it does not have."""

    conf: Path | None = None
    experiment: str | None = None
    choices: tuple[str, ...] = ()
    """Its experiments, if one must be typed because nothing says which of them is meant."""

    def with_experiment(self, words: Sequence[str], command: str) -> list[str]:
        """The words of a command line with the experiment of the project, if the command takes one and has none.

        A run that resumes has an experiment. Raises ConfigError if one must be typed.
        """
        if command not in OF_A_RUN or not {"experiment", "resume", "ckpt_path"}.isdisjoint(map(key_of, words)):
            return [*words]
        if self.choices and {"--help", "--help=all", "-h", "--version"}.isdisjoint(words):
            raise ConfigError(f"{self.conf} has several experiments: add experiment={' or '.join(self.choices)}")
        return [*words] if self.experiment is None else [f"experiment={self.experiment}", *words]


def project_here() -> Project:
    """The project of the current folder; one without anything if there is none. Raises ConfigError for a bad file."""
    return Project() if NO_PROJECT in os.environ else _read(Path(FILE)) or Project()


def project_at(place: Path) -> Project:
    """The project of a command of its own, which must not train anything else.

    place: the folder of its options, or that of its pyproject.toml. An installed wheel has the options only: then their
    only experiment is meant.

    Raises ConfigError if there is no such project, or if its pyproject.toml is bad.
    """
    if (file := place / FILE).is_file():
        if (project := _read(file)) is None:
            raise ConfigError(f"{file} has no [tool.qnmixer]: write conf and experiment of this project there")
        return project
    above = next((folder / FILE for folder in place.absolute().parents if (folder / FILE).is_file()), None)
    project = None if above is None else _read(above)
    # The file above an installed wheel is that of another project.
    if project is not None and project.conf is not None and project.conf.resolve() == place.resolve():
        return project
    names = tuple(path.stem for path in sorted(place.glob("experiment/[!_]*.yaml")))
    if not names:
        raise ConfigError(f"{place} has neither {FILE} nor experiment/*.yaml: give main(…) the project's folder conf")
    return Project(place, names[0]) if len(names) == 1 else Project(place, choices=names)


def _read(file: Path) -> Project | None:
    """What a pyproject.toml says of its project; None if it is not there, or has no table of qnmixer.

    Raises ConfigError for a table that names no folder, or has an unknown key.
    """
    if not file.is_file():
        return None
    try:
        tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool")
    except ValueError as error:  # bad TOML, or bytes that are no text
        raise ConfigError(f"{file} cannot be read ({first_line(error)}): mend it") from error
    if not isinstance(tool, dict) or "qnmixer" not in tool:
        return None
    table = validated(ProjectConfig, tool["qnmixer"], "tool.qnmixer")
    conf = None if table.conf is None else file.parent / table.conf
    if conf is not None and not conf.is_dir():
        raise ConfigError(f'{file}: no folder {table.conf}: write conf = "FOLDER" in [tool.qnmixer]')
    return Project(conf, table.experiment)
