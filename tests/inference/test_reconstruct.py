"""Batches, memory and precision of a reconstruction. Its inputs and outputs: tests/promises/test_dicom_and_noise.py."""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydicom import dcmread

from qnmixer.engine.batch import to_hu
from qnmixer.engine.build import build_module
from qnmixer.engine.config.commands import ReconstructConfig, parse_reconstruct
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import parse, to_plain
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.phantoms import phantom
from qnmixer.engine.inference.reconstruct import images_of, reconstruct_input
from qnmixer.engine.inference.scan import Scan, input_files
from qnmixer.engine.inference.sinograms import measured_scans, sinogram_files
from qnmixer.engine.inference.slices import read_slices, simulated_scans
from qnmixer.errors import DataError, OutOfMemory
from qnmixer.module import ReconstructionModule
from qnmixer.physics.projector import system_matrix
from qnmixer.weights import CHECKPOINT_KEY

from ..conftest import TINY
from ..sets import write_lodopab

Build = Callable[..., ReconstructionModule]


def settings(**values: object) -> ReconstructConfig:
    given = {"run": "x", "input": "y", "output": "z", "accelerator": "cpu"} | values
    return parse_reconstruct(compose("reconstruct", [f"{key}={value}" for key, value in given.items()]))


def save(module: ReconstructionModule, path: Path) -> Path:
    content = {"format": 1, "config": to_plain(module.config)}
    torch.save({"state_dict": module.state_dict(), CHECKPOINT_KEY: content}, path)
    return path


def trained(build: Build, strength: float, *overrides: str) -> ReconstructionModule:
    """A network whose regularisers do something: they start as zero."""
    module = build(*overrides).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in module.network.parameters():
        parameter.data += strength * torch.randn(parameter.shape, generator=generator)
    return module


def at_true_size(*overrides: str) -> ReconstructionModule:
    """FBP at the size that DICOM says."""
    words = [word for word in TINY if not word.startswith("model.")]
    words += ["model=fbp", "data=dicom", "data.root=x", "data.pixel_size=header"]
    return build_module(parse(compose("train", [*words, *overrides]))).eval()


def series(path: Path, count: int, size: int = 16) -> Path:
    np.save(path, np.stack([phantom(size, seed=0, part="test", index=k) for k in range(count)]))
    return path


def images(module: ReconstructionModule, path: Path, batch_size: int) -> list[Any]:
    scans = simulated_scans(path, input_files(path), module)
    return [scan.hu(x) for scan, x in images_of(module, scans, batch_size)]


def measured(path: Path, module: ReconstructionModule, config: ReconstructConfig) -> Iterator[Scan]:
    return measured_scans(path, sinogram_files(path), module, config)


@pytest.mark.parametrize("overrides", [[], ["data.scaling=minmax"], ["data.simulation_factor=2"]])
def test_batches_change_nothing(tiny_module: Build, tmp_path: Path, overrides: list[str]) -> None:
    """Neither the noise nor the scale of a slice depends on those beside it."""
    module, path = trained(tiny_module, 0.05, "noise=field", *overrides), series(tmp_path / "a.npy", 5)
    alone, together = images(module, path, 1), images(module, path, 3)
    assert len(alone) == 5
    assert not np.allclose(alone[0], alone[1], atol=50)
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a, b, atol=0.05)


def test_the_noise_of_a_slice_is_keyed_by_seed_and_number(tiny_module: Build, tmp_path: Path) -> None:
    """As that of the test split. Two slices with the same pixels have different noise."""
    hu = phantom(16, seed=0, part="test", index=0)
    np.save(tmp_path / "a.npy", np.stack([hu, hu]))
    module = tiny_module("noise=field", "seed=1", "data.seed=1")
    first, second = (scan.sinogram for scan in simulated_scans(tmp_path / "a.npy", [tmp_path / "a.npy"], module))
    image = torch.from_numpy((hu.clip(-1000, 2000) + 1000) / 3000)[None, None].float()
    batch: Any = {"image": image, "sample": torch.tensor([1])}
    assert torch.equal(second, module.measure(batch, "test"))
    assert not torch.equal(first, second)


