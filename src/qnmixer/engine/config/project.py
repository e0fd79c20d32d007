"""A project's own options and experiment, which its pyproject.toml names.

    [tool.qnmixer]
    conf = "conf"
    experiment = "mine"

So a command that starts in the folder of the project needs no flag for them.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from qnmixer.engine.config.compose import OF_A_RUN, key_of, names_folder
from qnmixer.errors import ConfigError, first_line

FILE = Path("pyproject.toml")
_KEYS = ("conf", "experiment")


def in_project(words: Sequence[str], command: str) -> list[str]:
    """The words of a command line, with the config folder of the project in the current folder, and its experiment.

    Words that name a config folder stay as they are: the processes of a run and the jobs of a sweep have such words.

    Args:
        words: as they were typed.
        command: such as train. Commands with the config of a run take the experiment.

    Raises ConfigError for a table that names no folder, or has an unknown key.
    """
    if names_folder(words):
        return [*words]
    table = _table()
    if "conf" not in table:
        return [*words]
    chooses = "experiment" in table and command in OF_A_RUN and not {"experiment", "resume"} & {*map(key_of, words)}
    return [f"--config-dir={table['conf']}", *[f"experiment={table['experiment']}"] * chooses, *words]


def _table() -> dict[str, str]:
    """The table tool.qnmixer of the pyproject.toml in the current folder; {} if there is none."""
    if not FILE.is_file():
        return {}
    try:
        table = tomllib.loads(FILE.read_text(encoding="utf-8")).get("tool", {}).get("qnmixer", {})
    except ValueError as error:  # bad TOML, or bytes that are no text
        raise ConfigError(f"{FILE} of this folder cannot be read ({first_line(error)}): mend it") from error
    if not isinstance(table, dict) or not all(key in _KEYS and isinstance(value, str) for key, value in table.items()):
        raise ConfigError(f'{FILE}: [tool.qnmixer] takes conf = "FOLDER" and experiment = "NAME" only')
    if "conf" in table and not Path(table["conf"]).is_dir():
        raise ConfigError(f'{FILE}: no folder {table["conf"]}: write conf = "FOLDER" in [tool.qnmixer]')
    return table
