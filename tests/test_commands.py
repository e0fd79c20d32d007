"""The three commands from end to end, on a network that learns in a second."""

import csv
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
import torch
from PIL import Image

from qnmixer import cli
from qnmixer.checkpoints.reading import load_run
from qnmixer.checkpoints.weights_file import digest_of_weights
from qnmixer.config import parse
from qnmixer.config.commands import parse_evaluate, parse_reconstruct
from qnmixer.data.phantoms import phantom
from qnmixer.evaluate import evaluate, into_new_folder
from qnmixer.inference.writers import write_dicom
from qnmixer.module import ReconstructionModule
from qnmixer.physics import FanBeamProjector
from qnmixer.physics.noise import attenuation_per_value
from qnmixer.reconstruct import reconstruct
from qnmixer.tracking.resume import resume_overrides
from qnmixer.train import run as train

from .nvidia import fake_nvidia_smi
from .warm import Done, Warm

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("commands")]

COMPLETE = {"train": resume_overrides, "evaluate": into_new_folder}
COMMANDS: dict[str, Any] = {
    "train": (train, parse),
    "evaluate": (evaluate, parse_evaluate),
    "reconstruct": (reconstruct, parse_reconstruct),
}
SIZE, VIEWS, BINS, STEPS = 32, 8, 48, 4
TINY = [
    f"data.image_size={SIZE}", f"geometry.n_views={VIEWS}", f"geometry.n_detectors={BINS}",
    "geometry.detector_pitch=20", "model.n_iterations=2", "model.channels=8", "model.n_mixer_layers=1",
    "data.num_workers=0", "data.batch_size=2", f"trainer.max_steps={STEPS}", "trainer.val_every_n_steps=2",
    "trainer.log_every_n_steps=1", "trainer.accelerator=cpu", "logger=csv",
]  # fmt: skip
PHANTOMS = ["data.n_train=8", "data.n_val=2", "data.n_test=2"]


