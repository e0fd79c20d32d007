"""sweep.json: the overrides of a sweep and of each of its jobs."""

import json
import math
from pathlib import Path
from typing import TypedDict, cast, get_type_hints

from qnmixer.engine.tracking.records import damaged, read_json
from qnmixer.files import write_text

SWEEP = "sweep.json"
"""The file that marks the folder of a sweep."""


class Sweep(TypedDict):
    """The content of sweep.json, which exists before the first job starts."""

    overrides: list[str]  # of the command line
    varying: list[str]  # keys that differ between jobs
    git_commit: str | None
    jobs: dict[str, list[str]] | None  # overrides of its jobs so far, by folder; None: not recorded by the launcher


def sweep_of(folder: Path) -> tuple[Path, Sweep] | None:
    """The folder and the content of the sweep that a run folder belongs to; None if there is no sweep."""
    for parent in folder.absolute().parents:
        if (parent / SWEEP).is_file():
            return parent, read_sweep(parent)
    return None


def name_of_job(sweep: Sweep, overrides: list[str]) -> str:
    """The overrides that make a job differ from the others, such as "optimizer.lr=0.001, strategy=ddp"."""
    pairs = [override.lstrip("+").partition("=") for override in overrides]
    return ", ".join(f"{key}={readable(value)}" for key, _, value in pairs if key in sweep["varying"])


def read_sweep(folder: Path) -> Sweep:
    """Read sweep.json of a folder. Raises DataError if it is damaged."""
    record = read_json(folder / SWEEP, get_type_hints(Sweep))
    if missing := sorted(Sweep.__required_keys__ - record.keys()):
        raise damaged(folder / SWEEP, f"it has no {missing[0]}", "start the sweep again in a new folder")
    return cast(Sweep, record)


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Write sweep.json of a folder."""
    write_text(folder / SWEEP, json.dumps(sweep, indent=2) + "\n")


def readable(value: str) -> str:
    """A value, rounded to four digits if it is long: the numbers that a search draws have many digits."""
    number = as_number(value)
    return value if number is None or len(value) <= 8 else f"{number:.4g}"


def as_number(text: str) -> float | None:
    """The value as a finite number; None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
