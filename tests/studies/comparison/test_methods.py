"""Jobs of sweeps as methods."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from qnmixer.errors import ConfigError, PluginError
from qnmixer.reconstruction.weights import CHECKPOINT_KEY
from qnmixer_studies.comparison import compare as comparing
from qnmixer_studies.comparison.methods import ComparedJob, ComparedMethod, methods_of

from ...conftest import config_of
from ...settings.test_texts import ODD, is_plain


def sweep(folder: Path, jobs: list[list[str]]) -> Path:
    """A sweep whose jobs have checkpoints without weights."""
    described = {"overrides": [], "varying": [], "jobs": dict(enumerate(jobs))}
    for number, words in enumerate(jobs):
        (folder / str(number) / "checkpoints").mkdir(parents=True)
        ours = {"format": 1, "config": config_of(*words).plain()}
        torch.save({"state_dict": {}, CHECKPOINT_KEY: ours}, folder / str(number) / "checkpoints" / "best.ckpt")
        (folder / str(number) / "results.json").write_text(json.dumps({"status": "done"}))
    (folder / "sweep.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize(("jobs", "names"), [
    ([["model=qn_mixer", "seed=1"], ["model=qn_mixer", "seed=2"], ["model=learn"]], ["QN-Mixer", "LEARN"]),
    ([["seed=1"], ["seed=2", "test_after_training=false", "tags=[a]"], ["model=learn"]], ["QN-Mixer", "LEARN"]),
    ([["model.hessian=bfgs"], ["model.hessian=identity"]], ["hessian=bfgs", "hessian=identity"]),
    ([["model=qn_mixer", "noise=none"], ["model=qn_mixer", "noise=field"], ["model=tv", "noise=none"]],
     ["QN-Mixer noise=none", "QN-Mixer noise=field", "TV"]),
    ([["optimizer.lr=1e-3", "seed=1"], ["optimizer.lr=0.001", "seed=2"]], ["QN-Mixer"]),
    ([["optimizer.lr=1e-3"], ["optimizer.lr=0.001", "seed=2"], ["optimizer.lr=0.01"]], ["lr=1e-3", "lr=0.01"]),
    ([["model=qn_mixer"], ["model.n_iterations=14", "seed=2"]], ["QN-Mixer"]),
    ([["logger=csv", "trainer.accelerator=cpu"], ["data.num_workers=3", "callbacks=lr_monitor", "seed=2"]],
     ["QN-Mixer"]),
    ([["callbacks=default"], ["callbacks=ema"]], ["callbacks=default", "callbacks=ema"]),
    ([["strategy=ddp", "trainer.devices=2", "seed=1"], ["strategy=ddp", "trainer.devices=2", "seed=2"]], ["QN-Mixer"]),
    ([["strategy=ddp", "trainer.devices=2"], ["strategy=ddp", "trainer.devices=4"]], ["devices=2", "devices=4"]),
])  # fmt: skip
def test_methods_are_jobs_that_differ_in_more_than_their_seed_and_their_tags(
    tmp_path: Path, jobs: list[list[str]], names: list[str]
) -> None:
    found = methods_of([sweep(tmp_path, jobs)])
    assert [method.name for method in found] == names
    assert sum(len(method.jobs) for method in found) == len(jobs)


def test_a_method_that_another_sweep_trained_for_longer_has_a_row_of_its_own(tmp_path: Path) -> None:
    equal_steps = sweep(tmp_path / "a", [["model=learn", "seed=1"], ["model=qn_mixer", "seed=1"]])
    equal_time = sweep(tmp_path / "b", [["model=learn", "seed=1", "trainer.max_steps=9000"]])
    names = ["LEARN", "QN-Mixer", "LEARN max_steps=9000"]
    assert [method.name for method in methods_of([equal_steps, equal_time])] == names
    record = {"status": "done", "overrides": ["model=learn", "seed=2", "trainer.max_steps=9000"]}
    (equal_time / "0" / "results.json").write_text(json.dumps(record))  # as a run has it
    assert [method.name for method in methods_of([equal_steps], runs=[equal_time / "0"])] == names
    (same,) = methods_of([], runs=[equal_time / "0", equal_time / "0" / "checkpoints" / "best.ckpt"])
    assert [job.folder.name for job in same.repeats] == ["best.ckpt"]


def test_a_job_that_is_not_done_is_counted(tmp_path: Path) -> None:
    folder = sweep(tmp_path, [["seed=1"], ["seed=2"], ["optimizer.lr=3"]])
    (folder / "1" / "results.json").unlink()
    (folder / "2" / "results.json").write_text(json.dumps({"status": "failed"}))
    ours, failed = methods_of([folder])
    assert [(it.name, len(it.jobs), it.n_seeds) for it in (ours, failed)] == [("QN-Mixer", 1, 2), ("lr=3", 0, 1)]


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


def edit(folder: Path, job: int, section: str, **values: Any) -> None:
    """The checkpoint of a job as after another config file."""
    path = folder / str(job) / "checkpoints" / "best.ckpt"
    checkpoint = torch.load(path)
    checkpoint[CHECKPOINT_KEY]["config"][section] |= values
    torch.save(checkpoint, path)


def test_equal_words_with_another_config_file_or_other_code_are_other_methods(tmp_path: Path) -> None:
    """Their names say in what they differ. A job that is not done counts where its words are."""
    folder = sweep(tmp_path, [[f"seed={seed}"] for seed in range(6)])
    edit(folder, 2, "model", n_iterations=3)
    edit(folder, 3, "model", n_iterations=3)
    for job, code in ((1, "a" * 16), (3, "b" * 16)):
        record = {"status": "done", "code": {"my_net": code}}
        (folder / str(job) / "results.json").write_text(json.dumps(record))
    (folder / "5" / "results.json").unlink()
    found = {method.name: [int(job.folder.name) for job in method.jobs] for method in methods_of([folder])}
    assert found == {
        "QN-Mixer n_iterations=14 my_net=None": [0, 4],
        "QN-Mixer n_iterations=14 my_net=aaaaaa": [1],
        "QN-Mixer n_iterations=3 my_net=None": [2],
        "QN-Mixer n_iterations=3 my_net=bbbbbb": [3],
    }
    assert [method.n_seeds for method in methods_of([folder])] == [3, 1, 1, 1]


def test_weights_that_a_resumed_run_started_from_are_known(tmp_path: Path) -> None:
    """Its checkpoint does not have them any more."""
    folder = sweep(tmp_path, [["seed=1"], ["seed=2"]])
    record = {"status": "done", "overrides": ["finetune=pretrained", "seed=2"]}
    (folder / "1" / "results.json").write_text(json.dumps(record))
    assert [method.name for method in methods_of([folder])] == [
        "QN-Mixer finetune=None",
        "QN-Mixer finetune=pretrained",
    ]


def test_a_seed_counts_once(tmp_path: Path) -> None:
    """However often it was trained: in one sweep, in a copy of it, in another one, and done or not."""
    first = sweep(tmp_path / "a", [["seed=1"], ["seed=1"], ["seed=2"], ["seed=3"], ["seed=3.0"]])
    for job in (3, 4):
        (first / str(job) / "results.json").unlink()
    copy = shutil.copytree(first, tmp_path / "b")
    for sweeps in ([first], [first, copy]):
        (method,) = methods_of(sweeps)
        assert [job.name for job in method.jobs] == ["a/0", "a/2"]
        assert [job.name for job in method.repeats] == ["a/1", "b/0", "b/1", "b/2"][: 1 + 3 * (len(sweeps) - 1)]
        assert method.n_seeds == 3


@pytest.mark.parametrize("odd", [*ODD, "a\nerror: b"])
def test_compare_shows_a_job_of_somebody_elses_sweep_in_a_line(
    odd: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ComparedJob(Path(odd), {}, None)  # type: ignore[arg-type]  # it is shown, and then the test ends
    monkeypatch.setattr(comparing, "methods_of", lambda *_: [ComparedMethod(odd, [job], 1)])

    def end(*_: object) -> None:
        raise ConfigError("end")

    monkeypatch.setattr(comparing, "on_test", end)
    config = OmegaConf.create({"checkpoint": "best", "trust": [], "accelerator": "cpu", "seed": 1})
    with pytest.raises(ConfigError, match="end"):
        comparing.compare(config, [], [])  # type: ignore[arg-type]
    told = capsys.readouterr().out
    assert is_plain(told)
    assert told.count("\n") == 1