@dataclass
class Outcome:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one line of a command that failed."""
        assert self.code == 1, self.stderr
        (line,) = [line for line in self.stderr.splitlines() if line.strip()]
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    @property
    def text(self) -> str:
        """Standard output, however it was broken into lines."""
        return " ".join(self.stdout.split())


def run(name: str, *arguments: str) -> Outcome:
    """A command in this process, through the very code that its module runs."""
    code, stdout, stderr = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", [name, *arguments])
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv(cli.TRACEBACK, raising=False)
        try:
            cli.run(*COMMANDS[name], name, complete=COMPLETE.get(name, list))
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Outcome(code, stdout.getvalue(), stderr.getvalue())


def training(folder: Path, *overrides: str) -> Outcome:
    """A tiny training run into `folder`."""
    phantoms = [] if any(override.startswith("data=") for override in overrides) else PHANTOMS
    return run("train", *TINY, *phantoms, *overrides, f"hydra.run.dir={folder}")


def environment(**more: str) -> dict[str, str]:
    """That of this process, without anything of W&B."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "HYDRA"))}
    return kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | more


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def weights(run_folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    checkpoint = torch.load(run_folder / "checkpoints" / f"{name}.ckpt", weights_only=True)
    return checkpoint["state_dict"]


def metrics(folder: Path) -> dict[str, list[float]]:
    """metrics.csv by column, without the empty cells."""
    with (folder / "metrics.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    return {key: [float(line[key]) for line in lines if line[key]] for key in lines[0]}


def slice_hu(number: int, size: int = 48) -> np.ndarray[Any, Any]:
    return phantom(size, seed=0, part="test", index=number)


def write_ct(path: Path, number: int, patient: str, size: int = 48) -> None:
    write_dicom(path, slice_hu(number, size), series_uid=f"1.2.3.{sum(map(ord, patient))}", description="a test")
    dataset = pydicom.dcmread(path)
    dataset.PatientID = patient
    dataset.PatientName = f"Doe^{patient}"
    dataset.ImagePositionPatient = [0, 0, number]
    dataset.save_as(path)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Threads of tests that run side by side would wait for each other, spinning."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """A run folder on phantoms, with the field's noise."""
    outcome = training(place / "trained", "noise=field")
    assert outcome.code == 0, outcome.stderr
    (place / "trained" / "stdout.txt").write_text(outcome.stdout)
    return place / "trained"


@pytest.fixture(scope="module")
def noise_free(place: Path) -> Path:
    """A run folder without noise, on whose simulated sinograms one can count."""
    outcome = training(place / "noise_free", "test_after_training=false")
    assert outcome.code == 0, outcome.stderr
    return place / "noise_free"


@pytest.fixture(scope="module")
def minmax(place: Path) -> Path:
    """A run folder whose slices have no scale."""
    outcome = training(place / "minmax", "data.scaling=minmax", "test_after_training=false")
    assert outcome.code == 0, outcome.stderr
    return place / "minmax"


@pytest.fixture(scope="module")
def diverged(place: Path) -> tuple[Path, Outcome]:
    """A run folder, and how the run ended: with a loss that is not a number."""
    return place / "diverged", training(place / "diverged", "logger=wandb", "optimizer.lr=1e30", "trainer.max_steps=20")


@pytest.fixture(scope="module")
def ct(place: Path) -> Path:
    """Three patients of two slices each in DICOM, and two files of no use."""
    folder = place / "ct"
    for p, patient in enumerate(("A", "B", "C")):
        for k in range(2):
            write_ct(folder / patient / f"{k}.dcm", 2 * p + k, patient)
    (folder / "notes.txt").write_text("no CT")
    (folder / "A" / "cut.dcm").write_bytes((folder / "A" / "0.dcm").read_bytes()[:900])
    return folder


# Training


def test_a_run_folder_holds_all_of_a_run(trained: Path) -> None:
    files = {str(path.relative_to(trained)) for path in trained.rglob("*") if path.is_file()}
    files -= {"stdout.txt", "code.diff"}  # the latter where there are changes to the code
    assert files == {
        ".lock", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml",
        "checkpoints/best.ckpt", "checkpoints/last.ckpt", "metrics.csv", "results.json",
        "pictures/iterates_0000002.png", "pictures/iterates_0000004.png",
        "evaluation/images.csv", "evaluation/table.csv", "evaluation/table.md", "evaluation/picture.png",
        "evaluation/page.html",
    }  # fmt: skip


def test_the_final_table_is_among_the_metrics(trained: Path) -> None:
    (value,) = metrics(trained)["test/psnr"]
    assert value == pytest.approx(record(trained)["test"]["QN-Mixer"]["psnr"])


def test_results_describe_the_run(trained: Path) -> None:
    results = record(trained)
    assert results["status"] == "done"
    assert "noise=field" in results["overrides"]
    assert results["best"]["val/psnr"] == pytest.approx(max(metrics(trained)["val/psnr"]))
    assert results["test"]["QN-Mixer"]["psnr"] > results["test"]["FBP"]["psnr"]
    assert Path(results["picture"]) == trained / "evaluation" / "picture.png"
    assert results["evaluated"]["weights"] == digest_of_weights(load_run(trained).state_dict())


def test_metrics_are_finite_and_nothing_explodes(trained: Path) -> None:
    values = metrics(trained)
    for name in ("train/loss", "train/grad_norm", "train/lambda_0"):
        assert len(values[name]) == STEPS
    for name in ("val/loss", "val/psnr", "val/ssim", "val/cosine_zs", "val/skipped_pairs"):
        assert len(values[name]) == 2
    assert all(np.isfinite(numbers).all() for numbers in values.values())
    assert 0 < max(values["train/grad_norm"]) < 10
    assert max(values["train/loss"]) < 0.1
    assert len(set(values["train/lambda_0"])) == STEPS
    assert all(0 <= share <= 1 for share in values["val/skipped_pairs"])


def test_the_terminal_shows_progress_the_table_and_last_the_picture(trained: Path) -> None:
    lines = (trained / "stdout.txt").read_text().splitlines()
    assert lines[-1] == f"picture: {trained / 'evaluation' / 'picture.png'}"
    assert any(line.startswith("step 4/4 · val PSNR ") for line in lines)
    assert any("QN-Mixer over FBP" in line for line in lines)
    assert any("2 × accumulation 1 = 2 slices" in line for line in lines)


def test_pictures_can_be_opened(trained: Path) -> None:
    for path in trained.rglob("*.png"):
        with Image.open(path) as picture:
            assert min(picture.size) > 300


OfflineRuns = Callable[[Path], list[Any]]


def test_wandb_offline_needs_no_key_no_home_and_no_network(
    warm: Warm, tmp_path: Path, offline_runs: OfflineRuns
) -> None:
    folder, home = tmp_path / "run", tmp_path / "home"
    home.mkdir()
    arguments = [*TINY, *PHANTOMS, "logger=wandb", f"hydra.run.dir={folder}"]
    env = environment(HOME=str(home), http_proxy="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9")
    done: Done = warm.run("-m", "qnmixer.train", *arguments, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith("picture: ")
    assert not list(tmp_path.glob("wandb"))
    (run,) = offline_runs(folder)
    assert run.exit_code == 0
    assert [(row["_step"], row["samples"]) for row in run.history] == [(k, 2 * k) for k in range(1, STEPS + 1)]
    of_every_row = {"train/loss", "train/grad_norm", "train/lr", "train/lambda_0", "memory/allocated_mib"}
    assert all(of_every_row <= row.keys() for row in run.history)
    assert {"val/psnr", "test/psnr", "train/samples_per_second"} <= run.metrics
    files = run.folder / "files" / "media"
    assert len(list(files.glob("images/val/*.png"))) == 2
    (picture,) = files.glob("images/test/*.png")
    assert picture.read_bytes() == (folder / "evaluation" / "picture.png").read_bytes()
    (table,) = files.glob("table/test/*.json")
    (fbp, *of_fbp), (ours, *numbers) = json.loads(table.read_text())["data"]
    assert [fbp, ours] == ["FBP", "QN-Mixer"]
    assert all(isinstance(cell, float) for cell in [*of_fbp, *numbers])
    for name in ("picture.png", "page.html"):
        assert (run.folder / "files" / "evaluation" / name).samefile(folder / "evaluation" / name)


def test_a_crash_is_recorded_as_one(diverged: tuple[Path, Outcome], offline_runs: OfflineRuns) -> None:
    folder, outcome = diverged
    assert outcome.code == 1
    results = record(folder)
    assert results["status"] == "failed"
    assert results["error"].startswith("FloatingPointError: the loss became nan")
    (run,) = offline_runs(folder)
    assert run.exit_code == 1


def test_a_nan_loss_ends_with_a_line_that_names_the_slices(diverged: tuple[Path, Outcome]) -> None:
    error = diverged[1].error
    assert "the loss became nan at step" in error
    assert "train-phantom-" in error
    assert "lower optimizer.lr" in error


def test_ctrl_c_ends_in_order(tmp_path: Path, offline_runs: OfflineRuns) -> None:
    folder = tmp_path / "run"
    arguments = [*TINY, *PHANTOMS, "logger=wandb", "trainer.max_steps=100000", f"hydra.run.dir={folder}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "qnmixer.train", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(), start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 200  # the machine may be busy
    while not list(folder.glob("pictures/iterates_0000004.png")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=200)
    assert stderr.startswith("interrupted after step ")
    assert stderr.endswith(f", to resume: python -m qnmixer.train resume={folder}\n")
    assert process.returncode == 130
    assert record(folder)["status"] == "interrupted"
    assert "error" not in record(folder)
    weights(folder, "last")
    (run,) = offline_runs(folder)
    assert run.exit_code == 255  # what wandb calls interrupted


def test_same_seed_same_weights(trained: Path, tmp_path: Path) -> None:
    options = ["noise=field", "test_after_training=false"]
    assert training(tmp_path / "again", *options).code == 0
    assert training(tmp_path / "other", *options, "seed=43").code == 0
    first, again, other = weights(trained), weights(tmp_path / "again"), weights(tmp_path / "other")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert metrics(trained)["train/loss"] == metrics(tmp_path / "again")["train/loss"]


def test_workers_change_nothing(trained: Path, tmp_path: Path) -> None:
    assert training(tmp_path, "noise=field", "data.num_workers=1", "test_after_training=false").code == 0
    assert all(torch.equal(a, b) for a, b in zip(weights(trained).values(), weights(tmp_path).values(), strict=True))


@pytest.mark.parametrize(("precision", "scaled"), [("32", False), ("16-mixed", True), ("bf16-mixed", False)])
def test_precision_is_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, scaled: bool
) -> None:
    seen = set()
    step = ReconstructionModule.training_step

    def watched(self: ReconstructionModule, *arguments: Any) -> torch.Tensor:
        seen.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)
        return step(self, *arguments)

    monkeypatch.setattr(ReconstructionModule, "training_step", watched)
    assert training(tmp_path, f"trainer.precision={precision}", "noise=field").code == 0
    assert seen == {{"32": torch.float32, "16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}[precision]}
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert ("MixedPrecision" in checkpoint) == scaled
    if scaled:
        assert checkpoint["MixedPrecision"]["scale"] > 1
    assert all(value.dtype == torch.float32 for value in checkpoint["state_dict"].values())
    assert np.isfinite(metrics(tmp_path)["train/grad_norm"]).all()
    assert record(tmp_path)["test"]["QN-Mixer"]["psnr"] > record(tmp_path)["test"]["FBP"]["psnr"]


def test_accumulation_makes_fewer_steps_of_more_slices(tmp_path: Path) -> None:
    outcome = training(tmp_path, "trainer.accumulate_grad_batches=2", "test_after_training=false")
    assert "2 × accumulation 2 = 4 slices" in outcome.text
    values = metrics(tmp_path)
    assert len(values["train/grad_norm"]) == STEPS
    assert len(values["val/psnr"]) == 2
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == STEPS


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.val_every_n_steps=500"],
        ["trainer.max_steps=-1", "trainer.max_epochs=1", "trainer.val_every_n_steps=null"],
        ["monitor=val/loss", "schedule=constant", "optimizer=sgd"],
        ["model=qn_mixer_paper", "model.n_iterations=2", "model.channels=8", "schedule=step", "optimizer=adafactor"],
        ["data.scaling=minmax", "data.augment=true", "loss=ssim_mix"],
        ["noise=physical", "model.hessian=identity", "loss=l1", "trainer.gradient_clip_val=null"],
        ["geometry.n_views=7", "geometry.angle_span=4.0", "geometry.fbp_filter=hann", "model.data_term=adjoint"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_other_ways_to_train(tmp_path: Path, overrides: list[str]) -> None:
    outcome = training(tmp_path, *overrides)
    assert outcome.code == 0, outcome.stderr
    results = record(tmp_path)
    assert results["status"] == "done"
    assert np.isfinite(list(results["test"]["QN-Mixer"].values())).all()
    assert weights(tmp_path, "best")
    assert 0 < max(metrics(tmp_path)["train/grad_norm"]) < 100


def test_training_on_a_dicom_folder(ct: Path, tmp_path: Path) -> None:
    source = ["data=dicom", f"data.root={ct}", f"data.cache_dir={tmp_path / 'cache'}"]
    with pytest.warns(UserWarning, match="skipped 2 of its files"):
        outcome = training(tmp_path / "run", *source)
    assert outcome.code == 0, outcome.stderr
    assert "train 2 slices of 1 patient, val 2 slices of 1 patient, test 2 slices of 1 patient" in outcome.text
    with (tmp_path / "run" / "evaluation" / "images.csv").open(newline="") as stream:
        names = {line["slice"] for line in csv.DictReader(stream)}
    assert names in ({"B/0.dcm", "B/1.dcm"}, {"A/0.dcm", "A/1.dcm"}, {"C/0.dcm", "C/1.dcm"})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ("empty", "is empty"),
        ("text", "no usable slice"),
        ("air", "nothing but air"),
        ("one patient", "too few for train, val and test"),
    ],
)
def test_training_on_a_bad_folder(tmp_path: Path, make: str, words: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    if make == "text":
        (root / "a.txt").write_text("hello")
    if make == "air":
        np.save(root / "a.npy", np.full((2, 32, 32), -1000.0))
    if make == "one patient":
        np.save(root / "a.npy", np.stack([slice_hu(0)] * 2))
    kind = "numpy" if make in ("air", "one patient") else "dicom"
    source = [f"data={kind}", f"data.root={root}", f"data.cache_dir={tmp_path / 'cache'}"]
    error = training(tmp_path / "run", *source).error
    assert words in error
    assert str(root) in error
    assert record(tmp_path / "run")["status"] == "failed"
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("geometry.source_to_axis=100", "geometry.source_to_axis=100.0 mm puts the source inside the image"),
        ("geometry.detector_pitch=1e5", "cannot see the object"),
        ("geometry.angle_span=360", "geometry.angle_span=360.0 is outside"),
        ("geometry.axis_to_detector=-700", "geometry.axis_to_detector=-700.0 puts the detector behind the source"),
        ("trainer.accelerator=cuda", "trainer.accelerator=cuda"),
    ],
)
def test_what_only_shows_when_a_run_is_built(tmp_path: Path, override: str, words: str) -> None:
    if "cuda" in override and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert words in training(tmp_path, override).error
    assert record(tmp_path)["status"] == "failed"


# Fine-tuning


def test_finetuning_starts_from_the_weights_of_a_run(trained: Path, tmp_path: Path) -> None:
    options = [f"finetune={trained}", "geometry.n_views=12", "noise=none", "test_after_training=false"]
    assert training(tmp_path, *options, "optimizer.lr=1e-12", "optimizer.weight_decay=0").code == 0
    start_from, ended = weights(trained, "best"), weights(tmp_path, "last")
    for name, value in start_from.items():
        torch.testing.assert_close(ended[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.image_size=16", "was trained at data.image_size=32, this run has 16"),
        ("model.n_iterations=3", "has another network: to build the same one, set model.n_iterations=2"),
        ("model.channels=4", "model.channels=8"),
    ],
)
def test_finetuning_refuses_another_network(trained: Path, tmp_path: Path, override: str, words: str) -> None:
    assert words in training(tmp_path, f"finetune={trained}", override).error


# Evaluation


def test_evaluation_as_trained_is_that_of_the_training(trained: Path, tmp_path: Path) -> None:
    outcome = run("evaluate", f"run={trained}", "accelerator=cpu", f"hydra.run.dir={tmp_path}")
    assert outcome.code == 0, outcome.stderr
    assert (tmp_path / "table.csv").read_text() == (trained / "evaluation" / "table.csv").read_text()
    assert record(tmp_path)["test"] == record(trained)["test"]
    assert outcome.stdout.splitlines()[-2:] == [
        f"picture: {tmp_path / 'picture.png'}", f"to look through: {tmp_path / 'page.html'}",
    ]  # fmt: skip
    markdown = (tmp_path / "table.md").read_text()
    assert "test split of phantoms, 8 views, noise field" in markdown
    assert "QN-Mixer over FBP: +" in markdown


def test_evaluation_with_other_noise_and_another_split(trained: Path, tmp_path: Path) -> None:
    base = ["evaluate", f"run={trained}", "accelerator=cpu"]
    assert run(*base, "noise=none", f"hydra.run.dir={tmp_path / 'none'}").code == 0
    assert run(*base, "split=val", "checkpoint=last", f"hydra.run.dir={tmp_path / 'val'}").code == 0
    assert record(tmp_path / "none")["test"]["FBP"] != record(trained)["test"]["FBP"]
    last = metrics(trained)["val/psnr"][-1]
    assert record(tmp_path / "val")["val"]["QN-Mixer"]["psnr"] == pytest.approx(last, abs=0.2)  # other noise


def test_evaluation_on_dicom_measures_every_slice(trained: Path, ct: Path, tmp_path: Path) -> None:
    source = ["data=dicom", f"data.root={ct}", f"data.cache_dir={tmp_path / 'cache'}", "data.num_workers=0"]
    with pytest.warns(UserWarning, match="skipped 2"):
        outcome = run("evaluate", f"run={trained}", *source, f"hydra.run.dir={tmp_path / 'out'}")
    assert outcome.code == 0, outcome.stderr
    with (tmp_path / "out" / "images.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert sorted({line["slice"] for line in lines}) == [f"{p}/{k}.dcm" for p in "ABC" for k in range(2)]
    for method in ("FBP", "QN-Mixer"):
        values = [float(line["psnr"]) for line in lines if line["method"] == method]
        assert record(tmp_path / "out")["test"][method]["psnr"] == pytest.approx(np.mean(values))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.image_size=64"], "the run was trained with data.image_size=32"),
        (["data.scaling=minmax"], "the run was trained with data.scaling=attenuation"),
        (["data.root=/nowhere"], "/nowhere does not exist"),
        (["split=val"], "no slices for val"),
        (["data.split=aapm"], "data.split=aapm finds nothing"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*skipped 2 of its files")
def test_evaluation_refuses(trained: Path, ct: Path, tmp_path: Path, overrides: list[str], words: str) -> None:
    source = ["data=dicom", f"data.root={ct}", f"data.cache_dir={tmp_path / 'cache'}", "data.num_workers=0"]
    outcome = run("evaluate", f"run={trained}", *source, *overrides, f"hydra.run.dir={tmp_path / 'out'}")
    assert words in outcome.error
    assert not list((tmp_path / "out").glob("*.csv"))


# Reconstruction


def hu_of(module: ReconstructionModule, y: torch.Tensor) -> np.ndarray[Any, Any]:
    """HU of the network's answer to one sinogram."""
    with torch.no_grad():
        x = module.network(y)[0, 0].numpy()
    return -1000 + (module.config.data.hu_max + 1000) * x


def reconstruction(run_folder: Path, source: Path, output: Path, *options: str) -> Outcome:
    return run("reconstruct", f"run={run_folder}", f"input={source}", f"output={output}", "accelerator=cpu", *options)


def test_dicom_folder_in_dicom_npy_and_png_out(noise_free: Path, ct: Path, tmp_path: Path) -> None:
    outcome = reconstruction(noise_free, ct, tmp_path)
    assert outcome.code == 0, outcome.stderr
    assert "reconstructions: 6, as" in outcome.stdout
    assert "skipped 2" in outcome.stderr
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {f"{p}/{k}.{end}" for p in "ABC" for k in range(2) for end in ("dcm", "npy", "png")}
    uids = set()
    for source_path in sorted(ct.rglob("[01].dcm")):
        source = pydicom.dcmread(source_path)
        path = tmp_path / source_path.relative_to(ct)
        result, hu = pydicom.dcmread(path), np.load(path.with_suffix(".npy"))
        stored = result.pixel_array * float(result.RescaleSlope) + float(result.RescaleIntercept)
        assert np.abs(stored - hu).max() <= 0.5
        assert hu.shape == (SIZE, SIZE)
        assert (result.PatientID, result.PatientName) == (source.PatientID, source.PatientName)
        assert result.ImageType[0] == "DERIVED"
        assert result.SOPInstanceUID != source.SOPInstanceUID
        assert result.SeriesInstanceUID != source.SeriesInstanceUID
        assert "8 simulated views" in result.SeriesDescription
        uids.add(result.SOPInstanceUID)
        with Image.open(path.with_suffix(".png")) as picture:
            assert picture.size == (SIZE, SIZE)
            expected = np.clip((hu + 160) / 400, 0, 1) * 255
            np.testing.assert_allclose(np.asarray(picture, float), expected, atol=0.51)
    assert len(uids) == 6


def test_hu_are_those_of_the_network_and_near_the_truth(noise_free: Path, tmp_path: Path) -> None:
    hu = slice_hu(3, SIZE)
    np.save(tmp_path / "a.npy", hu)
    assert reconstruction(noise_free, tmp_path / "a.npy", tmp_path / "out", "formats=[npy]").code == 0
    module = load_run(noise_free).eval()
    x = torch.from_numpy((np.clip(hu, -1000, 2000) + 1000) / 3000)[None, None].float()
    ours = np.load(tmp_path / "out" / "a.npy")
    np.testing.assert_allclose(ours, hu_of(module, module.projector(x)), atol=0.05)
    assert np.abs(ours - hu).mean() < 150
    assert np.corrcoef(ours.ravel(), hu.ravel())[0, 1] > 0.9


def test_a_tilde_is_the_home_folder(noise_free: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quoted, because Hydra refuses it otherwise, and shells replace it only at the start of a word."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    (home / "run").symlink_to(noise_free)
    np.save(home / "a.npy", slice_hu(3, SIZE))
    words = ["run='~/run'", "input='~/a.npy'", "output='~/out'", "formats=[npy]", "accelerator=cpu"]
    outcome = run("reconstruct", *words)
    assert outcome.code == 0, outcome.stderr
    assert [path.name for path in (home / "out").iterdir()] == ["a.npy"]
    assert "contains a.npy already" in run("reconstruct", *words).error
    assert not list(here.iterdir())
    outcome = training(tmp_path / "finetuned", "finetune='~/run'", "test_after_training=false")
    assert outcome.code == 0, outcome.stderr
    assert (
        "run=~nobody_has_this_name/run does not exist"
        in run("reconstruct", "run='~nobody_has_this_name/run'", *words[1:]).error
    )
    assert not list(here.iterdir())


def test_a_single_file_and_a_stack(noise_free: Path, ct: Path, tmp_path: Path) -> None:
    outcome = reconstruction(noise_free, ct / "B" / "1.dcm", tmp_path / "one", "formats=[dicom]")
    assert "reconstructions: 1, as dicom" in outcome.stdout
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["1.dcm"]
    np.save(tmp_path / "stack.npy", np.stack([slice_hu(k) for k in range(3)]))
    outcome = reconstruction(noise_free, tmp_path / "stack.npy", tmp_path / "stack", "formats=[npy,dicom]")
    assert "reconstructions: 3, as" in outcome.stdout
    names = [f"stack_{k}.{end}" for k in range(3) for end in ("dcm", "npy")]
    assert sorted(path.name for path in (tmp_path / "stack").iterdir()) == names
    found = [pydicom.dcmread(tmp_path / "stack" / f"stack_{k}.dcm") for k in range(3)]
    assert [int(dataset.InstanceNumber) for dataset in found] == [1, 2, 3]
    assert len({dataset.SeriesInstanceUID for dataset in found}) == 1


@dataclass
class Measured:
    """A scan of known slices in the network's units, and what it must become."""

    y: np.ndarray[Any, Any]  # [2, V, D], value × mm
    hu: list[np.ndarray[Any, Any]]
    per_value: float  # 1/mm


@pytest.fixture(scope="module")
def measured(noise_free: Path) -> Measured:
    module = load_run(noise_free).eval()
    hu = np.stack([slice_hu(k, SIZE) for k in range(2)])
    x = torch.from_numpy((np.clip(hu, -1000, 2000) + 1000) / 3000)[:, None].float()
    y = module.projector(x)
    return Measured(
        y[:, 0].numpy(),
        [hu_of(module, y[k : k + 1]) for k in range(2)],
        attenuation_per_value(0.0192, module.config.data.hu_max),
    )


@pytest.mark.parametrize("unit", ["attenuation", "value"])
@pytest.mark.parametrize("kind", ["auto", "sinograms"])
def test_sinograms_in_either_unit(noise_free: Path, measured: Measured, tmp_path: Path, unit: str, kind: str) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    y = measured.y * (measured.per_value if unit == "attenuation" else 1)
    np.save(folder / "pair.npy", y)
    np.save(folder / "single.npy", y[1].astype(np.float64))
    outcome = reconstruction(noise_free, folder, tmp_path / "out", f"unit={unit}", f"kind={kind}")
    assert outcome.code == 0, outcome.stderr
    for name, expected in (("pair_0", 0), ("pair_1", 1), ("single", 1)):
        hu = np.load(tmp_path / "out" / f"{name}.npy")
        np.testing.assert_allclose(hu, measured.hu[expected], atol=0.5)
        low, high = np.percentile(hu, (1, 99)).round()
        for of in (name, f"{name}_fbp"):
            with Image.open(tmp_path / "out" / f"{of}.png") as picture:
                assert picture.info["Description"] == f"{low:g} HU is black, {high:g} HU is white"
        fbp = load_run(noise_free).projector.fbp(torch.from_numpy(measured.y[expected])[None, None].float())[0, 0]
        np.testing.assert_allclose(np.load(tmp_path / "out" / f"{name}_fbp.npy"), 3000 * fbp - 1000, atol=0.5)
        beside = pydicom.dcmread(tmp_path / "out" / f"{name}_fbp.dcm")
        assert beside.SeriesDescription.startswith("FBP, 8 measured views")
        dataset = pydicom.dcmread(tmp_path / "out" / f"{name}.dcm")
        assert np.abs(dataset.pixel_array * dataset.RescaleSlope + dataset.RescaleIntercept - hu).max() <= 0.5
        assert "8 measured views" in dataset.SeriesDescription
        assert dataset.SeriesInstanceUID != beside.SeriesInstanceUID
        assert [float(s) for s in dataset.PixelSpacing] == [12.5, 12.5]


def test_water_attenuation_sets_the_hu(noise_free: Path, measured: Measured, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", measured.y[0] * measured.per_value * 1.25)
    options = ["water_attenuation=0.024", "formats=[npy]"]
    assert reconstruction(noise_free, tmp_path / "a.npy", tmp_path / "out", *options).code == 0
    np.testing.assert_allclose(np.load(tmp_path / "out" / "a.npy"), measured.hu[0], atol=0.5)


BAD_SCANS: dict[str, tuple[str, str]] = {
    "counts": ("attenuation", "no −log of transmission"),
    "transmission": ("attenuation", "unit=attenuation"),
    "value as attenuation": ("attenuation", "unit=value"),
    "attenuation as value": ("value", "unit=attenuation"),
    "per cm": ("attenuation", "no −log of transmission"),
    "negated": ("value", "no −log of transmission"),
    "nan": ("attenuation", "NaN or infinite"),
    "dead bin": ("attenuation", "NaN or infinite"),
    "empty scan": ("attenuation", "unit=attenuation"),
    "turned": ("attenuation", "[8, 48]"),
    "too few views": ("attenuation", "geometry.n_views"),
    "text": ("attenuation", "scan.npy"),
    "words": ("attenuation", "scan.npy"),
}


@pytest.mark.parametrize("fault", BAD_SCANS)
def test_sinograms_of_the_wrong_shape_or_unit(noise_free: Path, measured: Measured, tmp_path: Path, fault: str) -> None:
    p = measured.y[0] * measured.per_value
    broken = p.copy()
    broken[2, 3] = np.nan if fault == "nan" else np.inf
    scans = {
        "counts": 1e5 * np.exp(-p), "transmission": np.exp(-p), "value as attenuation": measured.y[0],
        "attenuation as value": p, "per cm": p * 10, "negated": -measured.y[0], "nan": broken, "dead bin": broken,
        "empty scan": np.zeros_like(p), "turned": p.T, "too few views": p[:5], "words": np.array(["a", "b"]),
    }  # fmt: skip
    path = tmp_path / "scan.npy"
    if fault == "text":
        path.write_text("hello")
    else:
        np.save(path, scans[fault])
    unit, words = BAD_SCANS[fault]
    outcome = reconstruction(noise_free, path, tmp_path / "out", f"unit={unit}", "kind=sinograms")
    assert words in outcome.error
    assert "scan.npy" in outcome.error
    assert not list((tmp_path / "out").rglob("*.*"))


def test_a_sinogram_needs_a_scale(minmax: Path, tmp_path: Path, measured: Measured) -> None:
    np.save(tmp_path / "a.npy", measured.y[0])
    error = reconstruction(minmax, tmp_path / "a.npy", tmp_path / "out", "kind=sinograms").error
    assert "data.scaling=minmax" in error


@pytest.mark.parametrize(
    ("content", "words"),
    [("missing", "does not exist"), ("empty", "empty"), ("text", "no usable slice"), ("nan", "NaN or infinite")],
)
def test_inputs_of_no_use(noise_free: Path, tmp_path: Path, content: str, words: str) -> None:
    source = tmp_path / "in"
    if content != "missing":
        source.mkdir()
    if content == "text":
        (source / "a.txt").write_text("hello")
    if content == "nan":
        np.save(source / "a.npy", np.full((32, 32), np.nan))
    error = reconstruction(noise_free, source, tmp_path / "out").error
    assert words in error
    assert str(source) in error
    assert not list((tmp_path / "out").rglob("*.*"))


# Checkpoints that are none


@pytest.fixture(params=["missing", "empty", "other program", "code", "truncated", "text"])
def bad_run(request: pytest.FixtureRequest, noise_free: Path, tmp_path: Path) -> tuple[Path, str]:
    """A run folder without a checkpoint of ours, and what must be said of it."""
    folder = tmp_path / "bad"
    path = folder / "checkpoints" / "best.ckpt"
    if request.param != "missing":
        path.parent.mkdir(parents=True)
    if request.param == "other program":
        torch.save({"state_dict": {"a": torch.zeros(1)}, "hyper_parameters": {}}, path)
    elif request.param == "code":
        torch.save(Outcome(0, "", ""), path)
    elif request.param == "truncated":
        data = (noise_free / "checkpoints" / "best.ckpt").read_bytes()
        path.write_bytes(data[: len(data) // 2])
    elif request.param == "text":
        path.write_text("export A=1\npython -m train\n")
    words = {"missing": "give ", "empty": "has no checkpoints", "other program": "another program",
             "code": "weights_only", "truncated": "damaged", "text": "no checkpoint"}  # fmt: skip
    return folder, words[request.param]


def test_no_command_takes_a_checkpoint_that_is_none(bad_run: tuple[Path, str], ct: Path, tmp_path: Path) -> None:
    folder, words = bad_run
    out = tmp_path / "out"
    for outcome in (
        run("evaluate", f"run={folder}", f"hydra.run.dir={out / 'evaluate'}"),
        reconstruction(folder, ct, out / "reconstruct"),
        training(out / "train", f"finetune={folder}"),
    ):
        assert words in outcome.error
        assert str(folder) in outcome.error
    assert not list(out.rglob("*.ckpt"))
    assert not list(out.rglob("*.dcm"))


# A full disk


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """/dev/full answers every writing as a full disk does."""
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").symlink_to("/dev/full")
    assert training(tmp_path).error.startswith("the disk is full")


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize("kilobytes", [40, pytest.param(150, marks=pytest.mark.long)])
def test_a_really_full_disk_leaves_nothing_half_written(tmp_path: Path, kilobytes: int) -> None:
    """A run folder on a file system that is too small for the first checkpoint, or for the second."""
    mount, copy = tmp_path / "small", tmp_path / "copy"
    mount.mkdir()
    in_namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mounting = f"mount -t tmpfs -o size={kilobytes}k tmpfs {mount}"
    if subprocess.run([*in_namespace, mounting], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    training_there = f'{sys.executable} -m qnmixer.train "$@"; code=$?; cp -r {mount} {copy}; exit $code'
    command = f"{mounting} && cd {mount} && {{ {training_there}; }}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [*TINY, *PHANTOMS, f"hydra.run.dir={mount}/run"]
    result = subprocess.run(
        [*in_namespace, command, "train", *arguments], capture_output=True, text=True, env=environment, timeout=120
    )
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: the disk is full")
    assert record(copy / "run")["status"] in ("failed", "running")  # whole, though it may be the older one
    for path in copy.rglob("*.ckpt"):
        torch.load(path, weights_only=True)
    for path in copy.rglob("*.png"):
        with Image.open(path) as picture:
            picture.load()
    assert not list(copy.rglob("*.tmp"))


def test_reconstruct_onto_a_place_that_is_no_folder(noise_free: Path, ct: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    error = reconstruction(noise_free, ct / "A" / "0.dcm", tmp_path / "out").error
    assert "out" in error


# Real CT


def test_real_ct(real_ct: Path, tmp_path: Path) -> None:
    source = ["data=dicom", f"data.root={real_ct / 'dicom'}", f"data.cache_dir={tmp_path / 'cache'}"]
    outcome = training(tmp_path / "run", *source, "data.num_workers=1")
    assert outcome.code == 0, outcome.stderr
    assert "train 20 slices of 1 patient, val 1 slices of 1 patient, test 1 slices of 1 patient" in outcome.text
    assert max(metrics(tmp_path / "run")["train/grad_norm"]) < 10

    evaluated = run(
        "evaluate", f"run={tmp_path / 'run'}", *source, "data.split=all", f"hydra.run.dir={tmp_path / 'evaluated'}"
    )
    assert evaluated.code == 0, evaluated.stderr
    results = record(tmp_path / "evaluated")["test"]
    assert results["QN-Mixer"]["psnr"] > results["FBP"]["psnr"]
    with (tmp_path / "evaluated" / "images.csv").open(newline="") as stream:
        assert len({line["slice"] for line in csv.DictReader(stream)}) == 22

    chosen = sorted((real_ct / "dicom" / "chest_ge").rglob("*"))[-1]
    assert reconstruction(tmp_path / "run", chosen, tmp_path / "out").code == 0
    (written,) = (tmp_path / "out").glob("*.dcm")
    original, result = pydicom.dcmread(chosen), pydicom.dcmread(written)
    assert result.PatientID == original.PatientID
    hu = result.pixel_array * float(result.RescaleSlope) + float(result.RescaleIntercept)
    assert np.abs(hu - np.load(written.with_suffix(".npy"))).max() <= 0.5
    truth = original.pixel_array * float(original.RescaleSlope) + float(original.RescaleIntercept)
    small = np.asarray(Image.fromarray(np.clip(truth, -1000, 2000).astype(np.float32)).resize((SIZE, SIZE)))
    assert np.corrcoef(hu.ravel(), small.ravel())[0, 1] > 0.9


def test_the_last_steps_are_scored_and_kept(tmp_path: Path) -> None:
    """7 steps, validated every 4: the last three are in last.ckpt, and validated too."""
    steps = ["trainer.max_steps=7", "trainer.val_every_n_steps=4", "test_after_training=false"]
    assert training(tmp_path / "run", *steps).code == 0
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 7
    assert len(metrics(tmp_path / "run")["val/psnr"]) == 2
    assert record(tmp_path / "run")["best"]["val/psnr"] == pytest.approx(max(metrics(tmp_path / "run")["val/psnr"]))


def test_the_largest_gradient_is_logged_whatever_the_interval(tmp_path: Path) -> None:
    every, some = tmp_path / "every", tmp_path / "some"
    steps = ["trainer.max_steps=6", "trainer.val_every_n_steps=6", "test_after_training=false"]
    assert training(every, *steps).code == 0
    assert training(some, *steps, "trainer.log_every_n_steps=3").code == 0
    largest = max(metrics(every)["train/grad_norm"])
    assert metrics(every)["train/grad_norm_max"][-1] == pytest.approx(largest)
    assert metrics(some)["train/grad_norm_max"][-1] == pytest.approx(largest)


def test_each_source_series_becomes_a_series_of_its_own(noise_free: Path, ct: Path, tmp_path: Path) -> None:
    assert reconstruction(noise_free, ct, tmp_path, "formats=[dicom]").code == 0
    made = [pydicom.dcmread(path) for path in tmp_path.rglob("*.dcm")]
    patients = {dataset.PatientID for dataset in made}
    assert len(patients) > 1
    for uid in {dataset.SeriesInstanceUID for dataset in made}:
        assert len({d.PatientID for d in made if d.SeriesInstanceUID == uid}) == 1
    assert len({dataset.SeriesInstanceUID for dataset in made}) == len(patients)


def test_slices_without_a_study_share_a_new_one(noise_free: Path, tmp_path: Path) -> None:
    for number in range(2):
        path = tmp_path / "in" / f"{number}.dcm"
        write_ct(path, number, "P")
        dataset = pydicom.dcmread(path)
        del dataset.StudyInstanceUID
        dataset.save_as(path)
    assert reconstruction(noise_free, tmp_path / "in", tmp_path / "out", "formats=[dicom]").code == 0
    made = [pydicom.dcmread(path) for path in (tmp_path / "out").rglob("*.dcm")]
    assert len(made) == 2
    assert len({dataset.StudyInstanceUID for dataset in made}) == len({d.SeriesInstanceUID for d in made}) == 1


@pytest.mark.parametrize("shape", [(BINS, VIEWS), (VIEWS + 2, BINS), (64, 64)])
def test_a_scan_of_another_shape_is_not_taken_for_a_slice(
    noise_free: Path, tmp_path: Path, shape: tuple[int, int]
) -> None:
    np.save(tmp_path / "scan.npy", np.linspace(0, 4, shape[0] * shape[1], dtype=np.float32).reshape(shape))
    outcome = reconstruction(noise_free, tmp_path / "scan.npy", tmp_path / "out")
    assert "has no air" in outcome.error
    assert f"[{VIEWS}, {BINS}]" in outcome.error
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_folder_without_sinograms(noise_free: Path, ct: Path, tmp_path: Path) -> None:
    assert "no .npy file" in reconstruction(noise_free, ct, tmp_path, "kind=sinograms").error


def test_a_bad_scan_among_good_ones_is_skipped(noise_free: Path, measured: Measured, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    np.save(folder / "b.npy", measured.y)
    np.save(folder / "a.npy", measured.y[:, :-1])
    outcome = reconstruction(noise_free, folder, tmp_path / "out", "kind=sinograms", "unit=value", "formats=[npy]")
    assert outcome.code == 0
    assert "skipped" in outcome.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "b_0.npy", "b_0_fbp.npy", "b_1.npy", "b_1_fbp.npy",
    ]  # fmt: skip


def test_the_folder_of_the_training_is_evaluated_on_its_test_split(ct: Path, tmp_path: Path) -> None:
    """Not on all of it: the network has seen the rest."""
    data = ["data=dicom", f"data.root={ct}", f"data.cache_dir={tmp_path}/cache"]
    assert training(tmp_path / "run", *data).code == 0
    again = run("evaluate", f"run={tmp_path}/run", *data, f"hydra.run.dir={tmp_path}/again")
    assert again.code == 0
    assert "test split of dicom" in again.text
    assert record(tmp_path / "again")["test"] == record(tmp_path / "run")["test"]
    everything = run("evaluate", f"run={tmp_path}/run", *data, "data.split=all", f"hydra.run.dir={tmp_path}/all")
    assert "all slices of dicom" in everything.text


def test_evaluation_refuses_a_noise_without_a_scale(minmax: Path, tmp_path: Path) -> None:
    outcome = run("evaluate", f"run={minmax}", "noise=physical", f"hydra.run.dir={tmp_path}/evaluation")
    assert "data.scaling=attenuation" in outcome.error


def test_missing_views_are_filled_in(noise_free: Path, measured: Measured, tmp_path: Path) -> None:
    module = load_run(noise_free)
    y = measured.y[0].copy()
    y[5] = np.nan
    np.save(tmp_path / "scan.npy", y)
    options = ["kind=sinograms", "unit=value", "formats=[npy]"]
    outcome = reconstruction(noise_free, tmp_path / "scan.npy", tmp_path / "out", *options)
    assert outcome.code == 0, outcome.stderr
    assert "1 of 8 views are missing" in outcome.stderr
    y[5] = (y[4] + y[6]) / 2
    for _ in range(3):
        hu = hu_of(module, torch.from_numpy(y)[None, None])
        with torch.no_grad():
            y[5] = module.projector(torch.from_numpy((hu + 1000) / 3000)[None, None])[0, 0, 5].numpy()
    np.testing.assert_allclose(np.load(tmp_path / "out" / "scan.npy"), hu, atol=1)
    y[1] = y[2] = y[5] = np.nan
    np.save(tmp_path / "scan.npy", y)
    assert "5 measured views" in reconstruction(noise_free, tmp_path / "scan.npy", tmp_path / "few", *options).error


def test_a_scan_by_another_detector_and_with_other_views(noise_free: Path, tmp_path: Path) -> None:
    module = load_run(noise_free)
    g = module.projector.geometry
    pitch = g.detector_pitch / 2
    other = replace(g, n_views=2 * VIEWS, n_detectors=2 * BINS, detector_pitch=pitch)
    x = torch.from_numpy((np.clip(slice_hu(0, SIZE), -1000, 2000) + 1000) / 3000)[None, None].float()
    np.save(tmp_path / "scan.npy", FanBeamProjector(other)(x)[0, 0].numpy())
    options = [f"detector_pitch={pitch}", f"angle_span={2 * math.pi}", "unit=value", "formats=[npy]"]
    outcome = reconstruction(noise_free, tmp_path / "scan.npy", tmp_path / "out", *options)
    assert outcome.code == 0, outcome.stderr
    hu = np.load(tmp_path / "out" / "scan.npy")
    expected = hu_of(module, module.projector(x))
    assert np.corrcoef(hu.ravel(), expected.ravel())[0, 1] > 0.97
    assert "angle_span=" in reconstruction(noise_free, tmp_path / "scan.npy", tmp_path / "no", *options[:1]).error


def test_matlab_scans(noise_free: Path, measured: Measured, tmp_path: Path) -> None:
    io, g = pytest.importorskip("scipy.io"), load_run(noise_free).projector.geometry
    parameters = {
        "angles": np.degrees(g.angles()) + 45, "pixelSizePost": g.detector_pitch,
        "distanceSourceOrigin": g.source_to_axis, "distanceSourceDetector": g.source_to_detector,
    }  # fmt: skip
    folder = tmp_path / "in"
    folder.mkdir()
    for k, p in enumerate(measured.y * measured.per_value):
        io.savemat(folder / f"{k}.mat", {"CtDataFull": {"sinogram": p, "parameters": parameters}})
    parameters["distanceSourceOrigin"] = 2 * g.source_to_axis
    io.savemat(folder / "2.mat", {"CtDataFull": {"sinogram": p, "parameters": parameters}})
    outcome = reconstruction(noise_free, folder / "0.mat", tmp_path / "one", "formats=[npy]")
    assert outcome.code == 0, outcome.stderr
    outcome = reconstruction(noise_free, folder, tmp_path / "out", "formats=[npy]", "kind=sinograms")
    assert "reconstructions: 2, as" in outcome.stdout
    assert "0.mat starts 45° from the run's first view" in outcome.stderr
    assert "skipped" in outcome.stderr
    for k, hu in enumerate(measured.hu):
        np.testing.assert_allclose(np.load(tmp_path / "out" / f"{k}.npy"), hu, atol=1)


def test_slices_are_simulated_as_in_the_training(tmp_path: Path) -> None:
    assert training(tmp_path / "run", "data.simulation_factor=2", "test_after_training=false").code == 0
    hu = slice_hu(3, 2 * SIZE)
    np.save(tmp_path / "a.npy", hu)
    assert reconstruction(tmp_path / "run", tmp_path / "a.npy", tmp_path / "out", "formats=[npy]").code == 0
    module = load_run(tmp_path / "run").eval()
    x = torch.from_numpy((np.clip(hu, -1000, 2000) + 1000) / 3000)[None, None].float()
    y = module.project(x[:, :, ::2, ::2], fine=x)
    np.testing.assert_allclose(np.load(tmp_path / "out" / "a.npy"), hu_of(module, y), atol=0.05)


# What is there already


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("source", "output", "words"),
    [
        (".", ".", "lies in input"),
        (".", "link", "lies in input"),
        (".", "out", "lies in input"),  # a second call would take the results for slices
        ("s.npy", ".", "contains s.npy already"),
        ("s.npy", "../other", "contains scan.png already"),
    ],
)
def test_reconstructions_never_take_the_place_of_files(
    noise_free: Path, tmp_path: Path, source: str, output: str, words: str
) -> None:
    folder, other = tmp_path / "in", tmp_path / "other"
    for path in (folder, other):
        path.mkdir()
    np.save(folder / "s.npy", slice_hu(0))
    (tmp_path / "link").symlink_to(folder)
    (other / "scan.png").write_text("mine")
    before = contents(tmp_path)
    place = tmp_path / "link" if output == "link" else folder / output
    assert words in reconstruction(noise_free, folder / source, place).error
    assert contents(tmp_path) == before


def test_scans_of_one_name_are_all_kept(noise_free: Path, measured: Measured, tmp_path: Path) -> None:
    for name in ("a/scan", "a/scan_3", "b/scan"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "in" / f"{name}.npy", measured.y[0])
    options = ["kind=sinograms", "unit=value", "formats=[npy]"]
    assert "reconstructions: 3, as" in reconstruction(noise_free, tmp_path / "in", tmp_path / "out", *options).stdout
    names = [f"{name}{end}.npy" for name in ("a/scan", "a/scan_3", "b/scan") for end in ("", "_fbp")]
    assert sorted(contents(tmp_path / "out")) == sorted(names)


def test_an_evaluation_takes_a_folder_of_its_own(trained: Path, tmp_path: Path) -> None:
    """Neither that of a run nor that of another evaluation, nor one that another process writes to."""
    command = ["evaluate", f"run={trained}", "accelerator=cpu"]
    before = contents(trained)
    assert "contains checkpoints already" in run(*command, f"hydra.run.dir={trained}").error
    assert contents(trained) == before
    assert run(*command, f"hydra.run.dir={tmp_path}/old").code == 0
    before = contents(tmp_path)
    assert "give a new folder" in run(*command, "noise=none", f"hydra.run.dir={tmp_path}/old").error
    assert contents(tmp_path) == before

    new = tmp_path / "new"
    hold = "import sys; from pathlib import Path; from qnmixer.tracking.run_folder import run_lock\n"
    hold += "with run_lock(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(new)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as another:
        assert another.stdout is not None
        another.stdout.readline()
        assert f"writes to {new}" in run(*command, f"hydra.run.dir={new}").error
        another.terminate()


# Who was trained on


@pytest.fixture
def ten(tmp_path: Path) -> tuple[Path, list[str], str]:
    """A folder of ten patients, the overrides that name it, and the patient whom a run of it tests."""
    root = tmp_path / "slices"
    root.mkdir()
    for number in range(10):
        np.save(root / f"P{number:02d}.npy", slice_hu(number))
    data = ["data=numpy", f"data.root={root}", f"data.cache_dir={tmp_path}/cache"]
    assert training(tmp_path / "run", *data).code == 0
    (name,) = measured_slices(tmp_path / "run" / "evaluation")
    return root, data, name


def measured_slices(folder: Path) -> list[str]:
    with (folder / "images.csv").open(newline="") as stream:
        return sorted({line["slice"] for line in csv.DictReader(stream)})


@pytest.mark.filterwarnings("ignore:.*were not there when the run began")
def test_no_patient_is_tested_who_was_trained_on(ten: tuple[Path, list[str], str], tmp_path: Path) -> None:
    root, _, name = ten
    others = sorted(path.name for path in root.iterdir() if path.name != name)
    for change in ("remove", "add", "rename and move"):
        if change == "remove":
            (root / others[0]).unlink()
        elif change == "add":
            for more in range(10, 20):
                np.save(root / f"P{more}.npy", slice_hu(more))
        else:  # as to the scratch folder of another job of a cluster
            (root / name).rename(root / "renamed.npy")
            root, name = root.rename(tmp_path / "moved"), "renamed.npy"
        words = [f"data.root={root}"] * (change == "rename and move")
        folder = f"hydra.run.dir='{tmp_path}/{change}'"
        outcome = run("evaluate", f"run={tmp_path}/run", "accelerator=cpu", folder, *words)
        assert outcome.code == 0, outcome.stderr
        assert measured_slices(tmp_path / change) == [name]
        assert "were trained on" not in outcome.text
    resumed = run("train", f"resume={tmp_path}/run", f"data.root={root}", f"trainer.max_steps={STEPS + 2}")
    assert resumed.code == 0, resumed.stderr
    assert measured_slices(tmp_path / "run" / "evaluation") == [name]


def test_slices_that_were_trained_on_give_a_warning(ten: tuple[Path, list[str], str], tmp_path: Path) -> None:
    """By their pixels: also in a copy of the folder, and in the one that it lies in."""
    root, data, _ = ten
    shutil.copytree(root, tmp_path / "copy" / "below")
    cache = f"data.cache_dir={tmp_path}/cache"
    for number, words in enumerate(
        [
            [*data, "data.split=all"],
            ["data=numpy", f"data.root={tmp_path}/copy", cache],
            ["data=numpy", f"data.root={tmp_path}", "data.include=slices/*", cache],
        ]
    ):
        folder = tmp_path / f"evaluated_{number}"
        outcome = run("evaluate", f"run={tmp_path}/run", *words, "data.num_workers=0", f"hydra.run.dir={folder}")
        assert outcome.code == 0, outcome.stderr
        assert "8 of the slices were used in training" in outcome.text
        assert "8 of the slices were used in training" in (folder / "table.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU here")
def test_no_command_silently_leaves_out_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, "7.0, 535.104.05")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    np.save(tmp_path / "slice.npy", np.zeros((16, 16), np.float32))
    for outcome in (
        training(tmp_path / "run", "trainer.accelerator=auto"),
        run("reconstruct", "run=pretrained", f"input={tmp_path / 'slice.npy'}", f"output={tmp_path / 'out'}"),
        run("evaluate", "run=pretrained", "data=phantoms", f"hydra.run.dir={tmp_path / 'evaluated'}"),
    ):
        assert "accelerator=auto, but torch " in outcome.error
        assert "make install TORCH=cu126, or pip install torch==" in outcome.error
    assert not [*tmp_path.rglob("*.ckpt"), *tmp_path.rglob("slice_*"), *tmp_path.rglob("table.md")]
