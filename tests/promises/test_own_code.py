"""Promise 8: No file of another's executes code, writes outside, or reaches the network.

Loss, optimizer, schedule, noise, network and slices of one file in an empty folder, by the real commands.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qnmixer.engine.config import to_plain
from qnmixer.engine.config.run import parse_file
from qnmixer.weights import CHECKPOINT_KEY

from ..warm import FORK_RANKS, Done, Warm

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("own")]

OWN = [
    "loss=custom", "loss._target_=own.huber", "+loss.delta=0.1",
    "optimizer=custom", "optimizer._target_=own.Lion", "+optimizer.beta=0.95",
    "schedule=custom", "schedule._target_=own.triangle", "+schedule.peak=0.3",
    "noise=custom", "noise._target_=own.Speckle", "+noise.strength=0.1",
    "model=custom", "model._target_=own.MyNetwork", "+model.width=12",
    "data=custom", "data._target_=own.MySlices", "+data.year=2016",
]  # fmt: skip
FILES = {
    "loss/huber": "_target_: own.huber\ndelta: 0.1",
    "optimizer/lion": "_target_: own.Lion\nlr: 1.0e-3\nweight_decay: 0.0\nstep_size_lr_factor: 10.0\nbeta: 0.95",
    "schedule/triangle": "_target_: own.triangle\nwarmup: 0.0\npeak: 0.3",
    "noise/speckle": "_target_: own.Speckle\nstrength: 0.1",
    "model/mine": "_target_: own.MyNetwork\nn_iterations: 2\nchannels: 4\nwidth: 12",
    "data/mine": "_target_: own.MySlices\ndefaults: [_common]\nyear: 2016",
}
CHOSEN = [name.replace("/", "=") for name in FILES]
SMALL = [
    "data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40",
    "model.n_iterations=2", "model.channels=4", "data.num_workers=0", "data.batch_size=2",
    "trainer.val_every_n_steps=2", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu", "logger=csv",
    "test_after_training=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one file and a run of two steps."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copy(Path(__file__).parents[1] / "own.py", folder)
    done = real(folder, "train", *SMALL, *OWN, "trainer.max_steps=2", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    return folder


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "HYDRA"))}


def real(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", f"qnmixer.{name}", *words)
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment(), timeout=300)


@pytest.fixture
def command(warm: Warm, here: Path) -> Callable[..., Done]:
    """command(name, *words): in that folder, by a Python that has loaded its libraries."""
    return lambda name, *words: warm.run("-m", f"qnmixer.{name}", *words, cwd=here, env=environment() | FORK_RANKS)


@pytest.fixture
def command_there(warm: Warm, with_configs: Path) -> Callable[..., Done]:
    """command_there(name, *words): as `command`, in the folder that has config files too."""
    return lambda name, *words: warm.run("-m", f"qnmixer.{name}", *words, cwd=with_configs, env=environment())


def test_all_of_it_is_used(here: Path) -> None:
    checkpoint = torch.load(here / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    config = checkpoint[CHECKPOINT_KEY]["config"]
    assert config["loss"] == {"_target_": "own.huber", "delta": 0.1}
    assert config["model"]["width"] == 12
    assert to_plain(parse_file(config)) == config
    assert all(name.startswith("network.") for name in checkpoint["state_dict"])
    assert checkpoint["state_dict"]["network.denoiser.1.weight"].shape[0] == 12
    (optimizer,) = checkpoint["optimizer_states"]
    assert {group["beta"] for group in optimizer["param_groups"]} == {0.95}
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.0, 0.0]
    assert "mean" in optimizer["state"][0]
    rows = list(csv.DictReader((here / "run" / "metrics.csv").open()))
    rates = [float(row["train/lr"]) for row in rows if row["train/lr"]]
    assert rates == pytest.approx([0.0, 1e-3 * 0.5 / 0.7])


def test_it_is_resumed_and_exported_where_its_code_is_trusted(here: Path, command: Callable[..., Done]) -> None:
    """A run of this user is resumed without a word."""
    resumed = command("train", "resume=run", "trainer.max_steps=3")
    assert resumed.returncode == 0, resumed.stderr
    record = json.loads((here / "run" / "results.json").read_text())
    assert (record["status"], record["steps"], record["resumed"][0]["step"]) == ("done", 3, 2)

    assert "add trust=own" in command("export", "run=run", "output=a.safetensors").stderr
    exported = command("export", "run=run", "output=a.safetensors", "trust=own")
    assert exported.returncode == 0, exported.stderr
    card = (here / "a.md").read_text()
    assert "| loss | own.huber: delta 0.1 |" in card
    assert "qnmixer.reconstruct run=a.safetensors trust=own" in card


@pytest.mark.long
def test_a_sweep_of_it(here: Path, command: Callable[..., Done]) -> None:
    own = ["+schedule.peak=0.3,0.6" if word == "+schedule.peak=0.3" else word for word in OWN]
    sweep = ["-m", *SMALL, *own, "trainer.max_steps=2", "hydra.sweep.dir=sweep"]
    done = real(here, "train", *sweep)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((here / "sweep" / "sweep.csv").open()))
    assert [(row["schedule.peak"], row["status"]) for row in rows] == [("0.3", "done"), ("0.6", "done")]

    assert "add trust=own" in command("compare", "sweep=sweep").stderr
    compared = command("compare", "sweep=sweep", "trust=own", "tests=[as_trained]", "evaluation.n_pictures=2")
    assert compared.returncode == 0, compared.stderr
    table = (here / "sweep" / "comparison" / "comparison.md").read_text()
    assert all(f"| peak={peak} | 1 |" in table for peak in (0.3, 0.6))


def test_it_is_planned(command: Callable[..., Done]) -> None:
    planned = command("plan", *SMALL, *OWN, "format=json", "device=24")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["peak_mib"] > 0


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp", "pipeline"))]
)
def test_over_two_processes(here: Path, command: Callable[..., Done], strategy: str) -> None:
    callback = ["+callbacks.mine._target_=own.Counting", f"+callbacks.mine.path={strategy}.txt"]
    # Its iterations share weights that it does not name: ddp needs all uses of them in one graph.
    every = ["memory=recompute", "trainer.devices=2", "trainer.max_steps=2"]
    over = [f"strategy={strategy}", *every, f"hydra.run.dir={strategy}"]
    done = command("train", *SMALL, *OWN, *over, *callback)
    assert done.returncode == 0, done.stderr
    assert [(here / f"{strategy}.txt.{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    checkpoint = torch.load(here / strategy / "checkpoints" / "last.ckpt", weights_only=True)
    alone = torch.load(here / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"].keys() == alone["state_dict"].keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss._target_=nowhere.huber"], "loss._target_=nowhere.huber, but there is no module nowhere"),
        (["loss._target_=huber"], "loss._target_=huber is not module.name"),
        (["+loss.delat=3"], "unknown key loss.delat: did you mean loss.delta?"),
        (["schedule._target_=own.Lion"], "schedule._target_=own.Lion is not a function (step, n_steps)"),
        (["model.target=own.MyNetwork"], "unknown key model.target: did you mean model._target_?"),
        (
            ["loss.beta=1"],
            "unknown key loss.beta: choose loss._target_, loss.ssim_weight. An argument of your own takes",
        ),
        (["+loss.delta=1"], "loss.delta exists already: leave out the + before it"),
    ],
)
def test_errors_are_one_line(command: Callable[..., Done], words: list[str], message: str) -> None:
    refused = command("train", *SMALL, *OWN, *words)
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: {message}")


@pytest.fixture(scope="module")
def with_configs(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    """A folder with one file of code, one config file for each group, and a run of two steps of them."""
    folder = tmp_path_factory.mktemp("configs")
    shutil.copy(Path(__file__).parents[1] / "own.py", folder)
    for name, text in FILES.items():
        path = folder / "my_conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    words = ["--config-dir", "my_conf", *CHOSEN, *SMALL, "trainer.max_steps=2", "hydra.run.dir=run"]
    done = warm.run("-m", "qnmixer.train", *words, cwd=folder, env=environment())
    assert done.returncode == 0, done.stderr
    return folder


def test_config_files_of_ones_own_are_options_like_others(
    with_configs: Path, command_there: Callable[..., Done]
) -> None:
    checkpoint = torch.load(with_configs / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    config = checkpoint[CHECKPOINT_KEY]["config"]
    assert config["loss"] == {"_target_": "own.huber", "delta": 0.1}
    assert (config["data"]["year"], config["data"]["hu_max"]) == (2016, 2000.0)
    assert {group["beta"] for group in checkpoint["optimizer_states"][0]["param_groups"]} == {0.95}
    misspelt = command_there("train", "--config-dir=my_conf", *CHOSEN, "loss.delat=3")
    assert misspelt.returncode == 1
    assert misspelt.stderr.startswith("error: unknown key loss.delat: ")
    nowhere = command_there("train", "--config-dir", "my_cnf")
    assert nowhere.stderr.startswith("error: no config folder at my_cnf")


def test_a_run_of_ones_own_configs_is_resumed_with_them(with_configs: Path, command_there: Callable[..., Done]) -> None:
    resumed = command_there("train", "resume=run", "trainer.max_steps=3")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((with_configs / "run" / "results.json").read_text())["steps"] == 3
    assert "add trust=own" in command_there("evaluate", "run=run").stderr
    words = ["run=run", "trust=own", "data=mine", "--config-dir=my_conf", "hydra.run.dir=evaluated"]
    evaluated = command_there("evaluate", *words)
    assert evaluated.returncode == 0, evaluated.stderr


@pytest.mark.long
def test_a_sweep_with_ones_own_configs(with_configs: Path, command_there: Callable[..., Done]) -> None:
    words = ["-m", "--config-dir", "my_conf", *SMALL, "loss=huber,mse", "trainer.max_steps=1", "hydra.sweep.dir=sweep"]
    done = command_there("train", *words)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((with_configs / "sweep" / "sweep.csv").open()))
    assert [(row["loss"], row["status"]) for row in rows] == [("huber", "done"), ("mse", "done")]