def test_a_sinogram_of_a_public_set_is_reconstructed_as_it_is_evaluated(tmp_path: Path) -> None:
    """The network gets the values of its training, and the HU are those of the set."""
    pytest.importorskip("h5py")
    words = ["model=fbp", "data=lodopab", "geometry=lodopab", f"data.root={tmp_path}", "geometry.n_views=8"]
    config = parse(compose("train", [*words, "data.image_size=32", "data.num_workers=0", "logger=csv"]))
    module = build_module(config).eval()
    write_lodopab(tmp_path, module.projector.geometry, {"test": 1})
    (batch,) = SliceDataModule(config.data, geometry=module.projector.geometry).test_dataloader()
    y = batch["sinogram"]
    with torch.no_grad():
        expected = to_hu(batch, module.network(y))[0, 0].numpy()
    np.save(tmp_path / "a.npy", y[0, 0].numpy() * 0.08135858)
    (scan,) = measured(tmp_path / "a.npy", module, settings(water_attenuation=0.03))
    np.testing.assert_allclose(scan.sinogram, y, rtol=1e-5, atol=1e-4)
    ((_, x),) = images_of(module, iter([scan]), 1)
    np.testing.assert_allclose(scan.hu(x), expected, atol=0.05)


def test_a_disc_in_dicom_has_its_size_and_place_in_millimetres(
    make_ct: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Water of 120 mm, 20 mm to the right and 12 mm down, in a slice that is 180 mm wide."""
    spacing = 0.6
    fine = (np.arange(2400) + 0.5) * spacing / 8 - 150 * spacing
    inside = (fine[:, None] - 12) ** 2 + (fine - 20) ** 2 < 60**2
    hu = inside.reshape(300, 8, 300, 8).mean((1, 3)) * 1000 - 1000
    first = -149.5 * spacing
    make_ct(tmp_path / "in" / "a", hu.round(), PixelSpacing=[spacing] * 2, ImagePositionPatient=[first, first, 0])
    module = at_true_size(
        "data.image_size=128", "geometry.field_of_view=200", "geometry.n_views=120", "geometry.n_detectors=240",
        "geometry.detector_pitch=2",
    )  # fmt: skip
    run = save(module, tmp_path / "run.ckpt")
    reconstruct_input(settings(run=run, input=tmp_path / "in", output=tmp_path / "out", formats="[dicom]"))
    out = dcmread(tmp_path / "out" / "a.dcm")
    step = float(out.PixelSpacing[0])
    assert step == pytest.approx(200 / 128)
    share = (out.pixel_array + float(out.RescaleIntercept) + 1000) / 1000
    diameter = 2 * np.sqrt(share.sum() / np.pi) * step
    assert diameter == pytest.approx(120, rel=0.005)
    x, y = (float(out.ImagePositionPatient[k]) + np.arange(128) * step for k in (0, 1))
    centre = (share.sum(0) * x).sum() / share.sum(), (share.sum(1) * y).sum() / share.sum()
    assert centre == pytest.approx((20, 12), abs=0.1)
    assert "is cut" not in capsys.readouterr().err


def test_what_is_cut_or_has_no_size_is_said(make_ct: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = at_true_size("geometry.field_of_view=20", "geometry.detector_pitch=4", "data.simulation_factor=2")
    for k in range(2):
        make_ct(tmp_path / "in" / f"{k}.dcm")  # 32 mm wide
    series(tmp_path / "in" / "a.npy", 1)
    make_ct(tmp_path / "in" / "odd.dcm", PixelSpacing=None)
    assert len(images(module, tmp_path / "in", 2)) == 2
    skipped, cut = capsys.readouterr().err.splitlines()
    assert "(2 no pixel size in the file): a.npy, odd.dcm" in skipped
    assert "lies outside geometry.field_of_view=20 mm and is cut: train with" in cut


def test_a_network_of_nan_writes_nothing(tiny_module: Build, tmp_path: Path) -> None:
    module = tiny_module()
    next(module.network.parameters()).data.fill_(np.nan)
    words = {"run": save(module, tmp_path / "a.ckpt"), "input": series(tmp_path / "s.npy", 1)}
    with pytest.raises(DataError, match=r"the reconstruction of s\.npy has NaN"):
        reconstruct_input(settings(**words, output=tmp_path / "out", formats="[npy,png]"))
    assert not (tmp_path / "out").exists()


def test_a_batch_that_does_not_fit_is_one_line(
    tiny_module: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path = tiny_module(), series(tmp_path / "a.npy", 5)

    def full(y: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nat a place")

    monkeypatch.setattr(module.network, "forward", full)
    with pytest.raises(OutOfMemory, match=r"with 3 slices at once \(.*memory\): give a smaller batch_size="):
        images(module, path, 3)


def test_what_is_no_file_of_numbers_is_not_opened(tiny_module: Build, tmp_path: Path) -> None:
    """Pipes, which would never end, and arrays that would take gigabytes."""
    module, path = tiny_module(), tmp_path / "a.npy"
    os.mkfifo(path)
    for place in (tmp_path, path):
        with pytest.raises(DataError, match="is empty"):
            input_files(place)
    path.unlink()
    np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(40_000, 40_000))  # sparse
    start = time.perf_counter()
    with pytest.raises(DataError, match="40000 × 40000 values"):
        next(read_slices(path, [path]))
    with pytest.raises(DataError, match="40000 × 40000 values, not 1 to 8192"):
        next(measured(path, module, settings(angle_span=6, detector_pitch=1)))
    assert time.perf_counter() - start < 2


SCANNER = [
    "model=fbp", "data.image_size=64", "geometry.n_views=32", "geometry.n_detectors=192", "geometry.detector_pitch=5",
    "geometry.first_angle=0",
]  # fmt: skip
OF_ONE = 0.0576  # attenuation of x = 1 in 1/mm


def scan(module: ReconstructionModule, photons: float = 0, **changes: Any) -> np.ndarray:
    """A sinogram in attenuation, by a finer matrix of the scanner with changes.

    Its body is 240 mm wide and out of the middle: a round one in the middle would be the same for many scanners.
    """
    body = np.pad(phantom(80, seed=0, part="test", index=1), ((8, 40), (24, 24)), constant_values=-1000)
    x = torch.from_numpy((body + 1000) / 3000)
    geometry = replace(module.projector.geometry, image_size=128, pixel_size=400 / 128, **changes)
    p = OF_ONE * system_matrix(geometry)(x.float()[None, None])[0, 0].numpy().astype(np.float64)
    rng = np.random.default_rng(0)
    return -np.log(np.maximum(rng.poisson(photons * np.exp(-p)), 1) / photons) if photons else p


@pytest.fixture(scope="module")
def fbp_module() -> ReconstructionModule:
    words = [word for word in TINY if not word.startswith(("model.", "geometry.", "data.image_size"))]
    return build_module(parse(compose("train", [*words, *SCANNER]))).eval()


def check(module: ReconstructionModule, path: Path, y: np.ndarray, **keys: object) -> None:
    np.save(path, y.astype(np.float32))
    list(measured(path, module, settings(kind="sinograms", **keys)))


def test_a_right_scan_is_accepted_and_its_misfit_is_told(
    fbp_module: ReconstructionModule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1000 photons a ray are a hundredth of a low dose."""
    path = tmp_path / "a.npy"
    y = scan(fbp_module, 1e3, n_detectors=96, detector_pitch=10.0)
    check(fbp_module, path, y, detector_pitch=10)
    check(fbp_module, path, scan(fbp_module, n_views=48), angle_span=2 * np.pi)
    y = scan(fbp_module)
    np.save(path, y.astype(np.float32))
    words = {"run": save(fbp_module, tmp_path / "a.ckpt"), "input": path, "output": tmp_path / "out"}
    reconstruct_input(settings(**words, kind="sinograms", formats="[npy]"))
    said = capsys.readouterr()
    assert said.err == ""
    (told,) = re.findall(r"a: A x differs from the sinogram by ([\d.]+)%", said.out)
    x = torch.from_numpy((np.load(tmp_path / "out" / "a.npy") + 1000) / 3000)[None, None]
    left = fbp_module.projector(x)[0, 0].numpy() * OF_ONE - y
    assert told == f"{100 * np.sqrt((left**2).sum() / (y**2).sum()):.1f}"


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "a tenth": ({"detector_pitch": 0.5}, r"HU on average.*detector_pitch="),
    "a thousandth": ({"detector_pitch": 0.005}, "cannot see the object"),
    "degrees": ({"angle_span": 360}, "degrees must be converted"),
    "zeros": ({}, "only zeros"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_scan_of_another_geometry_is_refused(fbp_module: ReconstructionModule, tmp_path: Path, fault: str) -> None:
    keys, words = WRONG[fault]
    with pytest.raises(DataError, match=words):
        check(fbp_module, tmp_path / "a.npy", scan(fbp_module) * (fault != "zeros"), **keys)


def test_what_few_views_of_a_wrong_turn_explain_is_doubted(
    fbp_module: ReconstructionModule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "a.npy", scan(fbp_module, angle_span=4.1).astype(np.float32))
    words = {"run": save(fbp_module, tmp_path / "a.ckpt"), "input": tmp_path / "a.npy", "output": tmp_path / "out"}
    reconstruct_input(settings(**words, kind="sinograms", formats="[npy]"))
    assert re.search(r"by \d\d\.\d%: much noise, or other views or bins", capsys.readouterr().out)
