"""Promise 2: kills resume bit for bit; a dead rank is named within seconds, no orphan; two writers never share
a folder.

Runs that are killed and resumed, from end to end: the results are those of an undisturbed run.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from qnmixer.reconstruction.checkpoints import Checkpoint

from ..conftest import PHANTOMS, TINY, Command, assert_equal, environment, rows_without_times
from ..warm import FORK_RANKS, Warm

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("resuming")]

# Epochs of eight batches, the last of one slice; a validation every five steps, so most of them in mid-epoch.
RUN = [*TINY, "noise=field", "trainer.val_every_n_steps=5"]
SLICES = (*PHANTOMS, "data.n_train=15")

# Draws from all random generators of a process, in a layer of the network and beside it.
DRAWING = """
import random, numpy, torch
from qnmixer.measurement import build as builders
from qnmixer.module import build

def build_network(config, projector):
    network = original(config, projector)
    def noisy(layer, inputs, output):
        if layer.training:
            output = torch.nn.functional.dropout(output, 0.2)
            output = output * (1 + 0.01 * random.random() + 0.01 * numpy.random.rand())
        return output
    network.regularizers[0].register_forward_hook(noisy)
    return network

original = builders.build_network
builders.build_network = build.build_network = build_network  # build may have been imported before
"""
AT_START = f"""
import sys
class WhenTrainingIsLoaded:
    def find_spec(name, path=None, target=None):
        if name == "qnmixer.fit":
            sys.meta_path.remove(WhenTrainingIsLoaded)  # who asks whether it exists comes before who imports it
            exec({DRAWING!r}, {{}})
if "qnmixer.fit" in sys.modules:
    exec({DRAWING!r}, {{}})
else:
    sys.meta_path.insert(0, WhenTrainingIsLoaded)
