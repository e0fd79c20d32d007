"""Runs that several promises are tested on: trained once, by who needs them first.

The tests of this folder run real commands. They change where a path is renamed, never in what they assert.
"""

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import pytest
import torch

from ..conftest import TINY as COMMON
from ..conftest import environment
from ..saved import save
from ..wandb_server import WandbServer, wandb_server
from ..warm import Warm
from .commands import PHANTOMS, TINY, training, write_ct

__all__ = ["ct", "minmax", "noise_free", "place", "trained", "wandb_server"]

SMALLEST = [word for word in COMMON if not word.startswith(("logger", "callbacks", "trainer.max", "trainer.val"))]


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


class LeftAlone(NamedTuple):
    """A real run, whose server goes after the first validation."""

    folder: Path
    process: subprocess.Popen[str]
    server: WandbServer
    waited: SimpleQueue[float]
    """Gets the seconds from there to its end."""


@pytest.fixture(scope="session")
def left_alone(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[LeftAlone]:
    """In the end it waits 20 s for its server: tests that need nothing of it begin it."""
    folder, server = tmp_path_factory.mktemp("left_alone"), WandbServer()
    words = [*SMALLEST, *PHANTOMS, "trainer.max_steps=24", "trainer.val_every_n_steps=8", "logger.wandb.mode=online"]
    variables = environment(WANDB_BASE_URL=server.url, WANDB_API_KEY="k" * 40, HOME=str(folder / "home"))
    process = subprocess.Popen(
        [*warm.under, "-m", "qnmixer.train", *words, f"hydra.run.dir={folder / 'run'}"], cwd=folder, env=variables,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    waited: SimpleQueue[float] = SimpleQueue()

    def leave_after_the_first_validation() -> None:
        while process.poll() is None and not list(folder.glob("run/pictures/*.png")):
            time.sleep(0.02)
        server.leave()
        start = time.monotonic()
        process.wait()
        waited.put(time.monotonic() - start)

    threading.Thread(target=leave_after_the_first_validation, daemon=True).start()
    yield LeftAlone(folder / "run", process, server, waited)
    process.kill()
    process.communicate()
    server.leave()
