"""`qnmixer.compare` on a sweep of tiny networks, written here."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qnmixer.compare import check, compare
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.phantoms.phantoms import phantom
from qnmixer.evaluation.evaluate import evaluate
from qnmixer.module.build import build_module
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.reconstruction.weights import CHECKPOINT_KEY, RUN_KEY
from qnmixer.settings.compose import compose

from ...conftest import TINY, config_of, csv_rows, every_third
from ...pages import SEARCH_PATH, STUDIES
from ...saved import run as run_command


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error of the command."""
    return run_command(compare, check, "compare", "accelerator=cpu", "evaluation.n_pictures=1", *arguments)


def write_sweep(folder: Path, jobs: list[list[str]]) -> Path:
    """A sweep whose jobs are done, with random weights."""
    for number, overrides in enumerate(jobs):
        torch.manual_seed(number)
        module = build_module(config_of(*overrides))
        data = SliceDataModule(module.config.data)
        data.setup()
        checkpoint = {
            "state_dict": module.state_dict(),
            CHECKPOINT_KEY: {"format": 1, "config": module.config.plain()},
            RUN_KEY: {"split": data.split.record},
        }
        (folder / str(number) / "checkpoints").mkdir(parents=True)
        torch.save(checkpoint, folder / str(number) / "checkpoints" / "best.ckpt")
        record = {"status": "done", "seconds": 65.0, "steps": 1234, "memory": {"measured_step": 77.0}}
        (folder / str(number) / "results.json").write_text(json.dumps(record))
    described = {"overrides": [], "varying": [], "git_commit": None, "jobs": dict(enumerate(jobs))}
    (folder / "sweep.json").write_text(json.dumps(described))
    return folder


def test_the_table_holds_what_evaluate_finds_and_what_the_runs_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each method on the same sinograms, which are the same again."""
    words = [*TINY, "data.n_test=4"]
    jobs = [[*words, "model=qn_mixer", f"seed={seed}"] for seed in (1, 2)]
    of_fbp = [word for word in words if not word.startswith("model.")]
    jobs += [[*of_fbp, "model=fbp", f"seed={seed}"] for seed in (1, 2)]
    sweep = write_sweep(tmp_path / "sweep", jobs)
    code, _, stderr = run(f"sweep={sweep}", "seed=1", "noise=field")
    assert (code, stderr) == (0, "")
    found = sweep / "comparison_field"
    images = csv_rows(found / "images.csv")
    config = config_of(*jobs[0], "noise=field", "data.seed=1")
    torch.manual_seed(0)
    module = Reconstructor(config)
    module.load_state_dict(torch.load(sweep / "0" / "checkpoints" / "best.ckpt")["state_dict"])
    evaluation = evaluate(module, SliceDataModule(config.data), "test", config.evaluation, torch.device("cpu"))
    for method in ("QN-Mixer", "FBP"):
        expected = [(score.slice, score.values["psnr"], score.values["ssim"]) for score in evaluation.scores_of(method)]
        its = [line for line in images if (line["method"], line["seed"]) == (method, "1")]
        assert [(line["slice"], float(line["psnr"]), float(line["ssim"])) for line in its] == expected
    fbp = {seed: [line["psnr"] for line in images if (line["method"], line["seed"]) == ("FBP", seed)] for seed in "12"}
    assert fbp["1"] == fbp["2"]  # phantoms and noise are those of the test, whatever the seeds of a job
    means = [float(line["mean"]) for line in csv_rows(found / "comparison.csv") if line["metric"] == "psnr"]
    assert means == sorted(means, reverse=True)
    markdown = (found / "comparison.md").read_text()
    assert " | 1,234 | 1 min 05 s | 77 |" in markdown
    assert f"{means[0]:.2f} ± " in markdown
    assert np.asarray(Image.open(found / "comparison.png")).std() > 10
    assert "QN-Mixer" in (found / "comparison.html").read_text()
    monkeypatch.chdir(tmp_path)
    assert run("runs=[sweep/0,sweep/1]", "seed=1", "noise=field")[::2] == (0, "")
    (of_runs,) = (tmp_path / "comparisons").glob("comparison_2_runs_*_field")
    rows = [row for row in csv_rows(found / "comparison.csv") if row["method"] == "QN-Mixer"]
    assert csv_rows(of_runs / "comparison.csv") == rows


def test_a_folder_is_tested_whole_and_training_slices_are_told(tmp_path: Path) -> None:
    """Of the run's own folder only the test patient is tested. The output may hold an earlier comparison."""
    for number in range(6):
        folder = tmp_path / ("ct" if number < 4 else "others") / f"p{number}"
        folder.mkdir(parents=True)
        np.save(folder / "slice.npy", phantom(16, seed=0, part="test", index=number))
    sweep = write_sweep(tmp_path / "sweep", [[*TINY, "data=numpy", f"data.root={tmp_path}/ct"]])

    def compared(root: str) -> tuple[list[str], bool]:
        code, stdout, stderr = run(f"sweep={sweep}", "data=numpy", f"data.root={tmp_path}/{root}", "data.num_workers=0")
        assert (code, stderr) == (0, "")
        images = csv_rows(sweep / "comparison_numpy" / "images.csv")
        return [line["slice"].partition("/")[0] for line in images], "slices were used in training" in stdout

    assert compared("others") == (["p4", "p5"], False)
    (test,), told = compared("ct")
    assert not told
    (tmp_path / "ct").rename(tmp_path / "moved")
    slices, told = compared("moved")
    assert (set(slices) > {test}, told) == (True, True)