"""


class Runs:
    """Starts `python -m qnmixer.train` in a folder, by a Python that has loaded it.

    `cold`: what is to be killed is started by a new Python.
    """

    def __init__(self, folder: Path, warm: Warm, *, drawing: bool, cold: bool = False) -> None:
        self.folder, self.warm = folder, warm
        self.python = (sys.executable,) if cold else warm.under
        (folder / "sitecustomize.py").write_text(AT_START * drawing)
        path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.environment = environment(PYTHONPATH=path, QNMIXER_TEST_MARK=str(folder))

    def start(self, *overrides: str) -> Command:
        process = subprocess.Popen(
            [*self.python, "-m", "qnmixer.train", *overrides], cwd=self.folder, env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        return Command(process, f"QNMIXER_TEST_MARK={self.folder}\0", self.folder)

    def run(self, *overrides: str) -> None:
        variables = self.environment | FORK_RANKS
        process = self.warm.run("-m", "qnmixer.train", *overrides, cwd=self.folder, env=variables, timeout=500)
        assert process.returncode == 0, process.stderr


def kill(command: Command, run: Path, moment: str, seconds: float, n_processes: int) -> None:
    """SIGKILL so long after the start, or after the first new checkpoint, or then while the next one is written.

    Of at least so many processes none stays.
    """
    process, folder = command.process, run / "checkpoints"
    start_time, deadline = time.time(), time.monotonic() + 200
    if moment != "start":
        while not any(path.stat().st_mtime > start_time for path in folder.glob("last.ckpt")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
    time.sleep(seconds)
    while moment == "writing" and not list(folder.glob(".*.tmp")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
    assert process.poll() is None, process.communicate()
    assert len(command.family()) >= n_processes
    process.kill()
    code, stderr, seconds_to_end = command.end()
    assert code == -signal.SIGKILL
    # A data worker may still say that the run is gone: of a single process, or as it hands over a batch at this moment.
    if n_processes > 1 and stderr:
        first, second, *_, last = stderr.splitlines()
        assert stderr.count("Traceback") == 1 == first.count("Traceback"), stderr
        assert "resource_sharer.py" in second, stderr
        assert "reset by peer" in last, stderr
    assert seconds_to_end < 10


def assert_same(resumed_run: Path, whole_run: Path) -> None:
    """Two runs have come to the same: weights, optimizer, schedule, random states, best value, every row."""
    checkpoints = []
    for run in (resumed_run, whole_run):
        for name in ("last", "best"):
            checkpoint = torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)
            for key in ("loops", "callbacks"):  # counts of Lightning's, which `resume` does without
                del checkpoint[key]
            del checkpoint["qnmixer_run"]["seconds"], checkpoint["qnmixer"]["config"]["resume"]
            checkpoints.append(checkpoint)
    for restored, undisturbed in zip(checkpoints[:2], checkpoints[2:], strict=True):
        assert_equal(restored, undisturbed)
    assert rows_without_times(resumed_run) == rows_without_times(whole_run)


def kill_and_go_on(
    runs: Runs, moments: list[tuple[str, float]], *overrides: str, slices: Sequence[str] = SLICES, n_processes: int = 1
) -> None:
    """A run that is killed at each of these moments, and resumed each time, compared with an undisturbed run.

    By the same command, and in the end by resume=latest.
    """
    whole_run, killed_run = runs.folder / "whole", runs.folder / "runs" / "killed"
    runs.run(*RUN, *slices, *overrides, f"hydra.run.dir={whole_run}")
    command = [*RUN, *slices, *overrides, "hydra.run.dir=runs/killed"]
    for moment, seconds in moments:
        kill(runs.start(*command), killed_run, moment, seconds, n_processes)
        if (killed_run / "checkpoints" / "last.ckpt").exists():  # whole, at any moment
            torch.load(killed_run / "checkpoints" / "last.ckpt", weights_only=True)
    runs.run("resume=latest")
    assert_same(killed_run, whole_run)
    assert not list(killed_run.rglob("*.tmp"))


@pytest.fixture
def mix(tmp_path: Path) -> list[str]:
    """Overrides for slices and phantoms: epochs of four steps, the last of one slice."""
    for k in range(5):
        hu = np.random.default_rng(k).uniform(-1000, 1500, (2, 32, 32)).astype(np.float32)
        (tmp_path / "ct").mkdir(exist_ok=True)
        np.save(tmp_path / "ct" / f"{k}.npy", hu)
    return [
        "data=mixed", "data.sources.slices.name=numpy", f"data.sources.slices.root={tmp_path / 'ct'}",
        "data.sources.slices.share=0.9", "data.sources.phantoms.share=0.1", "data.augment=true",
        "data.simulation_factor=2", "callbacks=default",
    ]  # fmt: skip


def test_a_mix_of_data_trained_by_muon_is_the_same_after_a_kill(warm: Warm, tmp_path: Path, mix: list[str]) -> None:
    """Phantoms alone and AdamW are killed below. The last losses are of a later epoch than the first."""
    overrides = ["trainer.max_steps=12", "trainer.save_every_n_steps=3", "optimizer=muon"]
    kill_and_go_on(Runs(tmp_path, warm, drawing=False), [("training", 0.1)], *overrides, slices=mix)


def moments(seed: int, start: int, training: int, writing: int, pace: float = 1) -> list[tuple[str, float]]:
    """So many random moments of the start, of training and validation, and of the writing of checkpoints."""
    rng = random.Random(seed)
    draws = [("start", pace * rng.uniform(0, 8)) for _ in range(start)]
    draws += [("training", pace * rng.uniform(0, 1.5)) for _ in range(training)]
    draws += [("writing", pace * rng.uniform(0, 1)) for _ in range(writing)]
    rng.shuffle(draws)
    return draws


@pytest.mark.parametrize(("steps", "kills", "cold"), [
    (24, moments(0, 1, 2, 2, pace=0.06), False),
    pytest.param(500, moments(0, 4, 8, 8), True, marks=pytest.mark.long),  # of Pythons that load their libraries
], ids=["5", "20"])  # fmt: skip
def test_a_run_that_is_killed_again_and_again_comes_to_the_same(
    warm: Warm, tmp_path: Path, steps: int, kills: list[tuple[str, float]], cold: bool
) -> None:
    overrides = [f"trainer.max_steps={steps}", "trainer.save_every_n_steps=1", "data.num_workers=1"]
    kill_and_go_on(Runs(tmp_path, warm, drawing=True, cold=cold), kills, *overrides)


@pytest.mark.parametrize(
    ("steps", "training", "writing"), [(14, 1, 0), pytest.param(200, 3, 2, marks=pytest.mark.long)]
)
def test_two_processes_that_are_killed_come_to_the_same(
    warm: Warm, tmp_path: Path, steps: int, training: int, writing: int
) -> None:
    """Their launcher is killed, which ends them and their data workers."""
    overrides = [f"trainer.max_steps={steps}", "trainer.save_every_n_steps=2", "strategy=ddp", "trainer.devices=2"]
    overrides += ["data.batch_size=1", "data.num_workers=1"]
    kills = moments(1, 0, training, writing)
    kill_and_go_on(Runs(tmp_path, warm, drawing=True), kills, *overrides, n_processes=1 + 2 * (1 + 1))


def test_shards_go_on_in_the_middle_of_an_epoch_too(warm: Warm, tmp_path: Path) -> None:
    """Lightning restores fsdp later than all others, when data for a run by epochs might be open already."""
    runs, weights = Runs(tmp_path, warm, drawing=False), []
    epochs = [*RUN, *PHANTOMS, "data.n_train=3", "trainer.max_steps=-1", "trainer.max_epochs=3"]
    epochs += ["strategy=fsdp", "trainer.devices=1"]
    for folder, words in (
        ("whole", epochs),
        ("begun", [*epochs, "trainer.max_steps=3"]),
        ("begun", [*epochs, "resume=begun"]),
    ):
        runs.run(*words, "schedule=constant", "data.num_workers=1", f"hydra.run.dir={folder}")
        weights.append(Checkpoint(tmp_path / folder / "checkpoints" / "last.ckpt").state)
    assert_equal(weights[2], weights[0])
