"""A folder of measured sinograms, without images, as a source for training."""

import shutil
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from qnmixer.commands.checkup.checks import check_run
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.errors import ConfigError, DataError, PluginError
from qnmixer.evaluation.evaluate import evaluate
from qnmixer.evaluation.evaluate_config import EvaluateConfig
from qnmixer.evaluation.evaluate_run import on_test
from qnmixer.fit import fit
from qnmixer.measurement.build import build_geometry, build_projector
from qnmixer.memory.plan import Planner
from qnmixer.module.build import build_module
from qnmixer.module.parts import build_optimizer
from qnmixer.parallel.devices import resolve_devices
from qnmixer.parallel.tracker import PeakTracker, make_state
from qnmixer.physics.noise import attenuation_per_value
from qnmixer.reconstruction.reconstruct_config import ReconstructConfig
from qnmixer.reconstruction.sinograms import measured_scans
from qnmixer.runs.records import read_results
from qnmixer.runs.run import Run
from qnmixer.settings.compose import compose
from qnmixer.settings.run import Config

from ..conftest import TINY, config_of, csv_rows, last_checkpoint

RESIDUAL = "monitor=val/residual"
N = 6


class Mine:
    """A class of somebody's own without images."""

    def __init__(self, part: str, geometry: Any) -> None:
        self.y = np.full((geometry.n_views, geometry.n_detectors), {"train": 1, "val": 2, "test": 3}[part], np.float32)

    def __len__(self) -> int:
        return 2

    def sinogram(self, index: int) -> Any:
        return self.y + index


def y_of(config: Config) -> Tensor:
    """Sinograms of discs of water, in value × mm, [N, V, D]."""
    axis = torch.linspace(-1, 1, config.data.image_size)
    radii = torch.linspace(0.5, 0.8, N)[:, None, None, None]
    discs = (axis**2 + axis[:, None] ** 2 < radii**2) * (1000 / (config.data.hu_max + 1000))
    return build_projector(config)(discs.float())[:, 0]


