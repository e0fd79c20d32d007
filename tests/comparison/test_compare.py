"""A sweep of two seeds, trained by the command, and the results of `qnmixer.compare`."""

import csv
import json
import os
import shutil
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from PIL import Image

from qnmixer.compare import check, compare
from qnmixer.engine.checkpoints import load_run
from qnmixer.engine.config.compose import CONF, compose
from qnmixer.engine.config.run import parse
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.evaluation.evaluate import evaluate
from qnmixer.extras.comparison.compare import scan_under_test

from ..test_export import run as run_command
from ..warm import Warm

pytestmark = pytest.mark.xdist_group("compare")  # else each worker would train the sweep

SWEEP = [
    "model=qn_mixer", "seed=1,2", "optimizer.lr=1e-3,abc",
    "data.image_size=32", "geometry.n_views=8", "geometry.n_detectors=48", "geometry.detector_pitch=20",
    "model.n_iterations=2", "model.channels=8", "data.n_train=8", "data.n_val=2", "data.n_test=3", "data.batch_size=2",
    "data.num_workers=0", "trainer.max_steps=4", "trainer.val_every_n_steps=2", "trainer.log_every_n_steps=1",
    "trainer.accelerator=cpu", "logger=csv", "test_after_training=false", "hydra.sweep.dir=sweep",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    """The sweep, once: two jobs that are done, and two with a learning rate that is none."""
    folder = tmp_path_factory.mktemp("compare")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "HYDRA"))}
    done = warm.run("-m", "qnmixer.train", "-m", *SWEEP, cwd=folder, env=environment)
    assert "2 of 4 jobs failed" in done.stderr, done.stdout + done.stderr
    return folder / "sweep"


