"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

The three commands from end to end, on a network that learns in a second.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from qnmixer.module import ReconstructionModule
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.reconstruction.pretrained import digest_of_weights

from ..conftest import Outcome, csv_rows, environment, metrics, offline_runs
from ..nvidia import fake_nvidia_smi
from ..warm import Warm
from .commands import PHANTOMS, STEPS, TINY, record, run, slice_hu, training, weights

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("commands")]

UNTESTED = "test_after_training=false"
ONE_PICTURE = "evaluation.n_pictures=1"


def measured_slices(folder: Path) -> list[str]:
    """The slices that an evaluation has measured."""
    return sorted({line["slice"] for line in csv_rows(folder / "images.csv")})


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
    for path in trained.rglob("*.png"):
        with Image.open(path) as picture:
            assert min(picture.size) > 300


def test_results_describe_the_run(trained: Path) -> None:
    results = record(trained)
    assert results["status"] == "done"
    assert "noise=field" in results["overrides"]
    assert results["best"]["val/psnr"] == pytest.approx(max(metrics(trained)["val/psnr"]))
    assert results["test"]["QN-Mixer"]["psnr"] > results["test"]["FBP"]["psnr"]
    assert metrics(trained)["test/psnr"] == [pytest.approx(results["test"]["QN-Mixer"]["psnr"])]
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
    assert lines[-3:] == [
        f"run folder: {trained}",
        f"to look through: {trained / 'evaluation' / 'page.html'}",
        f"picture: {trained / 'evaluation' / 'picture.png'}",
    ]
    assert any(line.startswith("step 4/4 · val PSNR ") for line in lines)
    assert any("QN-Mixer over FBP" in line for line in lines)
    assert any("2 × accumulation 1 = 2 slices" in line for line in lines)


def test_a_nan_loss_ends_with_a_line_that_names_the_slices(tmp_path: Path) -> None:
    error = training(tmp_path, "logger=wandb", "optimizer.lr=1e9", "trainer.max_steps=20").error
    for words in ("the loss became nan at step", "train-phantom-", "lower optimizer.lr"):
        assert words in error
    results = record(tmp_path)
    assert results["status"] == "failed"
    assert results["error"].startswith("FloatingPointError: the loss became nan")
    (run,) = offline_runs(tmp_path)
    assert run.exit_code == 1