def config(root: Path, *overrides: str) -> Config:
    words = [word for word in TINY[:-1] if not word.startswith("data.n_")]
    return config_of(*words, "data=sinograms", f"data.root={root}", "data.num_workers=0", *overrides)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file for each of five scans, and a folder with two files of one patient."""
    (root := tmp_path / "scans").mkdir()
    y = y_of(config(root)) * attenuation_per_value(0.0192, 2000.0)
    for k in range(4):
        np.save(root / f"scan{k}.npy", y[k].numpy())
    (root / "p").mkdir()
    np.save(root / "p" / "a.npy", y[4:5].numpy())
    np.save(root / "p" / "b.npy", y[5].numpy())
    return root


def module_of(config: Config) -> SliceDataModule:
    return SliceDataModule(config.data, geometry=build_geometry(config))


def test_each_file_or_folder_is_a_patient_and_batches_have_no_image(root: Path) -> None:
    data = module_of(config(root, "data.batch_size=6"))
    data.setup()
    patients = [len({*part.patients}) for part in data.parts.values()]
    assert patients == [3, 1, 1]
    assert sum(len(part.source) for part in data.parts.values()) == N
    assert (data.measured, data.has_truth) == (True, False)
    batch = next(iter(data.train_dataloader()))
    assert {*batch} == {"sinogram", "hu_offset", "hu_scale", "weight", "name", "sample"}
    of_file = {f"scan{k}.npy": k for k in range(4)} | {"p/a.npy": 4, "p/b.npy": 5}
    y = y_of(config(root))
    for name, sinogram in zip(batch["name"], batch["sinogram"], strict=True):
        torch.testing.assert_close(sinogram[0], y[of_file[name]], rtol=1e-5, atol=1e-3)
    as_value = module_of(config(root, "data.unit=value")).dataset("val")[0]["sinogram"]
    other = module_of(config(root)).dataset("val")[0]["sinogram"]
    torch.testing.assert_close(as_value, other * attenuation_per_value(0.0192, 2000.0))


@pytest.mark.parametrize(("change", "line"), [
    (lambda y: y[:, ::2], r"skipped 1 of .*sinograms of \[\d+, \d+\], not \[\d+, \d+\], as geometry\.n_views and"),
    (lambda y: np.where(np.arange(y.shape[0])[:, None] == 1, np.nan, y), "1 of its \\d+ views are missing"),
    (lambda y: np.where(y == y.max(), np.nan, y), "NaN or infinite values in part of a view"),
    (lambda y: 1e5 * np.exp(-y), "line integrals to 1.736e"),
    (lambda y: np.exp(-y), "less attenuation in the middle of the detector than at both ends"),
], ids=["bins", "missing", "dead", "counts", "transmission"])  # fmt: skip
def test_sinograms_that_do_not_fit_the_scan_are_named(root: Path, change: Any, line: str) -> None:
    np.save(root / "scan1.npy", change(np.load(root / "scan1.npy")))
    data = module_of(config(root))
    with pytest.warns(UserWarning, match=line):
        data.setup()
    assert sum(len(part.source) for part in data.parts.values()) == N - 1


def test_sinograms_of_another_arc_are_refused_before_the_first_step(root: Path, tmp_path: Path) -> None:
    """Each file passes the checks of single values, and one product A x says it."""
    for path in root.rglob("*.npy"):
        np.save(path, np.roll(np.load(path), 7, axis=-1))
    with pytest.raises(DataError, match=r"fits no image"):
        fit(config(root, RESIDUAL, "module=split"), Run(tmp_path / "run"))
    assert read_results(tmp_path / "run")["status"] == "failed"
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_class_with_sinograms_alone_needs_no_load() -> None:
    run = config_of(*TINY[:-1], "data=custom", f"data._target_={__name__}.Mine", "data.num_workers=0")
    batch = next(iter(module_of(run).val_dataloader()))
    assert "image" not in batch
    assert batch["sinogram"][:, 0, 0, 0].tolist() == [2, 3]
    with pytest.raises(PluginError, match="load, or sinogram"):
        config_of(*TINY[:-1], "data=custom", "data._target_=collections.Counter").data.load()


@pytest.mark.parametrize(("key", "line"), [
    ("data.augment=true", "data.augment=True changes images"),
    ("data.pixel_size=header", "data.pixel_size=header is of images"),
    ("data.unit=hu", "data.unit=hu should be 'attenuation' or 'value'"),
    ("data.views=[4,8]", "were measured with one scan"),
])  # fmt: skip
def test_keys_of_images_are_refused(tmp_path: Path, key: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        config(tmp_path, key)


def test_a_run_without_truth_trains_resumes_and_is_evaluated(root: Path, tmp_path: Path) -> None:
    mine = "module._target_=tests.own.OfSinograms"
    with pytest.raises(ConfigError, match="no truth, which monitor=val/psnr needs: give monitor=val/residual"):
        fit(config(root, mine), Run(tmp_path / "psnr"))
    with pytest.raises(ConfigError, match="module=default needs the truth, which data=sinograms does not have"):
        fit(config(root, RESIDUAL), Run(tmp_path / "default"))
    words = [mine, RESIDUAL, "trainer.val_every_n_steps=2", "schedule=constant", "test_after_training=false"]
    run = tmp_path / "run"
    best = fit(config(root, *words, "callbacks=default", "test_after_training=true", "trainer.max_steps=4"), Run(run))
    values = [float(row["val/residual"]) for row in csv_rows(run / "metrics.csv") if row["val/residual"]]
    assert best == pytest.approx(min(values))
    assert {*read_results(run)["test"]["FBP"]} == {"residual"}
    assert (run / "evaluation" / "picture.png").is_file()
    half = tmp_path / "half"
    fit(config(root, *words, "trainer.max_steps=2"), Run(half))
    again = config(root, *words, "trainer.max_steps=4", f"resume={half}")
    fit(again, Run(half, resume=str(half)))
    weights, resumed_weights = (last_checkpoint(folder)["state_dict"] for folder in (run, half))
    for name, weight in weights.items():
        assert torch.equal(weight, resumed_weights[name]), name
    scoring = EvaluateConfig.parse(compose("evaluate", [f"run={run}", "accelerator=cpu", "trust=[tests.own]"]))
    with pytest.raises(ConfigError, match="data=sinograms has no truth to compare with"):
        on_test(scoring, str(run), [])
    module, data, _ = on_test(scoring, str(run), [], needs_truth=False)
    evaluation = evaluate(module, data, "test", scoring.evaluation, torch.device("cpu"))
    assert evaluation.means() == read_results(run)["test"]
    with pytest.raises(ConfigError, match="symmetries=4 turns views"):
        evaluate(module, data, "test", scoring.evaluation, torch.device("cpu"), 4)


def test_one_scan_alone_is_trained_on(root: Path, tmp_path: Path) -> None:
    """Without validation nothing is monitored, so neither another scan nor monitor=val/residual is needed."""
    (tmp_path / "y").mkdir()
    shutil.copy(next(root.glob("*.npy")), tmp_path / "y")
    words = ["module=equivariant", "data.split=train", "trainer.limit_val_batches=0", "trainer.max_steps=2"]
    run = tmp_path / "run"
    fit(config(tmp_path / "y", *words, "test_after_training=false"), Run(run))
    assert last_checkpoint(run)["global_step"] == 2
    with pytest.raises(DataError, match=r"no slices for test with data\.split=train"):
        fit(config(tmp_path / "y", *words, "test_after_training=true"), Run(tmp_path / "tested"))


@pytest.mark.parametrize(("unit", "of_one"), [("value", 1.0), ("attenuation", 0.09)])
def test_reconstruct_reads_sinograms_as_the_run_did(unit: str, of_one: float, tmp_path: Path) -> None:
    settings = config(tmp_path, f"data.unit={unit}", "data.water_attenuation=0.03", "module=split", RESIDUAL)
    y, file = y_of(settings)[0], tmp_path / "y.npy"
    np.save(file, y * of_one)  # x = 1 is at 2000 HU: three times the attenuation of water
    command = compose("reconstruct", ["run=x", f"input={file}", "output=z", "accelerator=cpu"])
    (scan,) = measured_scans(file, [file], build_module(settings), ReconstructConfig.parse(command))
    torch.testing.assert_close(scan.sinogram[0, 0], y)


class Loaders(LightningDataModule):
    """Loaders of somebody's own, whose batches have sinograms alone."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self.data = module_of(config(Path(root)))

    def pairs(self, part: str) -> DataLoader[Any]:
        data = self.data.dataset(part)
        return DataLoader([{"sinogram": data[k]["sinogram"]} for k in range(len(data))], batch_size=2)  # type: ignore[arg-type]  # a sequence

    train_dataloader = partialmethod(pairs, "train")
    val_dataloader = partialmethod(pairs, "val")
    test_dataloader = partialmethod(pairs, "test")


