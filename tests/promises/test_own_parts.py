"""Promise 8: No file of another's executes code, writes outside, or reaches the network.

The parts of a run from one file and one config in an empty folder: LightningModule, DataModule, network, loss,
optimizer, noise and callback, by the real commands. And what a training step of one's own may do, with each strategy.
"""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qnmixer.weights import CHECKPOINT_KEY

from ..warm import FORK_RANKS, Done, Warm

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("own parts")]

CODE = '''
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.models import UnrolledNetwork
from qnmixer.module import ReconstructionModule
from qnmixer.physics import KeyedNoise


class MyModule(ReconstructionModule):
    """Terms on x_T and on the iterates."""

    def __init__(self, *parts, smooth=0.0, iterates=0.0, mode="", **named):
        super().__init__(*parts, **named)
        self.smooth, self.of_iterates, self.mode = smooth, iterates, mode

    def training_step(self, batch, batch_idx):
        y, truth = self.measure(batch, "train"), batch["image"]
        image = self.network(2 * y if self.mode == "another" else y)
        loss = (batch["weight"] * self.loss(image, truth)).mean()
        roughness = image.diff(dim=-1).square().mean()
        self.log("train/roughness", roughness, sync_dist=True)
        self.log_dict({"train/range": float(image.detach().max() - image.detach().min()), "train/one": 1})
        if self.of_iterates:
            loss = loss + self.of_iterates * sum(self.loss(x, truth).mean() for x in self.network.iterates(y))
        return loss + self.smooth * roughness


class MyData(SliceDataModule):
    """The first slices of each epoch, again and again."""

    def __init__(self, config, *, same, **options):
        super().__init__(config, **options | {"overfit": same})

    def describe(self):
        return f"mine: {super().describe()}"


class MyNetwork(UnrolledNetwork):
    title = "Mine"

    def __init__(self, projector, n_iterations, channels):
        super().__init__(n_iterations)
        self.projector = projector
        self.denoiser = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, 1, 1))

    def start(self, y):
        return self.projector.fbp(y)

    def step(self, t, y, x):
        return x - 0.1 * self.denoiser(x)


def cubic(image, truth, factor):
    return factor * (image - truth).abs().pow(3).mean((1, 2, 3))


class MyOptimizer(torch.optim.SGD):
    def __init__(self, params, lr, pull):
        super().__init__(params, lr)
        self.pull = pull


class MyNoise(KeyedNoise):
    def __init__(self, strength):
        self.strength = strength

    def sample(self, p, rng):
        return p + self.strength * rng.standard_normal(p.shape)


class Counting(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, module):
        with Path(self.path).open("a") as stream:
            stream.write(f"{type(module).__name__} {type(trainer.datamodule).__name__} {trainer.global_step}\\n")
'''
EXPERIMENT = """# @package _global_
defaults:
  - _self_
  - override /model: custom
  - override /loss: custom
  - override /optimizer: custom
  - override /noise: custom
module: {_target_: mine.MyModule, smooth: 0.5}
datamodule: {_target_: mine.MyData, same: 2}
model: {_target_: mine.MyNetwork, n_iterations: 2, channels: 4}
loss: {_target_: mine.cubic, factor: 10.0}
optimizer: {_target_: mine.MyOptimizer, pull: 0.5}
noise: {_target_: mine.MyNoise, strength: 3.0}
callbacks: {mine: {_target_: mine.Counting, path: counted.txt}}
data: {image_size: 16, batch_size: 2, num_workers: 0, n_train: 8, n_val: 2, n_test: 2}
geometry: {n_views: 8, n_detectors: 24, detector_pitch: 40}
trainer: {max_steps: 2, val_every_n_steps: 2, log_every_n_steps: 1, accelerator: cpu}
test_after_training: false
"""
MINE = ["--config-dir", "conf", "experiment=mine", "logger=csv"]
# The module alone, in a run that is otherwise ours.
TINY = [
    "module._target_=mine.MyModule", "data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24",
    "geometry.detector_pitch=40", "model.n_iterations=2", "model.channels=4", "model.n_mixer_layers=1",
    "data.num_workers=0", "data.n_train=8", "data.n_val=2", "data.n_test=2", "trainer.max_steps=2",
    "trainer.val_every_n_steps=2", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu", "logger=csv",
    "test_after_training=false",
]  # fmt: skip
PIPELINE = ["strategy=pipeline", "trainer.devices=2", "data.batch_size=2", "strategy.microbatch_size=1"]
ALONE = ["strategy=single", "data.batch_size=4"]
LOGGED = ("train/loss", "train/roughness", "train/range", "train/one", "train/grad_norm", "val/loss")

Command = Callable[..., Done]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one file of code, one config and a run of two steps, by a Python that knows nothing before."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "mine.py").write_text(CODE)
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "experiment" / "mine.yaml").write_text(EXPERIMENT)
    words = [sys.executable, "-m", "qnmixer.train", *MINE, "hydra.run.dir=run"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert "mine: data=phantoms" in done.stdout
    return folder


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "HYDRA"))}


@pytest.fixture
def command(warm: Warm, here: Path) -> Command:
    """command(name, *words): in that folder, by a Python that has loaded its libraries."""
    return lambda name, *words: warm.run("-m", f"qnmixer.{name}", *words, cwd=here, env=environment() | FORK_RANKS)


