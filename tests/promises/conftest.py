"""Runs that several promises are tested on: trained once, by who needs them first.

The tests of this folder run real commands. They change where a path is renamed, never in what they assert.
"""

from pathlib import Path

import pytest
import torch

from ..conftest import environment
from ..saved import save
from ..wandb_server import wandb_server
from ..warm import FORK_RANKS, Warm
from .commands import PHANTOMS, TINY, Command, Outcome, training, write_ct

__all__ = ["command", "ct", "minmax", "noise_free", "place", "trained", "wandb_server"]


@pytest.fixture(scope="session")
def command(warm: Warm) -> Command:
    """`python -m qnmixer.NAME WORDS` in a folder: a process of its own, whose libraries are loaded before."""

    def run(folder: Path, name: str, *words: str, **variables: str) -> Outcome:
        variables = environment(**FORK_RANKS, **variables)
        process = warm.run("-m", f"qnmixer.{name}", *words, cwd=folder, env=variables)
        return Outcome(process.returncode, process.stdout, process.stderr)

    return run


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs below are. Threads of tests that run side by side would wait for each other, spinning."""
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("commands")


def run_of(folder: Path, *words: str) -> Path:
    """A run folder, and beside its files what the command has said."""
    outcome = training(folder, *words)
    assert outcome.code == 0, outcome.stderr
    (folder / "stdout.txt").write_text(outcome.stdout)
    return folder


@pytest.fixture(scope="session")
def trained(place: Path) -> Path:
    """A run folder on phantoms, with the field's noise."""
    return run_of(place / "trained", "noise=field", "callbacks=default")


@pytest.fixture(scope="session")
def noise_free(place: Path) -> Path:
    """A run folder without noise, on whose simulated sinograms one can count."""
    return run_of(place / "noise_free", "test_after_training=false")


@pytest.fixture(scope="session")
def minmax(place: Path) -> Path:
    """A run folder whose slices have no scale, with random weights."""
    return save(place / "minmax", *TINY, *PHANTOMS, "data.scaling=minmax")


@pytest.fixture(scope="session")
def ct(place: Path) -> Path:
    """Three patients of two slices each in DICOM, and two files of no use."""
    folder = place / "ct"
    for p, patient in enumerate(("A", "B", "C")):
        for k in range(2):
            write_ct(folder / patient / f"{k}.dcm", 2 * p + k, patient)
    (folder / "notes.txt").write_text("no CT")
    (folder / "A" / "cut.dcm").write_bytes((folder / "A" / "0.dcm").read_bytes()[:900])
    return folder