def test_all_seeds_have_the_same_phantoms_also_those_of_a_mix(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / "ct" / f"p{number}").mkdir(parents=True)
        np.save(tmp_path / "ct" / f"p{number}" / "slice.npy", phantom(16, seed=0, part="test", index=number))
    mixed = [
        *(word for word in TINY if not word.startswith("model.")), "model=fbp", "data=mixed",
        "data.sources.slices.name=numpy", f"data.sources.slices.root={tmp_path}/ct", "data.evaluate_on=phantoms",
        "data.sources.phantoms.n_test=2",
    ]  # fmt: skip
    sweep = write_sweep(tmp_path / "sweep", [[*mixed, f"seed={seed}"] for seed in (1, 2)])
    code, stdout, stderr = run(f"sweep={sweep}", "noise=field")
    assert (code, stderr) == (0, "")
    assert "warning" not in stdout.lower()
    images = csv_rows(sweep / "comparison_field" / "images.csv")
    first, second = ([line["psnr"] for line in images if line["seed"] == seed] for seed in "12")
    assert first == second
    psnr = next(it for it in csv_rows(sweep / "comparison_field" / "comparison.csv") if it["metric"] == "psnr")
    assert (float(psnr["std_over_seeds"]), psnr["patients"], psnr["test"]) == (0, "2", "1")


def test_one_line_for_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = tmp_path / "sweep"
    (sweep / "0").mkdir(parents=True)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "comparison.csv").symlink_to(tmp_path)
    jobs = {"overrides": [], "varying": [], "jobs": {"0": ["seed=1"]}}
    (sweep / "sweep.json").write_text(json.dumps(jobs))
    for arguments, words in (
        (["sweep=nowhere"], "sweep=nowhere does not exist"),
        ([f"sweep={sweep}/0"], "is no sweep"),
        ([], "sweep=latest finds no sweep under"),
        ([f"sweep={sweep}", "data=dicom"], "data.root has no value"),
        ([f"sweep={sweep}", "data=dicom", "data.root=nowhere"], "data.root=nowhere does not exist"),
        (["runs=[nowhere]"], "no run folder at nowhere"),
        (["sweep=[]"], "there is nothing to compare: give the folder of a sweep, sweep=DIR, or runs=[RUN,RUN]"),
        ([f"sweep={sweep}", "lr=3"], "unknown key lr: compare has "),
        ([f"sweep={sweep}", f"output={tmp_path}/old"], "old/comparison.csv is a link to another place"),
    ):
        code, stdout, stderr = run(*arguments)
        assert (code, stdout) == (1, ""), arguments
        (line,) = stderr.splitlines()
        assert line.startswith("error: ")
        assert words in line
    (tmp_path / "runs").mkdir()
    sweep.rename(tmp_path / "runs" / "sweep")
    assert "runs/sweep is done: train them first" in run()[2]


METHOD_FILES = sorted(STUDIES.glob("experiment/*/*.yaml"))


@pytest.mark.parametrize("path", every_third(METHOD_FILES), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_method_of_a_comparison_composes(path: Path) -> None:
    group = path.parent.name
    experiments = {"small": "compare_small", "published": "compare_64"}
    base = experiments.get(group) or {"curvature": "ablation_qn", "parts": "ablation_parts", "study": "studies"}[group]
    of_slices = ["data.sources.slices.root=."] if group == "study" else []
    config = config_of(SEARCH_PATH, f"experiment={base}", f"experiment/{group}={path.stem}", *of_slices)
    own = {"leaky_relu": "notebooks.studies.leaky_relu.LeakyQNMixer"}
    assert config.model.name == (path.stem if group in experiments else own.get(path.stem, "qn_mixer"))


@pytest.mark.parametrize("experiment", [
    "compare_small", "compare_noise", "compare_few", "compare_64", "ablation_qn", "ablation_parts", "studies",
])  # fmt: skip
def test_a_comparison_sweeps_over_all_its_methods(experiment: str) -> None:
    params = compose("train", [SEARCH_PATH, f"experiment={experiment}"], with_hydra=True).hydra.sweeper.params
    *_, group = (key for key in params if key.startswith("experiment/"))
    every = {path.stem for path in STUDIES.glob(f"{group}/*.yaml")} - {
        "identity_7",
        "gradients",
        "all_iterates",
    }  # of second_order
    assert {*params[group].split(",")} == every
    assert params["seed"] == "1,2,3"
