"""Promise 8: No file of another's executes code, writes outside, or reaches the network.

What is the user's own in an empty folder: one file of code, and a config file for each part of a run. By the real
commands; what others' files name is imported with a word of trust only. The function of the key `fit` trains, in one
process and in each rank.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from qnmixer.errors import ConfigError
from qnmixer.module.build import build_module
from qnmixer.parallel.pipeline import loss_of_part
from qnmixer.reconstruction.weights import CHECKPOINT_KEY
from qnmixer.settings.run import parse_file

from ..conftest import PHANTOMS, config_of, csv_rows, last_checkpoint, metrics
from ..conftest import TINY as COMMON
from .commands import Command

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("own")]

SHORT = "trainer.max_steps=2"
TINY = [word for word in COMMON if not word.startswith(("model.n_mixer", "trainer.max"))] + [SHORT]
FILES = {
    "loss/huber": "_target_: own.huber\ndelta: 0.1",
    "optimizer/lion": "_target_: own.Lion\nlr: 1.0e-3\nbeta: 0.95",
    "schedule/triangle": "_target_: own.triangle\npeak: 0.3",
    "noise/speckle": "_target_: own.Speckle\nstrength: 0.1",
    "model/mine": "_target_: own.MyNetwork\nn_iterations: 2\nchannels: 4\nwidth: 12",
    "data/mine": "_target_: own.MySlices\ndefaults: [_common]\nyear: 2016",
    "experiment/mine": """# @package _global_
defaults: [_self_, {override /loss: huber}, {override /optimizer: lion}, {override /schedule: triangle},
  {override /noise: speckle}, {override /model: mine}, {override /data: mine}]
module: {_target_: own.MyModule, smooth: 0.5}
datamodule: {_target_: own.MyData, same: 2}
callbacks: {mine: {_target_: own.Counting, path: counted}}
fit: own.fit""",
}
MINE = ["--config-dir=my_conf", "experiment=mine", *TINY]
# The same without a config file, by words alone.
WORDS = [
    "loss=custom", "loss._target_=own.huber", "+loss.delta=0.1",
    "optimizer=custom", "optimizer._target_=own.Lion", "+optimizer.beta=0.95",
    "schedule=custom", "schedule._target_=own.triangle", "+schedule.peak=0.3",
    "noise=custom", "noise._target_=own.Speckle", "+noise.strength=0.1",
    "model=custom", "model._target_=own.MyNetwork", "+model.width=12",
    "data=custom", "data._target_=own.MySlices", "+data.year=2016",
]  # fmt: skip
# The module alone, in a run that is otherwise ours.
MODULE = ["module._target_=own.MyModule", "fit=my_lab.fit.fit", "model.n_mixer_layers=1", *TINY, *PHANTOMS]
PIPELINE = ["strategy=pipeline", "trainer.devices=2", "data.batch_size=2", "strategy.microbatch_size=1"]
ALONE = ["strategy=single", "data.batch_size=4"]
LOGGED = ("train/loss", "train/roughness", "train/range", "train/one", "train/grad_norm", "val/loss")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, command: Command) -> Path:
    """A folder with code and configs, and a run of two steps; test_terminal.py begins one by a new Python."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_lab").mkdir()
    for name in ("own.py", "my_lab/fit.py"):
        shutil.copy(Path(__file__).parents[1] / "own.py", folder / name)
    for name, text in FILES.items():
        path = folder / "my_conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    outcome = command(folder, "train", *MINE, "hydra.run.dir=run")
    assert outcome.code == 0, outcome.stderr
    assert "mine: data=" in outcome.stdout
    return folder


@pytest.fixture(scope="module")
def sweep(here: Path, command: Command) -> Path:
    """A sweep over an argument of the user's module."""
    assert command(here, "train", "-m", *MINE, "module.smooth=0,100", "hydra.sweep.dir=sweep").code == 0
    return here / "sweep"


def weights_of(run: Path) -> torch.Tensor:
    return torch.cat([value.flatten().double() for value in last_checkpoint(run)["state_dict"].values()])


def rows_of(run: Path) -> list[dict[str, float]]:
    rows = csv_rows(run / "metrics.csv")
    return [{name: float(row[name]) for name in LOGGED if row.get(name)} for row in rows]


@pytest.fixture(scope="module")
def plain_rows(here: Path, command: Command) -> list[dict[str, float]]:
    """Of a run on one device without a term of the user's, in its folder `plain`."""
    return trained(command, here, "plain", *ALONE)


def trained(command: Command, here: Path, name: str, *words: str) -> list[dict[str, float]]:
    """The rows of metrics.csv of a run in which only the module is the user's."""
    outcome = command(here, "train", *MODULE, *words, f"hydra.run.dir={name}")
    assert (outcome.code, outcome.stderr) == (0, "")
    return rows_of(here / name)


