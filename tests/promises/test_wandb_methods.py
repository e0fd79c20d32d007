"""Promise 5: Sweeps: a process tree a job, resumable, one bad job does not stop the rest. W&B offline, same names for
every method, nothing private.

Runs of different methods beside each other in W&B, read back from the files that they leave on this disk.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qnmixer.engine.config.compose import CONF

from ..warm import Warm

pytestmark = pytest.mark.xdist_group("wandb_table")  # else each worker would train the three methods

MANUAL = CONF.parent / "docs" / "wandb.md"
SETTING = [
    "experiment=demo", "data.image_size=32", "geometry.n_detectors=48", "geometry.detector_pitch=20",
    "data.num_workers=0", "data.n_train=8", "data.n_val=2", "data.n_test=2", "trainer.max_steps=4",
    "trainer.val_every_n_steps=2", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu", "tags=[tried]",
]  # fmt: skip
METHODS = {
    "QN-Mixer": ["model=qn_mixer", "model.n_iterations=2", "model.channels=8"],
    "FBPConvNet": ["model=fbpconvnet", "model.channels=4", "model.depth=2"],
    "TV": ["model=tv", "model.n_iterations=5"],
}


@pytest.fixture(scope="module")
def runs(
    warm: Warm, tmp_path_factory: pytest.TempPathFactory, offline_runs: Callable[[Path], list[Any]]
) -> dict[str, Any]:
    """One run of each method, in the setting of one experiment."""
    place, found = tmp_path_factory.mktemp("methods"), {}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "HYDRA"))}
    for method, model in METHODS.items():
        words = [*SETTING, *model, f"hydra.run.dir=runs/day/{method}"]
        done = warm.run("-m", "qnmixer.train", *words, cwd=place, env=environment | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        (found[method],) = offline_runs(place / "runs" / "day" / method)
    return found


def folder(run: Any) -> Path:
    return run.folder.parents[1]


def columns(run: Any) -> set[str]:
    """Of the table of runs."""
    return {name.partition(".")[0] for name in run.summary if not name.startswith("_")}


@pytest.mark.slow
def test_two_networks_have_the_same_columns(runs: dict[str, Any]) -> None:
    first, second = runs["QN-Mixer"], runs["FBPConvNet"]
    assert columns(first) == columns(second)
    assert {"train/loss", "val/psnr", "val/psnr_best", "test/psnr", "test/ssim", "test/fbp/psnr"} <= columns(first)
    assert first.config.keys() == second.config.keys()
    assert "train/lambda_0" in first.metrics  # a curve of its own, and no column


@pytest.mark.slow
def test_what_is_not_trained_has_the_columns_of_its_test_too(runs: dict[str, Any]) -> None:
    of_training = ("train/", "memory/")
    assert columns(runs["TV"]) == {it for it in columns(runs["QN-Mixer"]) if not it.startswith(of_training)}


@pytest.mark.slow
def test_the_names_of_the_manual_are_logged(runs: dict[str, Any]) -> None:
    names = set(re.findall(r"[`\":]((?:train|val|test)/\w+(?:/\w+)?)[`\"]", MANUAL.read_text()))
    assert len(names) > 10
    logged = {name.partition(".")[0] for name in runs["QN-Mixer"].metrics}
    assert names - logged == {"test/tv/psnr", "val/NAME", "test/NAME"}  # TV: nobody asked for it; NAME: of any metric


@pytest.mark.slow
def test_config_tags_and_name_distinguish_runs(runs: dict[str, Any]) -> None:
    assert {method: run.config["method"] for method, run in runs.items()} == {method: method for method in METHODS}
    assert [run.tags for run in runs.values()] == [
        ["tried", "demo", model, "phantoms", "single"] for model in ("qn_mixer", "fbpconvnet", "tv")
    ]
    assert runs["TV"].name == "tv-phantoms-16views-seed42-TV"
    assert len({run.name for run in runs.values()}) == len(runs)


@pytest.mark.slow
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


@pytest.mark.slow
def test_page_picture_and_a_table_of_numbers_are_files_of_the_run(runs: dict[str, Any]) -> None:
    for method, run in runs.items():
        for name in ("page.html", "picture.png"):
            file = Path("evaluation", name)
            assert (run.folder / "files" / file).samefile(folder(run) / file)
        (path,) = (run.folder / "files" / "media" / "table").rglob("*.json")
        table = json.loads(path.read_text())
        assert table["columns"][:3] == ["method", "psnr", "psnr_std"]
        assert [line[0] for line in table["data"]] == ["FBP", method]
        assert all(isinstance(cell, float) for line in table["data"] for cell in line[1:])
        assert table["data"][1][1] == run.summary["test/psnr"]