@pytest.mark.parametrize(("precision", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)])
def test_precision_is_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype
) -> None:
    dtypes = set()
    step = ReconstructionModule.training_step

    def watched_step(self: ReconstructionModule, *arguments: Any) -> torch.Tensor:
        dtypes.add(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
        return step(self, *arguments)

    monkeypatch.setattr(ReconstructionModule, "training_step", watched_step)
    assert training(tmp_path, f"trainer.precision={precision}", "noise=field", UNTESTED).code == 0
    assert dtypes == {dtype}
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint.get("MixedPrecision", {}).get("scale", 0) > 1 or precision == "bf16-mixed"
    assert all(value.dtype == torch.float32 for value in checkpoint["state_dict"].values())
    assert np.isfinite(metrics(tmp_path)["train/grad_norm"]).all()


@pytest.mark.parametrize("overrides", [
    ["trainer.max_steps=-1", "trainer.max_epochs=1", "trainer.val_every_n_steps=null", "noise=physical", "loss=l1"],
    *(pytest.param(overrides, marks=pytest.mark.long) for overrides in (
        ["monitor=val/loss", "schedule=constant", "optimizer=sgd", "data.scaling=minmax", "loss=ssim_mix"],
        ["model=qn_mixer_paper", "model.n_iterations=2", "model.channels=8", "schedule=step", "optimizer=adafactor"],
        ["geometry.n_views=7", "geometry.angle_span=4.0", "geometry.fbp_filter=hann", "model.data_term=adjoint"],
    )),
], ids=lambda overrides: overrides[0])  # fmt: skip
def test_other_ways_to_train(tmp_path: Path, overrides: list[str]) -> None:
    assert training(tmp_path, *overrides).code == 0
    results = record(tmp_path)
    assert results["status"] == "done"
    assert np.isfinite(list(results["test"]["QN-Mixer"].values())).all()
    assert weights(tmp_path, "best")
    assert 0 < max(metrics(tmp_path)["train/grad_norm"]) < 100


def test_accumulation_makes_fewer_steps_of_more_slices_and_the_last_are_scored(tmp_path: Path) -> None:
    """7 steps, validated every 4: the last three are in last.ckpt, and validated too."""
    steps = ["trainer.max_steps=7", "trainer.val_every_n_steps=4", UNTESTED]
    outcome = training(tmp_path, "trainer.accumulate_grad_batches=2", *steps)
    assert "2 × accumulation 2 = 4 slices" in outcome.text
    values = metrics(tmp_path)
    assert (len(values["train/grad_norm"]), len(values["val/psnr"])) == (7, 2)
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 7
    assert record(tmp_path)["best"]["val/psnr"] == pytest.approx(max(values["val/psnr"]))


def test_the_largest_gradient_is_logged_whatever_the_interval(tmp_path: Path) -> None:
    full_log, sparse_log = tmp_path / "every", tmp_path / "some"
    steps = ["trainer.max_steps=6", "trainer.val_every_n_steps=6", UNTESTED]
    assert training(full_log, *steps).code == 0
    assert training(sparse_log, *steps, "trainer.log_every_n_steps=3").code == 0
    largest_norm = max(metrics(full_log)["train/grad_norm"])
    assert metrics(full_log)["train/grad_norm_max"][-1] == pytest.approx(largest_norm)
    assert metrics(sparse_log)["train/grad_norm_max"][-1] == pytest.approx(largest_norm)


@pytest.mark.parametrize(("content", "words"), [
    ("empty", "is empty"), ("air", "nothing but air"), ("one patient", "too few for train, val and test"),
])  # fmt: skip
def test_training_on_a_bad_folder(tmp_path: Path, content: str, words: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    if content != "empty":
        hu = np.full((32, 32), -1000.0) if content == "air" else slice_hu(0)
        np.save(root / "a.npy", np.stack([hu] * 2))
    source = ["data=numpy", f"data.root={root}", f"data.cache_dir={tmp_path / 'cache'}"]
    error = training(tmp_path / "run", *source).error
    assert words in error
    assert str(root) in error
    assert record(tmp_path / "run")["status"] == "failed"
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(("overrides", "words"), [
    ("geometry.source_to_axis=100", "geometry.source_to_axis=100.0 mm puts the source inside the image"),
    ("geometry.angle_span=360", "geometry.angle_span=360.0 is outside"),
    ("trainer.accelerator=cuda", "trainer.accelerator=cuda"),
    ("finetune={} data.image_size=16", "was trained at data.image_size=32, this run has 16"),
    ("finetune={} model.n_iterations=3", "has another network: to build the same one, set model.n_iterations=2"),
])  # fmt: skip
def test_what_only_shows_when_a_run_is_built(trained: Path, tmp_path: Path, overrides: str, words: str) -> None:
    if "cuda" in overrides and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert words in training(tmp_path, *overrides.format(trained).split()).error
    assert record(tmp_path)["status"] == "failed"


def test_a_relative_folder_is_where_the_command_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root").mkdir()
    for number in range(4):
        np.save(tmp_path / "root" / f"{number}.npy", slice_hu(number))
    words = ["data=numpy", "data.root=root", "data.cache_dir=cache", "hydra.job.chdir=true", UNTESTED]
    assert training(tmp_path / "run", *words).code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"root", "cache", "run"}


# Fine-tuning


def test_finetuning_starts_from_the_weights_of_a_run(trained: Path, tmp_path: Path) -> None:
    options = [f"finetune={trained}", "geometry.n_views=12", "noise=none", UNTESTED]
    assert training(tmp_path, *options, "optimizer.lr=1e-12", "optimizer.weight_decay=0").code == 0
    initial_weights, final_weights = weights(trained, "best"), weights(tmp_path, "last")
    factors = {
        float(final_weights[name][0] / value[0]) for name, value in initial_weights.items() if "step_sizes" in name
    }
    assert max(factors) == pytest.approx(min(factors), rel=1e-6)  # those along the data term follow the scan
    assert max(factors) > 1  # of more views
    for name, value in initial_weights.items():
        expected = value * max(factors) if "step_sizes" in name else value
        torch.testing.assert_close(final_weights[name], expected, rtol=0, atol=1e-6)


# Evaluation


def test_evaluation_as_trained_is_that_of_the_training(trained: Path, tmp_path: Path) -> None:
    outcome = run("evaluate", f"run={trained}", "accelerator=cpu", f"hydra.run.dir={tmp_path}")
    assert outcome.code == 0, outcome.stderr
    assert (tmp_path / "table.csv").read_text() == (trained / "evaluation" / "table.csv").read_text()
    assert record(tmp_path)["test"] == record(trained)["test"]
    assert outcome.stdout.splitlines()[-2:] == [
        f"picture: {tmp_path / 'picture.png'}", f"to look through: {tmp_path / 'page.html'}",
    ]  # fmt: skip
    assert not {"wandb", "metrics.csv"} & {path.name for path in tmp_path.iterdir()}  # without a logger
    markdown = (tmp_path / "table.md").read_text()
    assert "test split of phantoms, 8 views, noise field" in markdown
    assert "QN-Mixer over FBP: +" in markdown


def test_evaluation_of_a_few_slices(trained: Path, tmp_path: Path) -> None:
    assert run("evaluate", f"run={trained}", "accelerator=cpu", "n_slices=1", f"hydra.run.dir={tmp_path}").code == 0
    first = csv_rows(trained / "evaluation" / "images.csv")[0]
    assert csv_rows(tmp_path / "images.csv")[0] == first
    assert {row["slice"] for row in csv_rows(tmp_path / "images.csv")} == {first["slice"]}


def test_evaluation_with_other_noise_and_another_split(trained: Path, tmp_path: Path) -> None:
    base = ["evaluate", f"run={trained}", "accelerator=cpu", ONE_PICTURE]
    assert run(*base, "noise=none", f"hydra.run.dir={tmp_path / 'none'}").code == 0
    assert run(*base, "split=val", "checkpoint=last", f"hydra.run.dir={tmp_path / 'val'}").code == 0
    assert record(tmp_path / "none")["test"]["FBP"] != record(trained)["test"]["FBP"]
    last_psnr = metrics(trained)["val/psnr"][-1]
    assert record(tmp_path / "val")["val"]["QN-Mixer"]["psnr"] == pytest.approx(last_psnr, abs=0.2)  # other noise


@pytest.mark.filterwarnings("ignore:.*skipped 2 of its files")
def test_a_network_of_a_dicom_folder_is_evaluated_on_the_patients_of_its_test(ct: Path, tmp_path: Path) -> None:
    """Not on all of them: the network has seen the rest."""
    data = ["data=dicom", f"data.root={ct}", f"data.cache_dir={tmp_path}/cache"]
    outcome = training(tmp_path / "run", *data)
    assert "train 2 slices of 1 patient, val 2 slices of 1 patient, test 2 slices of 1 patient" in outcome.text
    tested_slices = measured_slices(tmp_path / "run" / "evaluation")
    assert tested_slices in ([f"{patient}/{k}.dcm" for k in range(2)] for patient in "ABC")
    evaluation = run("evaluate", f"run={tmp_path}/run", *data, ONE_PICTURE, f"hydra.run.dir={tmp_path}/again")
    assert "test split of dicom" in evaluation.text
    assert record(tmp_path / "again")["test"] == record(tmp_path / "run")["test"]


@pytest.mark.filterwarnings("ignore:.*skipped 2 of its files")
def test_evaluation_on_another_folder_measures_every_slice(trained: Path, ct: Path, tmp_path: Path) -> None:
    source = ["data=dicom", f"data.root={ct}", f"data.cache_dir={tmp_path / 'cache'}", "data.num_workers=0"]
    outcome = run("evaluate", f"run={trained}", *source, ONE_PICTURE, f"hydra.run.dir={tmp_path / 'out'}")
    assert "all slices of dicom" in outcome.text
    assert measured_slices(tmp_path / "out") == [f"{p}/{k}.dcm" for p in "ABC" for k in range(2)]
    lines = csv_rows(tmp_path / "out" / "images.csv")
    for method in ("FBP", "QN-Mixer"):
        values = [float(line["psnr"]) for line in lines if line["method"] == method]
        assert record(tmp_path / "out")["test"][method]["psnr"] == pytest.approx(np.mean(values))


@pytest.mark.parametrize(("overrides", "words"), [
    (["data.image_size=64"], "the run was trained with data.image_size=32"),
    (["data.root=/nowhere"], "/nowhere does not exist"),
    (["split=val"], "no slices for val"),
    (["data.split=explicit"], "data.split=explicit finds nothing"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*skipped 2 of its files")
def test_evaluation_refuses(trained: Path, ct: Path, tmp_path: Path, overrides: list[str], words: str) -> None:
    source = ["data=dicom", f"data.root={ct}", f"data.cache_dir={tmp_path / 'cache'}", "data.num_workers=0"]
    outcome = run("evaluate", f"run={trained}", *source, *overrides, f"hydra.run.dir={tmp_path / 'out'}")
    assert words in outcome.error
    assert not list((tmp_path / "out").glob("*.csv"))


def test_evaluation_refuses_a_noise_without_a_scale(minmax: Path, tmp_path: Path) -> None:
    outcome = run("evaluate", f"run={minmax}", "noise=physical", f"hydra.run.dir={tmp_path}/evaluation")
    assert "data.scaling=attenuation" in outcome.error


# Who was trained on


@pytest.fixture(scope="module")
def ten(place: Path) -> Path:
    """A folder with `slices` of ten patients, a copy of them, and a `run` on them."""
    folder = place / "ten"
    (folder / "slices").mkdir(parents=True)
    for number in range(10):
        np.save(folder / "slices" / f"P{number:02d}.npy", slice_hu(number))
    shutil.copytree(folder / "slices", folder / "copy" / "below")
    data = ["data=numpy", f"data.root={folder}/slices", f"data.cache_dir={folder}/cache"]
    assert training(folder / "run", *data).code == 0
    return folder


def test_slices_that_were_trained_on_give_a_warning(ten: Path, tmp_path: Path) -> None:
    """By their pixels: also in a copy of the folder, and in the one that it lies in."""
    whole, around = [f"data.root={ten}/copy/below", "data.split=all"], [f"data.root={ten}", "data.include=copy/*"]
    for number, words in enumerate([whole, [f"data.root={ten}/copy"], around]):
        folder = tmp_path / str(number)
        source = ["data=numpy", f"data.cache_dir={tmp_path}/cache", "data.num_workers=0", ONE_PICTURE]
        outcome = run("evaluate", f"run={ten}/run", *source, *words, f"hydra.run.dir={folder}")
        assert "8 of the slices were used in training" in outcome.text
        assert "8 of the slices were used in training" in (folder / "table.md").read_text()


@pytest.mark.filterwarnings("ignore:.*were not there when the run began")
def test_no_patient_is_tested_who_was_trained_on(ten: Path, tmp_path: Path) -> None:
    root = ten / "slices"
    (name,) = measured_slices(ten / "run" / "evaluation")
    others = sorted(path.name for path in root.iterdir() if path.name != name)
    for change in ("remove", "add", "rename and move"):
        if change == "remove":
            (root / others[0]).unlink()
        elif change == "add":
            for number in range(10, 20):
                np.save(root / f"P{number}.npy", slice_hu(number))
        else:  # as to the scratch folder of another job of a cluster
            (root / name).rename(root / "renamed.npy")
            root, name = root.rename(tmp_path / "moved"), "renamed.npy"
        words = [f"data.root={root}"] * (change == "rename and move")
        folder = f"hydra.run.dir='{tmp_path}/{change}'"
        outcome = run("evaluate", f"run={ten}/run", "accelerator=cpu", ONE_PICTURE, folder, *words)
        assert outcome.code == 0, outcome.stderr
        assert measured_slices(tmp_path / change) == [name]
        assert "were trained on" not in outcome.text
    outcome = run("train", f"resume={ten}/run", f"data.root={root}", f"trainer.max_steps={STEPS + 2}")
    assert outcome.code == 0, outcome.stderr
    assert measured_slices(ten / "run" / "evaluation") == [name]


# The machine


ON_SMALL_DISK = """
import ctypes, os, runpy, shutil, sys
libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
size, disk, copy, *words = sys.argv[1:]
if libc.unshare(0x10000000 | 0x20000):  # users and mounts of its own
    sys.exit(99)
for name, text in (("uid_map", f"0 {user} 1"), ("setgroups", "deny"), ("gid_map", f"0 {group} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
if libc.mount(b"tmpfs", disk.encode(), b"tmpfs", 0, f"size={size}k".encode()):
    sys.exit(99)
os.chdir(disk)
sys.argv = ["qnmixer.train", *words]
try:
    runpy.run_module("qnmixer.train", run_name="__main__", alter_sys=True)
finally:
    shutil.copytree(disk, copy)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs unshare")
@pytest.mark.parametrize("kilobytes", [40, pytest.param(150, marks=pytest.mark.long)])
def test_a_really_full_disk_leaves_nothing_half_written(tmp_path: Path, warm: Warm, kilobytes: int) -> None:
    """A run folder on a file system that is too small for the first checkpoint, or for the second."""
    disk, copy = tmp_path / "small", tmp_path / "copy"
    disk.mkdir()
    words = [str(kilobytes), str(disk), str(copy), *TINY, *PHANTOMS, f"hydra.run.dir={disk}/run"]
    process = warm.run("-c", ON_SMALL_DISK, *words, cwd=tmp_path, env=environment())
    if process.returncode == 99:
        pytest.skip("no file system can be mounted here")
    assert Outcome(process.returncode, process.stdout, process.stderr).error.startswith("the disk is full")
    assert record(copy / "run")["status"] in ("failed", "running")  # whole, though it may be the older one
    for path in copy.rglob("*.ckpt"):
        torch.load(path, weights_only=True)
    for path in copy.rglob("*.png"):
        with Image.open(path) as picture:
            picture.load()
    assert not list(copy.rglob("*.tmp"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU here")
def test_no_command_skips_a_gpu_silently(noise_free: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, "7.0, 535.104.05")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    np.save(tmp_path / "slice.npy", np.zeros((16, 16), np.float32))
    for outcome in (
        training(tmp_path / "run", "trainer.accelerator=auto"),
        run("reconstruct", f"run={noise_free}", f"input={tmp_path / 'slice.npy'}", f"output={tmp_path / 'out'}"),
        run("evaluate", f"run={noise_free}", "data=phantoms", f"hydra.run.dir={tmp_path / 'evaluated'}"),
    ):
        assert "accelerator=auto, but torch " in outcome.error
        assert "make install TORCH=cu126, or pip install torch==" in outcome.error
    assert not [*tmp_path.rglob("*.ckpt"), *tmp_path.rglob("slice_*"), *tmp_path.rglob("table.md")]