@pytest.fixture
def sweep(trained: Path, tmp_path: Path) -> Path:
    """A copy of it to do with as one likes."""
    return Path(shutil.copytree(trained, tmp_path / "sweep"))


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error of the command."""
    return run_command(compare, check, "compare", "accelerator=cpu", *arguments)


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_the_table_holds_what_evaluate_finds_and_what_the_runs_measured(sweep: Path) -> None:
    """Each method on the same sinograms, which are the same again."""
    words = [f"sweep={sweep}", "tests=[as_trained,disc]", "seed=1", "evaluation.n_pictures=1"]
    code, stdout, stderr = run(*words)
    assert (code, stderr) == (0, "")
    assert "as_trained: 2 jobs on 3 slices, " in stdout
    found = sweep / "comparison"
    module = load_run(sweep / "0")  # its seed is 1, as that of the test
    assert module.config.seed == 1
    data = SliceDataModule(module.config.data)
    evaluation = evaluate(module, data, "test", module.config.evaluation, torch.device("cpu"))
    images = [line for line in lines(found / "images.csv") if line["test"] == "as_trained"]
    for method, seed in (("QN-Mixer", "1"), ("FBP", "1")):
        expected = [(s.slice, s.values["psnr"], s.values["ssim"]) for s in evaluation.of(method)]
        its = [line for line in images if (line["method"], line["seed"]) == (method, seed)]
        assert [(line["slice"], float(line["psnr"]), float(line["ssim"])) for line in its] == expected
    fbp = {seed: [line["psnr"] for line in images if (line["method"], line["seed"]) == ("FBP", seed)] for seed in "12"}
    assert fbp["1"] == fbp["2"]  # phantoms and noise are those of the test, whatever the seeds of a job
    rows = [line for line in lines(found / "comparison.csv") if line["test"] == "as_trained"]
    seeds = [[float(i["psnr"]) for i in images if (i["method"], i["seed"]) == ("QN-Mixer", seed)] for seed in "12"]
    (ours,) = (row for row in rows if row["method"] == "QN-Mixer")
    assert float(ours["psnr"]) == pytest.approx(mean(map(mean, seeds)))
    assert f"{mean(map(mean, seeds)):.2f} ± " in stdout
    ranked = [float(line["psnr"]) for line in rows if line["psnr"]]
    assert ranked == sorted(ranked, reverse=True)
    assert len(ranked) == 2

    # The memory of a job is the same number in its line, results.json, the table of the sweep, and here.
    by_job = {line["job"]: line for line in lines(sweep / "sweep.csv") if line["status"] == "done"}
    of_jobs = []
    for number in ours["folders"].split(", "):
        mib = json.loads((sweep / number / "results.json").read_text())["memory"]["measured_step"]
        assert f"memory: {mib:,.0f} MiB in tensors" in (sweep / number / "output.log").read_text()
        assert float(by_job[number]["peak_mib"]) == mib
        assert f"| {mib:,.0f} |" in (sweep / "sweep.md").read_text()
        of_jobs.append(mib)
    assert float(ours["step_mib"]) == max(of_jobs)
    assert np.asarray(Image.open(found / "comparison.png")).std() > 10
    assert (found / "comparison_curves.png").stat().st_size > 1000
    page = (found / "comparison.html").read_text()
    assert all(name in page for name in ("QN-Mixer", "disc: "))
    before = (found / "images.csv").read_text()
    assert run(*words)[0] == 0  # the folder may hold an earlier comparison
    assert (found / "images.csv").read_text() == before


@pytest.mark.slow
def test_every_row_says_where_it_comes_from_and_what_was_not_run(sweep: Path, tmp_path: Path) -> None:
    """Slices of a folder, a test that cannot be made, a job that is not there, and one that failed."""
    shutil.rmtree(sweep / "0")  # seed 1
    folder = tmp_path / "my slices"
    folder.mkdir()
    np.save(
        folder / "a.npy", np.pad(np.zeros((1, 40, 40), np.float32), ((0, 0), (4, 4), (4, 4)), constant_values=-1000)
    )
    sets = ["+sets.mine=['data=numpy','noise=field']", "+sets.odd=['data.simulation_factor=3']"]
    code, stdout, stderr = run(f"sweep={sweep}", *sets, f"root={folder}", "tests=[mine,odd]")
    assert (code, stderr) == (0, "")
    assert "mine: 1 jobs on 1 slices" in stdout
    assert "note: odd is left out: data.simulation_factor=3 is too large" in stdout
    assert "note: QN-Mixer, job 0: not yet run" in stdout
    assert "note: lr=abc, job 1: failed: ConfigError: optimizer.lr" in stdout
    by_method = {line["method"]: line for line in lines(sweep / "comparison" / "comparison.csv")}
    assert by_method.keys() == {"QN-Mixer", "FBP", "lr=abc"}
    done = by_method["QN-Mixer"]
    assert (done["seeds"], done["jobs"], done["steps"], done["folders"]) == ("1", "2", "4", "0, 2")
    assert done["commit"]
    assert done["config"]
    assert " thread" in done["trained_on"]
    failed = by_method["lr=abc"]
    assert failed["status"].startswith("failed: ConfigError: optimizer.lr")
    assert failed["psnr"] == ""
    markdown = (sweep / "comparison" / "comparison.md").read_text()
    assert "| QN-Mixer | 1 of 2 |" in markdown
    assert "| lr=abc | 0 of 2 | failed |" in markdown
    code, _, stderr = run(f"sweep={sweep}", *sets, "tests=[odd]")
    assert code == 1
    assert stderr.startswith("error: odd is left out")


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
        ([f"sweep={sweep}", "tests=[as_traind]"], "did you mean as_trained?"),
        ([f"sweep={sweep}", "tests=[real]"], "give it as root=/path/to/slices"),
        ([f"sweep={sweep}", "root=nowhere"], "root=nowhere does not exist"),
        ([f"sweep={sweep}", "lr=3"], "lr is not known here"),
        ([f"sweep={sweep}", "tests=[]"], "no tests are left"),
        ([f"sweep={sweep}", f"output={tmp_path}/old"], "old/comparison.csv is a link to another place"),
    ):
        code, stdout, stderr = run(*arguments)
        assert (code, stdout) == (1, ""), arguments
        (line,) = stderr.splitlines()
        assert line.startswith("error: ")
        assert words in line
    code, _, stderr = run(f"sweep={sweep}")
    assert code == 1
    assert "is done (job 0: not yet run)" in stderr
    (tmp_path / "runs").mkdir()
    sweep.rename(tmp_path / "runs" / "sweep")
    assert "runs/sweep is done" in run()[2]


METHOD_FILES = sorted(CONF.glob("experiment/*/*.yaml"))


@pytest.mark.parametrize("path", METHOD_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_method_of_a_comparison_composes(path: Path) -> None:
    group = path.parent.name
    experiments = {"small": "compare_small", "published": "compare_64"}
    base = experiments.get(group) or {"curvature": "ablation_qn", "parts": "ablation_parts", "study": "studies"}[group]
    of_slices = ["data.sources.slices.root=."] if group == "study" else []
    config = parse(compose("train", [f"experiment={base}", f"experiment/{group}={path.stem}", *of_slices]))
    assert config.model.name == (path.stem if group in experiments else "qn_mixer")


@pytest.mark.parametrize(
    "experiment",
    ["compare_small", "compare_noise", "compare_few", "compare_64", "ablation_qn", "ablation_parts", "studies"],
)
def test_a_comparison_sweeps_over_all_its_methods(experiment: str) -> None:
    params = compose("train", [f"experiment={experiment}"], with_hydra=True).hydra.sweeper.params
    *_, group = (key for key in params if key.startswith("experiment/"))
    every = {path.stem for path in CONF.glob(f"{group}/*.yaml")} - {"identity_7"}  # of second_order alone
    assert {*params[group].split(",")} == every
    assert params["seed"] == "1,2,3"


def test_what_only_training_sees_makes_no_other_test() -> None:
    def scan(*overrides: str) -> object:
        return scan_under_test(parse(compose("train", ["experiment=compare_few", *overrides])))

    assert compose("train", ["experiment=compare_few"], with_hydra=True).hydra.sweeper.params["data.train_slices"]
    assert scan("data.train_slices=10") == scan("data.train_slices=100") == scan("seed=3", "data.num_workers=2")
    assert scan("data.disc=true") != scan() != scan("noise=field")
