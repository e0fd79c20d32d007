"""Loss, optimizer, schedule, noise, network and slices of one file in an empty folder, by the real commands."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qnmixer.checkpoints.weights_file import CHECKPOINT_KEY
from qnmixer.config import parse_file, to_plain

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
    shutil.copy(Path(__file__).with_name("own.py"), folder)
    done = command(folder, "train", *SMALL, *OWN, "trainer.max_steps=2", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    return folder


def command(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "HYDRA"))}
    words = (sys.executable, "-m", f"qnmixer.{name}", *words)
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.slow
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


@pytest.mark.slow
def test_it_is_resumed_and_exported_where_its_code_is_trusted(here: Path) -> None:
    longer = ["resume=run", "trainer.max_steps=3"]
    refused = command(here, "train", *longer)
    assert refused.returncode == 1
    assert refused.stderr.endswith("which is not part of qnmixer: if you trust that code, add trust=own\n")
    resumed = command(here, "train", *longer, "trust=own")
    assert resumed.returncode == 0, resumed.stderr
    record = json.loads((here / "run" / "results.json").read_text())
    assert (record["status"], record["steps"], record["resumed"][0]["step"]) == ("done", 3, 2)
    assert not any(word.startswith("trust") for word in record["overrides"])

    assert "add trust=own" in command(here, "export", "run=run", "output=a.safetensors").stderr
    exported = command(here, "export", "run=run", "output=a.safetensors", "trust=own")
    assert exported.returncode == 0, exported.stderr
    card = (here / "a.md").read_text()
    assert "| loss | own.huber: delta 0.1 |" in card
    assert "qnmixer.reconstruct run=a.safetensors trust=own" in card


@pytest.mark.slow
def test_a_sweep_of_it(here: Path) -> None:
    own = ["+schedule.peak=0.3,0.6" if word == "+schedule.peak=0.3" else word for word in OWN]
    sweep = ["-m", *SMALL, *own, "trainer.max_steps=2", "hydra.sweep.dir=sweep"]
    done = command(here, "train", *sweep)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((here / "sweep" / "sweep.csv").open()))
    assert [(row["schedule.peak"], row["status"]) for row in rows] == [("0.3", "done"), ("0.6", "done")]

    assert "add trust=own" in command(here, "compare", "sweep=sweep").stderr
    compared = command(here, "compare", "sweep=sweep", "trust=own", "tests=[as_trained]", "evaluation.tv_iterations=2")
    assert compared.returncode == 0, compared.stderr
    table = (here / "sweep" / "comparison" / "comparison.md").read_text()
    assert all(f"| peak={peak} | 1 |" in table for peak in (0.3, 0.6))


@pytest.mark.slow
def test_it_is_planned(here: Path) -> None:
    planned = command(here, "plan", *SMALL, *OWN, "format=json", "device=24")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["peak_mib"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long), "pipeline"])
def test_over_two_processes(here: Path, strategy: str) -> None:
    callback = ["+callbacks.mine._target_=own.Counting", f"+callbacks.mine.path={strategy}.txt"]
    over = [f"strategy={strategy}", "trainer.devices=2", "trainer.max_steps=2", f"hydra.run.dir={strategy}"]
    done = command(here, "train", *SMALL, *OWN, *over, *callback)
    assert done.returncode == 0, done.stderr
    assert [(here / f"{strategy}.txt.{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    checkpoint = torch.load(here / strategy / "checkpoints" / "last.ckpt", weights_only=True)
    alone = torch.load(here / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"].keys() == alone["state_dict"].keys()


@pytest.mark.slow
def test_configs_in_a_folder_of_ones_own(here: Path) -> None:
    """Found by a run, by the same run resumed, by the jobs of a sweep and by an evaluation."""
    for group, name, text in (
        ("loss", "mine", "defaults: [custom]\n_target_: own.huber\ndelta: 0.1\n"),
        ("data", "few", "defaults: [phantoms]\nn_train: 4\nn_val: 2\nn_test: 2\n"),
    ):
        (here / "my_conf" / group).mkdir(parents=True)
        (here / "my_conf" / group / f"{name}.yaml").write_text(text)
    small = [word for word in SMALL if word != "data.image_size=16"]
    mine = [*small, "data=few", "data.image_size=16", "--config-dir", "my_conf"]
    sweep = ["-m", "loss=mine,mse", "trainer.max_steps=2", "hydra.sweep.dir=own_configs"]
    done = command(here, "train", *mine, *sweep)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((here / "own_configs" / "sweep.csv").open()))
    assert [(row["loss"], row["status"]) for row in rows] == [("mine", "done"), ("mse", "done")]

    longer = ["resume=own_configs/0", "trainer.max_steps=3"]
    assert "a config of own_configs/0 names loss._target_=own.huber" in command(here, "train", *longer).stderr
    resumed = command(here, "train", *longer, "trust=own")
    assert resumed.returncode == 0, resumed.stderr
    record = json.loads((here / "own_configs" / "0" / "results.json").read_text())
    assert (record["status"], record["steps"]) == ("done", 3)
    assert f"hydra.searchpath=[file://{here}/my_conf]" in record["overrides"]

    words = ["run=own_configs/1", "data=few", "--config-dir=my_conf", "hydra.run.dir=evaluated"]
    evaluated = command(here, "evaluate", *words)
    assert evaluated.returncode == 0, evaluated.stderr
    assert len((here / "evaluated" / "images.csv").read_text().splitlines()) == 1 + 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss._target_=nowhere.huber"], "loss._target_=nowhere.huber: there is no module nowhere"),
        (["loss._target_=huber"], "loss._target_=huber is not module.name"),
        (["+loss.delat=3"], "loss.delat: own.huber does not take it, only delta"),
        (["schedule._target_=own.Lion"], "schedule._target_=own.Lion is not a function (step, n_steps)"),
        (["model.target=own.MyNetwork"], "unknown key model.target: did you mean model._target_?"),
        (["loss.beta=1"], "unknown key loss.beta: did you mean loss._target_? An argument of your own takes a plus: +"),
        (["+loss.delta=1"], "loss.delta is there already: leave out the + before it"),
    ],
)
def test_errors_are_one_line(here: Path, words: list[str], message: str) -> None:
    refused = command(here, "train", *SMALL, *OWN, *words)
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: {message}")


@pytest.fixture(scope="module")
def with_configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one file of code, one config file for each group, and a run of two steps of them."""
    folder = tmp_path_factory.mktemp("configs")
    shutil.copy(Path(__file__).with_name("own.py"), folder)
    for name, text in FILES.items():
        path = folder / "my_conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    words = ["--config-dir", "my_conf", *CHOSEN, *SMALL, "trainer.max_steps=2", "hydra.run.dir=run"]
    done = command(folder, "train", *words)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_config_files_of_ones_own_are_options_like_others(with_configs: Path) -> None:
    checkpoint = torch.load(with_configs / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    config = checkpoint[CHECKPOINT_KEY]["config"]
    assert config["loss"] == {"_target_": "own.huber", "delta": 0.1}
    assert (config["data"]["year"], config["data"]["hu_max"]) == (2016, 2000.0)
    assert {group["beta"] for group in checkpoint["optimizer_states"][0]["param_groups"]} == {0.95}
    misspelt = command(with_configs, "train", "--config-dir=my_conf", *CHOSEN, "loss.delat=3")
    assert misspelt.returncode == 1
    assert misspelt.stderr.startswith("error: unknown key loss.delat: ")
    nowhere = command(with_configs, "train", "--config-dir", "my_cnf")
    assert nowhere.stderr.startswith("error: there is no folder of configs at my_cnf")


@pytest.mark.slow
def test_a_run_of_ones_own_configs_is_resumed_with_them(with_configs: Path) -> None:
    longer = ["resume=run", "trainer.max_steps=3"]
    forgotten = command(with_configs, "train", *longer)
    assert forgotten.returncode == 1
    assert forgotten.stderr.startswith("error: a config of run names ")
    assert "add trust=own" in forgotten.stderr
    resumed = command(with_configs, "train", *longer, "--config-dir", "my_conf")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((with_configs / "run" / "results.json").read_text())["steps"] == 3
    assert "add trust=own" in command(with_configs, "evaluate", "run=run").stderr


@pytest.mark.slow
def test_a_sweep_with_ones_own_configs(with_configs: Path) -> None:
    words = ["-m", "--config-dir", "my_conf", *SMALL, "loss=huber,mse", "trainer.max_steps=1", "hydra.sweep.dir=sweep"]
    done = command(with_configs, "train", *words)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((with_configs / "sweep" / "sweep.csv").open()))
    assert [(row["loss"], row["status"]) for row in rows] == [("huber", "done"), ("mse", "done")]