def test_own_loaders_of_sinograms_alone_train_and_are_evaluated(root: Path, tmp_path: Path) -> None:
    own = [*TINY[:-1], f"datamodule._target_={__name__}.Loaders", f"+datamodule.root={root}"]
    words = [*own, "trainer.max_steps=2", "trainer.val_every_n_steps=null", "test_after_training=true"]
    with pytest.raises(
        ConfigError, match=r"^datamodule._target_=\S+Loaders has no truth, which monitor=val/psnr needs"
    ):
        fit(config_of(*words, "module=split"), Run(tmp_path / "psnr"))
    with pytest.raises(ConfigError, match=r"needs the truth, which datamodule._target_=\S+Loaders does not have"):
        fit(config_of(*words, RESIDUAL), Run(tmp_path / "default"))
    fit(config_of(*words, RESIDUAL, "module=split"), Run(tmp_path / "run"))
    assert {*read_results(tmp_path / "run")["test"]["QN-Mixer"]} == {"residual"}


def test_plan_and_doctor_know_sinograms_alone(root: Path) -> None:
    """The plan has the peak of a real step, without images, of a module that does what both without truth do."""
    run = config(root, RESIDUAL, "module=equivariant", "module.parts=2", "noise=physical")
    checks = {check.name: check.status for check in check_run(resolve_devices(run))}
    assert {name for name, status in checks.items() if status == "PASS"} == {
        "training", "gradients", "sharding", "memory growth", "finite values"
    }  # fmt: skip
    real = build_module(run)
    make_state(optimizer := build_optimizer(run.optimizer, real.network))
    real.validation_step(next(iter(module_of(run).val_dataloader())), 0)  # type: ignore[arg-type]
    batch: Any = next(iter(module_of(run).train_dataloader()))
    tracker = PeakTracker()
    tracker.track(real, optimizer, *(value for value in batch.values() if isinstance(value, Tensor)))
    with tracker:
        loss = real.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        del loss
        torch.nn.utils.clip_grad_norm_(real.network.parameters(), 1.0)
        optimizer.step()
    assert Planner(run).estimate(run).peak == pytest.approx(tracker.peak_bytes, rel=0.01)