def test_every_part_of_the_run_is_the_users(here: Path) -> None:
    saved = last_checkpoint(here / "run")
    config = saved[CHECKPOINT_KEY]["config"]
    assert config["loss"] == {"_target_": "own.huber", "delta": 0.1}
    assert (config["data"]["year"], config["data"]["hu_max"]) == (2016, 2000.0)
    assert config["module"] == {"_target_": "own.MyModule", "smooth": 0.5}
    assert parse_file(config).plain() == config
    assert saved["state_dict"]["network.denoiser.1.weight"].shape[0] == 12
    (optimizer,) = saved["optimizer_states"]
    assert [(group["beta"], group["weight_decay"]) for group in optimizer["param_groups"]] == [(0.95, 0.0)] * 2
    assert "mean" in optimizer["state"][0]
    assert metrics(here / "run")["train/lr"] == pytest.approx([0.0, 1e-3 * 0.5 / 0.7])
    assert (here / "counted.0").read_text() == "2"
    assert (here / "run" / "fitted.0").read_text() == "own.fit"
    assert {"train/loss", "train/roughness", "train/range"} <= rows_of(here / "run")[0].keys()


def test_it_is_resumed_without_a_word(here: Path, command: Command) -> None:
    """The run is this user's, by its signature. It goes on by its own function."""
    (here / "run" / "fitted.0").unlink()
    assert command(here, "train", "resume=run", "trainer.max_steps=3").code == 0
    record = json.loads((here / "run" / "results.json").read_text())
    assert (record["status"], record["steps"], record["resumed"][0]["step"]) == ("done", 3, 2)
    assert (here / "counted.0").read_text() == "3"
    assert (here / "run" / "fitted.0").is_file()


@pytest.mark.parametrize(("name", "words"), [
    ("evaluate", ["run=run", "evaluation.n_pictures=1", "hydra.run.dir=evaluated"]),
    pytest.param("export", ["run=run", "output=a.safetensors"], marks=pytest.mark.extras),
])  # fmt: skip
def test_a_file_of_it_is_used_where_its_code_is_trusted(
    here: Path, command: Command, name: str, words: list[str], tmp_path: Path
) -> None:
    stranger = {"XDG_CONFIG_HOME": str(tmp_path)}  # the user's key is another
    assert command(here, name, *words, **stranger).error.endswith("if you trust that code, add trust=own")
    assert command(here, name, *words).code == 0  # this user has trained it
    if name == "evaluate":
        assert "| Mine |" in (here / "evaluated" / "table.md").read_text()
    else:
        card = (here / "a.md").read_text()
        assert "| loss | own.huber: delta 0.1 |" in card
        assert "qnmixer.reconstruct run=a.safetensors trust=own" in card


def test_a_sweep_of_its_arguments(sweep: Path) -> None:
    statuses = [(row["module.smooth"], row["status"]) for row in csv_rows(sweep / "sweep.csv")]
    assert statuses == [("0", "done"), ("100", "done")]
    plain_row, smooth_row = (rows_of(sweep / name)[0] for name in "01")
    assert smooth_row["train/loss"] - plain_row["train/loss"] == pytest.approx(
        100 * plain_row["train/roughness"], rel=1e-4
    )