def trained(command: Command, here: Path, name: str, *words: str) -> list[dict[str, float]]:
    """The rows of metrics.csv of a run in which only the module is the user's."""
    done = command("train", *TINY, *words, f"hydra.run.dir={name}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return rows_of(here / name)


def rows_of(run: Path) -> list[dict[str, float]]:
    with (run / "metrics.csv").open(newline="") as stream:
        rows = [*csv.DictReader(stream)]
    return [{name: float(row[name]) for name in LOGGED if row.get(name)} for row in rows]


def weights_of(run: Path) -> torch.Tensor:
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return torch.cat([value.flatten().double() for value in state.values()])


def test_all_parts_are_the_users(here: Path) -> None:
    checkpoint = torch.load(here / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    config = checkpoint[CHECKPOINT_KEY]["config"]
    assert config["module"] == {"_target_": "mine.MyModule", "smooth": 0.5}
    assert config["datamodule"] == {"_target_": "mine.MyData", "same": 2}
    named = {name: config[name]["_target_"] for name in ("model", "loss", "optimizer", "noise")}
    assert named == {
        "model": "mine.MyNetwork", "loss": "mine.cubic", "optimizer": "mine.MyOptimizer", "noise": "mine.MyNoise"
    }  # fmt: skip
    assert config["optimizer"]["pull"] == 0.5
    assert (here / "counted.txt").read_text().splitlines()[0] == "MyModule MyData 2"
    assert {"train/loss", "train/roughness", "train/range"} <= rows_of(here / "run")[0].keys()


def test_they_are_resumed_and_evaluated(here: Path, command: Command) -> None:
    assert command("train", "resume=run", "trainer.max_steps=3").returncode == 0
    record = json.loads((here / "run" / "results.json").read_text())
    assert (record["status"], record["steps"], record["resumed"][0]["step"]) == ("done", 3, 2)
    assert (here / "counted.txt").read_text().splitlines()[-1] == "MyModule MyData 3"
    evaluated = command("evaluate", "run=run", "trust=mine", "hydra.run.dir=evaluated")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "| Mine |" in (here / "evaluated" / "table.md").read_text()


def test_a_sweep_of_their_arguments(here: Path, command: Command) -> None:
    done = command("train", "-m", *MINE, "module.smooth=0,100", "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.stderr
    found = list(csv.DictReader((here / "sweep" / "sweep.csv").open()))
    assert [(row["module.smooth"], row["status"]) for row in found] == [("0", "done"), ("100", "done")]
    without, much = (rows_of(here / "sweep" / name)[0] for name in "01")
    assert much["train/loss"] - without["train/loss"] == pytest.approx(100 * without["train/roughness"], rel=1e-4)


def test_a_loss_on_the_iterates_is_that_of_every_memory_mode(here: Path, command: Command) -> None:
    runs = {
        (memory, weight): trained(
            command, here, f"{memory}{weight}", f"memory={memory}", f"+module.iterates={weight}", "data.batch_size=2"
        )
        for memory, weight in (("keep", 1), ("offload", 1), ("recompute", 1), ("recompute", 0))
    }
    kept, offloaded, recomputed, without = (rows[0] for rows in runs.values())
    for other in (offloaded, recomputed):
        assert other["train/loss"] == pytest.approx(kept["train/loss"], rel=1e-6)
        assert other["train/grad_norm"] == pytest.approx(kept["train/grad_norm"], rel=1e-4)
    assert recomputed["train/loss"] > 2 * without["train/loss"]
    assert abs(recomputed["train/grad_norm"] / without["train/grad_norm"] - 1) > 0.1


def test_a_pipeline_trains_and_logs_what_one_process_does(here: Path, command: Command) -> None:
    """A term on x_T and the values that the training step logs: means over the micro-batches, on every rank."""
    weights = {}
    for smooth in (0, 100):
        alone, together = (
            trained(command, here, f"{name}{smooth}", *words, f"+module.smooth={smooth}")
            for name, words in (("single", ALONE), ("pipeline", PIPELINE))
        )
        assert len(alone) == len(together) == 3
        for one, other in zip(alone, together, strict=True):
            assert other.keys() == one.keys()
            same = one.keys() - {"train/range"}  # which is no mean over images
            assert [other[name] for name in same] == pytest.approx([one[name] for name in same], rel=1e-4, abs=1e-5)
        weights[smooth] = weights_of(here / f"pipeline{smooth}")
        assert (weights[smooth] - weights_of(here / f"single{smooth}")).abs().max() < 1e-5
    assert 100 * together[0]["train/roughness"] > 0.9 * together[0]["train/loss"]  # so the term is honoured
    assert (weights[100] - weights[0]).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["+module.iterates=1"],
            "training_step asks for the iterates, but they are on other devices: choose strategy=ddp memory=recompute",
        ),
        (
            ["+module.mode=another"],
            "training_step gives the network another sinogram than that of self.measure, but its iterations are on "
            "other devices: choose strategy=ddp",
        ),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_in_one_line(command: Command, words: list[str], message: str) -> None:
    refused = command("train", *TINY, *PIPELINE, *words, "hydra.run.dir=refused")
    assert refused.returncode == 1
    assert refused.stderr == f"error: rank 1: strategy=pipeline: {message}\n"


@pytest.mark.parametrize("words", [[], ["strategy=pipeline", "trainer.devices=2"]])
def test_the_plan_runs_a_training_step_that_logs(command: Command, words: list[str]) -> None:
    planned = command("plan", *TINY, *words, "data.batch_size=2", "format=json", "device=24")
    assert (planned.returncode, planned.stderr) == (0, "")
    assert json.loads(planned.stdout)["peak_mib"] > 0
