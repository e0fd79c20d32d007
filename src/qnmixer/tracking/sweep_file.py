"""What the folder of a sweep says of it, and of each of its jobs: sweep.json."""

import json
import math
from pathlib import Path
from typing import TypedDict

from qnmixer.files import write_text

SWEEP = "sweep.json"
"""What tells the folder of a sweep from that of a run."""


class Sweep(TypedDict):
    """What a sweep's folder says of it in sweep.json, from before its first job on."""

    overrides: list[str]  # as they were given
    varying: list[str]  # keys of which not all jobs have the same value
    git_commit: str | None
    jobs: dict[str, list[str]] | None  # overrides of its jobs so far, by folder; None: of a launcher that does not say


def sweep_of(folder: Path) -> tuple[Path, Sweep] | None:
    """The sweep that a run folder is in, and its folder; None where the run is one by itself."""
    for parent in folder.absolute().parents:
        if (parent / SWEEP).is_file():
            return parent, read_sweep(parent)
    return None


def name_of_job(sweep: Sweep, overrides: list[str]) -> str:
    """The overrides by which a job differs from the others, as "optimizer.lr=0.001, strategy=ddp"."""
    pairs = [override.lstrip("+").partition("=") for override in overrides]
    return ", ".join(f"{key}={readable(value)}" for key, _, value in pairs if key in sweep["varying"])


def read_sweep(folder: Path) -> Sweep:
    """What sweep.json says."""
    return json.loads((folder / SWEEP).read_text())


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Put it down there."""
    write_text(folder / SWEEP, json.dumps(sweep, indent=2) + "\n")


def readable(value: str) -> str:
    """A value without the digits that nobody reads, which a search draws numbers with."""
    number = as_number(value)
    return value if number is None or len(value) <= 8 else f"{number:.4g}"


def as_number(text: str) -> float | None:
    """A finite number as an override has it; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
