"""Jobs of sweeps as methods."""

import json
from pathlib import Path

import pytest
import torch

from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import parse
from qnmixer.errors import PluginError
from qnmixer.extras.comparison.methods import methods_of
from qnmixer.weights import CHECKPOINT_KEY


def sweep(folder: Path, jobs: list[list[str]]) -> Path:
    """A sweep whose jobs have checkpoints without weights."""
    described = {"overrides": [], "varying": [], "jobs": dict(enumerate(jobs))}
    for number, words in enumerate(jobs):
        (folder / str(number) / "checkpoints").mkdir(parents=True)
        ours = {"format": 1, "config": parse(compose("train", words)).plain()}
        torch.save({"state_dict": {}, CHECKPOINT_KEY: ours}, folder / str(number) / "checkpoints" / "best.ckpt")
        (folder / str(number) / "results.json").write_text(json.dumps({"status": "done"}))
    (folder / "sweep.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize(
    ("jobs", "names"),
    [
        ([["model=qn_mixer", "seed=1"], ["model=qn_mixer", "seed=2"], ["model=learn"]], ["QN-Mixer", "LEARN"]),
        ([["seed=1"], ["seed=2", "test_after_training=false", "tags=[a]"], ["model=learn"]], ["QN-Mixer", "LEARN"]),
        ([["model.hessian=bfgs"], ["model.hessian=identity"]], ["hessian=bfgs", "hessian=identity"]),
        ([["model=qn_mixer", "noise=none"], ["model=qn_mixer", "noise=field"], ["model=tv", "noise=none"]],
         ["QN-Mixer noise=none", "QN-Mixer noise=field", "TV"]),
    ],
)  # fmt: skip
def test_methods_are_jobs_that_differ_in_more_than_their_seed_and_their_tags(
    tmp_path: Path, jobs: list[list[str]], names: list[str]
) -> None:
    found = methods_of([sweep(tmp_path, jobs)])
    assert [method.name for method in found] == names
    assert sum(len(method.jobs) for method in found) == len(jobs)


def test_a_method_that_another_sweep_trained_for_longer_has_a_row_of_its_own(tmp_path: Path) -> None:
    equal_steps = sweep(tmp_path / "a", [["model=learn", "seed=1"], ["model=qn_mixer", "seed=1"]])
    equal_time = sweep(tmp_path / "b", [["model=learn", "seed=1", "trainer.max_steps=9000"]])
    found = methods_of([equal_steps, equal_time])
    assert [method.name for method in found] == ["LEARN", "QN-Mixer", "LEARN max_steps=9000"]


def test_a_job_that_is_not_done_is_counted(tmp_path: Path) -> None:
    folder = sweep(tmp_path, [["seed=1"], ["seed=2"], ["optimizer.lr=3"]])
    (folder / "1" / "results.json").unlink()
    (folder / "2" / "results.json").write_text(json.dumps({"status": "failed"}))
    ours, failed = methods_of([folder])
    assert [(it.name, len(it.jobs), it.n_jobs) for it in (ours, failed)] == [("QN-Mixer", 1, 2), ("lr=3", 0, 1)]


def test_code_that_nobody_trusts_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_a_stranger.py").write_text("open('imported', 'w')\nclass Net: ...")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    folder = sweep(tmp_path / "sweep", [["seed=1"]])
    path = folder / "0" / "checkpoints" / "best.ckpt"
    checkpoint = torch.load(path)
    checkpoint[CHECKPOINT_KEY]["config"]["model"] = {"_target_": "of_a_stranger.Net"}
    torch.save(checkpoint, path)
    with pytest.raises(PluginError, match="trust=of_a_stranger"):
        methods_of([folder])
    assert not (tmp_path / "imported").exists()
