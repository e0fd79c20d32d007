"""Promise 5: Sweeps: a process tree a job, resumable, one bad job does not stop the rest. W&B offline, same names for
every method, nothing private.

Runs of different methods beside each other in W&B: without a server, read back from this disk; and with a stand-in for
one, which may go, or whose agent starts the jobs.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from qnmixer.runs.records import read_metrics, read_results
from qnmixer.settings.options import CONF

from ..conftest import PHANTOMS, environment, offline_runs
from ..warm import Warm
from .commands import STEPS, TINY, Command
from .conftest import SMALLEST, LeftAlone

# In one group: else each worker would train the three methods.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wandb"), pytest.mark.usefixtures("left_alone")]

MANUAL = CONF.parent / "docs" / "wandb.md"
SWEEP = yaml.safe_load((CONF / "wandb_sweep.yaml").read_text())
SETTING = [
    "experiment=demo",
    *(word for word in TINY if not word.startswith(("model.", "logger", "geometry.n_views", "callbacks"))),
    *PHANTOMS, "tags=[tried]",
]  # fmt: skip
METHODS = {
    "QN-Mixer": ["model=qn_mixer", "model.n_iterations=2", "model.channels=8"],
    "FBPConvNet": ["model=fbpconvnet", "model.channels=4", "model.depth=2"],
    "TV": ["model=tv", "model.n_iterations=5"],
}


@pytest.fixture(scope="module")
def runs(command: Command, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of each method, in the setting of one experiment, without key, home and network."""
    place, method_runs = tmp_path_factory.mktemp("methods"), {}
    (place / "home").mkdir()
    variables = {"HOME": str(place / "home"), **dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")}
    for method, model in METHODS.items():
        outcome = command(place, "train", *SETTING, *model, f"hydra.run.dir=runs/day/{method}", **variables)
        assert (outcome.code, outcome.stderr) == (0, "")
        (method_runs[method],) = offline_runs(place / "runs" / "day" / method)
    assert not list(place.glob("wandb"))
    return method_runs


def folder(run: Any) -> Path:
    return run.folder.parents[1]


def columns(run: Any) -> set[str]:
    """Of the table of runs."""
    return {name.partition(".")[0] for name in run.summary if not name.startswith("_")}


def test_every_step_of_a_run_is_kept_without_a_server(runs: dict[str, Any]) -> None:
    run = runs["QN-Mixer"]
    assert [method_run.exit_code for method_run in runs.values()] == [0] * 3
    assert [(row["_step"], row["samples"]) for row in run.history] == [(k, 2 * k) for k in range(1, STEPS + 1)]
    names = {"train/loss", "train/grad_norm", "train/lr", "train/lambda_0", "memory/allocated_mib"}
    assert all(names <= row.keys() for row in run.history)
    assert len(list((run.folder / "files" / "media").glob("images/val/*.png"))) == 2


def test_two_networks_have_the_same_columns_and_what_is_not_trained_those_of_its_test(runs: dict[str, Any]) -> None:
    first_run, second_run = runs["QN-Mixer"], runs["FBPConvNet"]
    assert columns(first_run) == columns(second_run)
    assert {"train/loss", "val/psnr", "val/psnr_best", "test/psnr", "test/ssim", "test/fbp/psnr"} <= columns(first_run)
    assert first_run.config.keys() == second_run.config.keys()
    assert "train/lambda_0" in first_run.metrics  # a curve of its own, and no column
    assert columns(runs["TV"]) == {name for name in columns(first_run) if not name.startswith(("train/", "memory/"))}


NOT_ASKED_FOR = "test/tv/psnr", "val/residual"


def test_the_names_of_the_manual_are_logged(runs: dict[str, Any]) -> None:
    names = set(re.findall(r"[`\":]((?:train|val|test)/\w+(?:/\w+)?)[`\"]", MANUAL.read_text()))
    assert len(names) > 10
    curves = {name.partition(".")[0] for name in runs["QN-Mixer"].metrics}
    assert names - curves == {*NOT_ASKED_FOR, "val/NAME", "test/NAME"}  # NAME: of any metric


def test_config_tags_and_name_distinguish_runs(runs: dict[str, Any]) -> None:
    assert {method: run.config["method"] for method, run in runs.items()} == {method: method for method in METHODS}
    assert [run.tags for run in runs.values()] == [
        ["tried", "demo", model, "phantoms", "single"] for model in ("qn_mixer", "fbpconvnet", "tv")
    ]
    assert runs["TV"].name == "tv-phantoms-16views-seed42-TV"
    assert len({run.name for run in runs.values()}) == len(runs)


def test_the_columns_are_the_record_of_the_run(runs: dict[str, Any]) -> None:
    """The best value, the means of the test, and one scale of SSIM."""
    for method, run in runs.items():
        record = json.loads((folder(run) / "results.json").read_text())
        assert run.summary["val/psnr_best"] == pytest.approx(record["best"]["val/psnr"])
        assert run.summary["val/psnr_best"] == pytest.approx(max(row.get("val/psnr", 0) for row in run.history))
        for metric in ("psnr", "ssim", "window_psnr", "window_ssim"):
            assert run.summary[f"test/{metric}"] == record["test"][method][metric]
            assert run.summary[f"test/fbp/{metric}"] == record["test"]["FBP"][metric]
        assert run.summary["test/ssim"] / run.summary["val/ssim"] == pytest.approx(1, abs=0.3)
        assert 1 < run.summary["val/ssim"] <= 100


def test_page_picture_and_a_table_of_numbers_are_files_of_the_run(runs: dict[str, Any]) -> None:
    for method, run in runs.items():
        for file in (Path("evaluation", name) for name in ("page.html", "picture.png")):
            assert (run.folder / "files" / file).samefile(folder(run) / file)
        (path,) = (run.folder / "files" / "media" / "table").rglob("*.json")
        table = json.loads(path.read_text())
        assert table["columns"][:3] == ["method", "psnr", "psnr_std"]
        assert [line[0] for line in table["data"]] == ["FBP", method]
        assert all(isinstance(cell, float) for line in table["data"] for cell in line[1:])
        assert table["data"][1][1] == run.summary["test/psnr"]


def command_line(command: list[str], python: Path, program: str, values: dict[str, Any]) -> list[str]:
    """What the agent runs for one choice of the parameters (wandb_agent.py: Agent._command_run)."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args  # takes 2 s

    words = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    words |= {"env": ["/usr/bin/env"], "interpreter": [str(python)], "program": [program]}
    arguments = []
    for word in create_sweep_command([*command]):
        arguments += words[word[2:-1]] if word.startswith("${") and word.endswith("}") else [word]
    return arguments


def test_an_agent_runs_two_jobs_of_the_ready_sweep(warm: Warm, tmp_path: Path, wandb_server: Any) -> None:
    """The command line as W&B's own code builds it: that of our sweep, and W&B's default."""
    from wandb.sdk.launch.sweeps.utils import DEFAULT_SWEEP_COMMAND

    tiny = [*SMALLEST, "data.n_train=4", "data.n_val=2", "trainer.max_steps=2", "trainer.val_every_n_steps=1"]
    position = SWEEP["command"].index("${args_no_hyphens}")
    our_command = [*SWEEP["command"][:position], *tiny, *SWEEP["command"][position:]]
    wandb_command = [*DEFAULT_SWEEP_COMMAND, *tiny, "logger.wandb.mode=online", "hydra.run.dir=second"]
    jobs: dict[str, tuple[list[str], dict[str, Any], Path]] = {
        "first111": (our_command, {"optimizer.lr": 0.002, "loss": "l1"}, Path("runs/wandb_sweeps/s1/first111")),
        "second22": (wandb_command, {"optimizer.lr": 0.003, "trainer.gradient_clip_val": None}, Path("second")),
    }
    for run_id, (words, values, run_folder) in jobs.items():
        assert values.keys() & SWEEP["parameters"].keys()
        program = SWEEP["program"] if words is our_command else str(CONF.parent / "src" / "qnmixer" / "train.py")
        server_variables = {name: value for name, value in os.environ.items() if name.startswith("WANDB")}
        variables = server_variables | {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": run_id, "WANDB_DIR": str(tmp_path)}
        process = subprocess.run(
            command_line(words, warm.python, program, values), cwd=tmp_path, env=environment(**variables),
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert (process.returncode, process.stderr) == (0, "")
        overrides = [f"{key}={'null' if value is None else value}" for key, value in values.items()]
        assert {*overrides} <= {*read_results(tmp_path / run_folder)["overrides"]}
        assert (tmp_path / run_folder / "wandb" / "run_id").read_text() == run_id
    assert [*wandb_server.runs] == [*jobs]
    for run in wandb_server.runs.values():
        assert run["exit_code"] == 0
        assert [row["val/psnr"] for row in run["history"] if SWEEP["metric"]["name"] in row]


def test_training_continues_without_the_network(left_alone: LeftAlone) -> None:
    """All its steps, and one warning."""
    stdout, stderr = left_alone.process.communicate(timeout=200)
    assert left_alone.process.returncode == 0, stderr
    assert left_alone.server.gone
    assert left_alone.waited.get(timeout=20) < 120  # and not longer for a server that is gone
    assert "step 24/24" in stdout
    assert f"W&B: {left_alone.server.url}" in stdout
    assert [line for line in stderr.splitlines() if "W&B" in line and "wandb sync" in line] == [
        line for line in stderr.splitlines() if not line.startswith(" ")
    ]
    rows = read_metrics(left_alone.folder / "metrics.csv")
    assert sorted({int(row["step"]) for row in rows}) == list(range(1, 25))
    assert list(left_alone.folder.glob("wandb/run-*/*.wandb"))