@pytest.mark.extras
def test_a_sweep_is_compared_where_its_code_is_trusted(sweep: Path, command: Command, tmp_path: Path) -> None:
    stranger = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert "add trust=own" in command(sweep.parent, "compare", "sweep=sweep", **stranger).error
    words = ["sweep=sweep", "evaluation.n_pictures=2"]
    assert command(sweep.parent, "compare", *words).code == 0
    table = (sweep / "comparison" / "comparison.md").read_text()
    assert all(f"| smooth={smooth} | 1 |" in table for smooth in (0, 100))


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp", "pipeline"))]
)
def test_words_alone_name_it_too_over_two_processes(here: Path, command: Command, strategy: str) -> None:
    callback = ["+callbacks.mine._target_=own.Counting", f"+callbacks.mine.path={strategy}.txt", "fit=my_lab.fit.fit"]
    # Its iterations share weights that it does not name: ddp needs all uses of them in one graph.
    options = [f"strategy={strategy}", "memory=recompute", "trainer.devices=2", f"hydra.run.dir={strategy}"]
    assert command(here, "train", *TINY, *WORDS, *options, *callback).code == 0
    assert [(here / f"{strategy}.txt.{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    fitted = [here / strategy / f"fitted.{rank}" for rank in (0, 1)]
    assert [path.read_text() for path in fitted] == ["my_lab.fit.fit"] * 2
    parallel_checkpoint, single_checkpoint = last_checkpoint(here / strategy), last_checkpoint(here / "run")
    assert parallel_checkpoint["state_dict"].keys() == single_checkpoint["state_dict"].keys()
    for part in ("loss", "model", "noise"):
        assert parallel_checkpoint[CHECKPOINT_KEY]["config"][part] == single_checkpoint[CHECKPOINT_KEY]["config"][part]
    for path in fitted:  # a run goes on by its own function
        path.unlink()
    assert command(here, "train", f"resume={strategy}", "trainer.max_steps=3").code == 0
    assert all(path.is_file() for path in fitted)


@pytest.mark.parametrize(("words", "message"), [
    (["loss._target_=nowhere.huber"], "loss._target_=nowhere.huber, but there is no module nowhere"),
    (["loss._target_=huber"], "loss._target_=huber is not module.name"),
    (["+loss.delat=3"], "unknown key loss.delat: did you mean loss.delta?"),
    (["fit=own.Lion"], "fit=own.Lion is not a function (config, run)"),
    (["fit=my_lab.fit.np"], "fit=my_lab.fit.np is not a function (config, run)"),
    (["fit=my_lab.fit.fti"], "fit=my_lab.fit.fti: there is no fti in "),
    (["fit=nowhere.fit"], "fit=nowhere.fit, but there is no module nowhere: put nowhere.py into the folder"),
    (["fit=fit"], "fit=fit is not module.name"),
    (["schedule._target_=own.Lion"], "schedule._target_=own.Lion is not a function (step, n_steps)"),
    (["+loss.delta=1"], "Could not append to config. An item is already at 'loss.delta'"),
    (["--config-dir=my_cnf"], "no config folder at my_cnf"),
])  # fmt: skip
def test_a_slip_in_its_words_is_one_line(here: Path, command: Command, words: list[str], message: str) -> None:
    assert command(here, "train", *TINY, *WORDS, *words).error.startswith(message)


def test_a_loss_on_the_iterates_is_that_of_every_memory_mode(
    here: Path, command: Command, plain_rows: list[dict[str, float]]
) -> None:
    keep_row, offload_row, recompute_row = (
        trained(command, here, memory, *ALONE, f"memory={memory}", "+module.iterates=1")[0]
        for memory in ("keep", "offload", "recompute")
    )
    plain_row = plain_rows[0]
    for row in (offload_row, recompute_row):
        assert row["train/loss"] == pytest.approx(keep_row["train/loss"], rel=1e-6)
        assert row["train/grad_norm"] == pytest.approx(keep_row["train/grad_norm"], rel=1e-4)
    assert recompute_row["train/loss"] > 2 * plain_row["train/loss"]
    assert abs(recompute_row["train/grad_norm"] / plain_row["train/grad_norm"] - 1) > 0.1


def test_a_pipeline_trains_and_logs_what_one_process_does(
    here: Path, command: Command, plain_rows: list[dict[str, float]]
) -> None:
    """A term on x_T and the values that the training step logs: means over the micro-batches, on every rank."""
    smooth = "+module.smooth=100"
    single_rows = trained(command, here, "single", *ALONE, smooth)
    pipeline_rows = trained(command, here, "pipeline_smooth", *PIPELINE, smooth)
    assert len(single_rows) == len(pipeline_rows) == len(plain_rows) == 3
    for single_row, pipeline_row in zip(single_rows, pipeline_rows, strict=True):
        assert pipeline_row.keys() == single_row.keys()
        names = single_row.keys() - {"train/range"}  # which is no mean over images
        assert [pipeline_row[name] for name in names] == pytest.approx(
            [single_row[name] for name in names], rel=1e-4, abs=1e-5
        )
    weights, expected, plain = (weights_of(here / name) for name in ("pipeline_smooth", "single", "plain"))
    assert (weights - expected).abs().max() < 1e-5
    assert 100 * pipeline_rows[0]["train/roughness"] > 0.9 * pipeline_rows[0]["train/loss"]  # so the term is honoured
    assert (weights - plain).abs().max() > 1e-4


PIPELINE_REFUSES = "training_step asks for the iterates, but they are on other devices: choose "


def test_what_a_pipeline_cannot_do_is_refused_in_one_line(here: Path, command: Command) -> None:
    outcome = command(here, "train", *MODULE, *PIPELINE, "+module.iterates=1", "hydra.run.dir=refused")
    assert outcome.error.startswith(f"rank 1: strategy=pipeline: {PIPELINE_REFUSES}")


@pytest.mark.parametrize(("word", "message"), [
    ("+module.iterates=1", PIPELINE_REFUSES),
    ("+module.mode=another", "training_step gives the network another sinogram than that of self.measure"),
])  # fmt: skip
def test_a_stage_refuses_what_needs_more_than_the_last_image(
    here: Path, monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.syspath_prepend(here)
    module = build_module(config_of(*MODULE, word))
    batch = {"image": torch.rand(2, 1, 16, 16), "sinogram": torch.rand(2, 1, 8, 24), "weight": torch.ones(2)}
    with pytest.raises(ConfigError, match=f"^strategy=pipeline: {message}"):
        loss_of_part(module, batch, 0, batch["image"], 0, {})


@pytest.mark.parametrize("words", [[*TINY, *WORDS], [*MODULE, *PIPELINE]], ids=["network", "module over stages"])
def test_it_is_planned(here: Path, command: Command, words: list[str]) -> None:
    outcome = command(here, "plan", *words, "format=json", "device=24")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert json.loads(outcome.stdout)["peak_mib"] > 0


def test_evaluation_needs_no_word_of_trust_for_what_trains(
    here: Path, command: Command, plain_rows: list[dict[str, float]], tmp_path: Path
) -> None:
    words = ["run=plain", "accelerator=cpu", f"hydra.run.dir={tmp_path}/scores"]
    assert command(here, "evaluate", *words, XDG_CONFIG_HOME=str(tmp_path)).code == 0
