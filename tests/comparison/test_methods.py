"""Jobs of sweeps as methods, and the config of a job on a test."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from qnmixer.engine.config import parse
from qnmixer.engine.config.commands import parse_compare
from qnmixer.engine.config.compose import compose
from qnmixer.extras.comparison.compare import config_of
from qnmixer.extras.comparison.methods import ComparedJob, methods_of


def test_other_noise_is_no_test_of_measured_sinograms(tmp_path: Path) -> None:
    compared = parse_compare(compose("compare", ["accelerator=cpu"]))
    config = parse(compose("train", ["experiment=lodopab", "data.root=/x"]))
    job = ComparedJob(tmp_path, [], {}, config, "")
    assert config_of(compared, job, "field_noise") == config_of(compared, job, "as_trained")
    compared.sets["moved"] = ["data.root='/a b'", "data.num_workers=0"]
    assert config_of(compared, job, "moved")[0].data == replace(config.data, root="/a b", num_workers=0)


def test_a_job_that_its_epochs_limit_has_the_steps_that_it_took() -> None:
    for overrides, steps in ((["trainer.max_epochs=2"], 16), (["trainer.max_steps=20"], 20)):
        config = parse(compose("train", ["model=learn", *overrides]))
        assert ComparedJob(Path("0"), [], {"steps": 16}, config, "").steps == steps
        assert ComparedJob(Path("0"), [], {"steps": 0}, config, "").steps is None


def sweep(folder: Path, jobs: dict[str, list[str]], varying: list[str]) -> Path:
    (folder / "sweep.json").write_text(
        json.dumps({"overrides": [], "varying": varying, "git_commit": None, "jobs": jobs})
    )
    return folder


@pytest.mark.parametrize(
    ("jobs", "varying", "names"),
    [
        ([["model=qn_mixer", "seed=1"], ["model=qn_mixer", "seed=2"], ["model=learn", "seed=1"]], ["model", "seed"],
         ["QN-Mixer", "LEARN"]),
        ([["model.hessian=bfgs"], ["model.hessian=identity"]], ["model.hessian"],
         ["hessian=bfgs", "hessian=identity"]),
        ([["model=qn_mixer", "noise=none"], ["model=qn_mixer", "noise=field"], ["model=tv", "noise=none"]],
         ["model", "noise"], ["QN-Mixer noise=none", "QN-Mixer noise=field", "TV"]),
        ([["seed=1"], ["seed=2"]], ["seed"], ["QN-Mixer"]),
        ([["model.hessian=nonsense"]], ["model.hessian"], ["hessian=nonsense"]),
    ],
)  # fmt: skip
def test_methods_are_jobs_that_differ_in_more_than_their_seed(
    tmp_path: Path, jobs: list[list[str]], varying: list[str], names: list[str]
) -> None:
    found = methods_of([sweep(tmp_path, {str(k): its for k, its in enumerate(jobs)}, varying)])
    assert [method.name for method in found] == names
    assert sum(len(method.jobs) for method in found) == len(jobs)
    assert {job.problem for method in found for job in method.jobs} == {"not yet run"}


def test_a_method_that_another_sweep_trained_for_longer_has_a_row_of_its_own(tmp_path: Path) -> None:
    folders = [tmp_path / "equal_steps", tmp_path / "equal_time"]
    jobs = [{"0": ["model=learn", "seed=1"], "1": ["model=qn_mixer", "seed=1"]},
            {"0": ["model=learn", "seed=1", "trainer.max_steps=9000"]}]  # fmt: skip
    for folder, its, varying in zip(folders, jobs, (["model"], ["seed"]), strict=True):
        folder.mkdir()
        sweep(folder, its, varying)
    assert [method.name for method in methods_of(folders)] == ["LEARN", "LEARN max_steps=9000", "QN-Mixer"]


@pytest.mark.parametrize(
    "override",
    [
        "hydra.searchpath=[pkg://antigravity_of_a_stranger]", "data.root=${oc.env:OF_THIS_MACHINE}",
        "experiment=[../../../evil]", "model._target_=antigravity_of_a_stranger.Net",
    ],
)  # fmt: skip
def test_what_a_sweep_says_is_neither_imported_nor_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    monkeypatch.setenv("OF_THIS_MACHINE", "secret")
    (tmp_path / "antigravity_of_a_stranger").mkdir()
    (tmp_path / "antigravity_of_a_stranger" / "__init__.py").write_text("open('imported', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    jobs = {"0": ["data=numpy", "data.root=/ct", override]}
    (method,) = methods_of([sweep(tmp_path, jobs, [override.partition("=")[0]])])
    assert not (tmp_path / "imported").exists()
    assert "secret" not in str(method.jobs)
