"""Batches, memory and precision of a reconstruction. Its inputs and outputs: tests/promises/test_dicom_and_noise.py."""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydicom import dcmread

from qnmixer.data.batch import to_hu
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.phantoms.phantoms import phantom
from qnmixer.errors import ConfigError, DataError, OutOfMemory
from qnmixer.module import ReconstructionModule
from qnmixer.module.build import build_module
from qnmixer.physics import images_by_symmetry
from qnmixer.physics import symmetries as symmetries_of_scan
from qnmixer.physics.projector import system_matrix
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.reconstruction.cures import Cures
from qnmixer.reconstruction.input_slices import simulated_scans, slice_files
from qnmixer.reconstruction.reconstruct import images_of, reconstruct_input
from qnmixer.reconstruction.reconstruct_config import ReconstructConfig
from qnmixer.reconstruction.reconstructor import on_scan
from qnmixer.reconstruction.scan import Scan
from qnmixer.reconstruction.sinograms import holds_sinograms, measured_scans, sinogram_files
from qnmixer.settings.compose import compose
from qnmixer.settings.run import section

from ..conftest import TINY, config_of, tiny_module
from ..data.conftest import make_ct
from ..saved import write_checkpoint
from ..sets import write_lodopab, write_two_detect


def settings(**values: object) -> ReconstructConfig:
    given = {"run": "x", "input": "y", "output": "z", "accelerator": "cpu"} | values
    return ReconstructConfig.parse(compose("reconstruct", [f"{key}={value}" for key, value in given.items()]))


def reconstruct_by(module: ReconstructionModule, path: Path, **keys: object) -> int:
    """The command on a file or folder, into the folder `out` beside it."""
    run = write_checkpoint(module, path.with_name("run.ckpt"))
    return reconstruct_input(settings(**{"run": run, "input": path, "output": path.with_name("out")} | keys))


def trained(strength: float, *overrides: str) -> ReconstructionModule:
    """A network whose regularisers do something: they start as zero."""
    module = tiny_module(*overrides).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in module.network.parameters():
        parameter.data += strength * torch.randn(parameter.shape, generator=generator)
    return module


def at_true_size(*overrides: str) -> ReconstructionModule:
    """FBP at the size that DICOM says."""
    words = [word for word in TINY if not word.startswith("model.")]
    words += ["model=fbp", "data=dicom", "data.root=x", "data.pixel_size=header"]
    return build_module(config_of(*words, *overrides)).eval()


def series(path: Path, count: int, size: int = 16) -> Path:
    np.save(path, np.stack([phantom(size, seed=0, part="test", index=k) for k in range(count)]))
    return path


def images(module: ReconstructionModule, path: Path, batch_size: int) -> list[Any]:
    scans = simulated_scans(path, slice_files(path), module)
    return [scan.hu(x) for scan, x, _ in images_of(module, scans, batch_size)]


def measured(path: Path, module: ReconstructionModule, config: ReconstructConfig) -> Iterator[Scan]:
    return measured_scans(path, sinogram_files(path), module, config)


@torch.no_grad()
def sinograms(module: ReconstructionModule, count: int = 1) -> np.ndarray:
    """Of phantoms, in value × mm, [count, V, D]."""
    hu = np.stack([phantom(16, seed=0, part="test", index=k) for k in range(count)])
    return module.projector(torch.from_numpy((hu.clip(-1000, 2000) + 1000) / 3000)[:, None].float())[:, 0].numpy()


@pytest.mark.parametrize("overrides", [[], ["data.scaling=minmax"], ["data.simulation_factor=2"]])
def test_batches_change_nothing(tmp_path: Path, overrides: list[str]) -> None:
    """Neither the noise nor the scale of a slice depends on those beside it."""
    module, path = trained(0.05, "noise=field", *overrides), series(tmp_path / "a.npy", 5)
    alone, together = images(module, path, 1), images(module, path, 3)
    assert len(alone) == 5
    assert not np.allclose(alone[0], alone[1], atol=50)
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a, b, atol=0.05)


def test_the_noise_of_a_slice_is_keyed_by_seed_and_number(tmp_path: Path) -> None:
    """As that of the test split. Two slices with the same pixels have different noise."""
    np.save(tmp_path / "a.npy", np.repeat(phantom(16, seed=0, part="test", index=0)[None], 2, axis=0))
    found = []
    for seed in (1, 1, 2):
        module = tiny_module("noise=field", f"seed={seed}", "data.seed=1")
        found.append([scan.sinogram for scan in simulated_scans(tmp_path / "a.npy", [tmp_path / "a.npy"], module)])
    (first, second), again, (other, _) = found
    batch: Any = {"image": torch.from_numpy((np.load(tmp_path / "a.npy")[1:].clip(-1000, 2000) + 1000) / 3000)[None]}
    batch |= {"image": batch["image"].float(), "sample": torch.tensor([1])}
    assert torch.equal(second, tiny_module("noise=field", "seed=1", "data.seed=1").measure(batch, "test"))
    assert torch.equal(first, again[0])
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_another_noise_than_that_of_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal slices of a run with mixed noise have two qualities. With noise=none they are equal, as with field noise
    their errors are. A measured sinogram takes none."""
    np.save(tmp_path / "a.npy", np.repeat(phantom(16, seed=0, part="test", index=0)[None], 8, axis=0))
    module = tiny_module("noise=mixed", "noise.photons=1e3", "noise.electronic_sigma=0", "seed=1", "data.seed=1")
    errors, lines = {}, {}
    for noise in ("as_trained", "field", "none"):
        reconstruct_by(module, tmp_path / "a.npy", noise=noise, output=tmp_path / noise, formats="[npy]")
        hu = np.stack([np.load(tmp_path / noise / f"a_{k}.npy") for k in range(8)])
        errors[noise] = (hu - hu.mean(0)).std((1, 2))
        lines[noise] = capsys.readouterr().out
    assert errors["as_trained"].max() > 3 * errors["as_trained"].min()
    assert 0 < errors["field"].max() < 2 * errors["field"].min()
    assert errors["none"].max() < 1e-3
    assert "noise=mixed, as in training (noise=none: without). Each has one of two noises" in lines["as_trained"]
    assert "simulated with noise=field\n" in lines["field"]
    with torch.no_grad():
        np.save(tmp_path / "y.npy", module.projector(torch.full((1, 1, 16, 16), 0.3))[0, 0].numpy())
    with pytest.raises(ConfigError, match="noise=none has no effect on y, which was measured: leave it out"):
        reconstruct_by(module, tmp_path / "y.npy", kind="sinograms", unit="value", noise="none")
    assert not (tmp_path / "out").exists()


def test_only_scans_with_missing_views_get_further_passes(tmp_path: Path) -> None:
    module = trained(0.05)
    y = sinograms(module, 3)
    y[1, 4] = np.nan
    np.save(tmp_path / "all.npy", y)
    np.save(tmp_path / "gap.npy", y[1])
    config = settings(unit="value")
    scans, gap = (measured(tmp_path / f"{name}.npy", module, config) for name in ("all", "gap"))
    together, alone = ([scan.hu(x) for scan, x, _ in images_of(module, its, 3)] for its in (scans, gap))
    np.testing.assert_allclose(together[1], alone[0], atol=0.05)
    with torch.no_grad():
        plain = module.network(torch.from_numpy(y[[0, 2]])[:, None])[:, 0].numpy() * 3000 - 1000
    np.testing.assert_allclose(together[::2], plain, atol=0.05)


@pytest.mark.extras
@pytest.mark.parametrize(("name", "library"), [("lodopab", "h5py"), ("two_detect", "tifffile")])
def test_a_sinogram_of_a_public_set_is_reconstructed_as_evaluated(name: str, library: str, tmp_path: Path) -> None:
    """The network gets the values of its training, and the HU are those of the set."""
    pytest.importorskip(library)
    words = ["model=fbp", f"data={name}", f"geometry={name}", f"data.root={tmp_path}", "geometry.n_views=8"]
    keys = ["data.image_size=32", "data.num_workers=0", "logger=csv"]
    config = config_of(*words, *keys)
    module = build_module(config).eval()
    if name == "lodopab":
        write_lodopab(tmp_path, module.projector.geometry, {"test": 1})
        of_one = 0.08135858
    else:
        write_two_detect(tmp_path, tmp_path, module.projector.geometry, [4531])
        of_one = config.data.max_attenuation
    (batch,) = SliceDataModule(config.data, geometry=module.projector.geometry).test_dataloader()
    y = batch["sinogram"]
    with torch.no_grad():
        expected = to_hu(batch, module.network(y))[0, 0].numpy()
    for unit, per_value in (("attenuation", of_one), ("value", 1.0)):
        np.save(tmp_path / f"{unit}.npy", y[0, 0].numpy() * per_value)
        (scan,) = measured(tmp_path / f"{unit}.npy", module, settings(unit=unit, water_attenuation=0.03))
        np.testing.assert_allclose(scan.sinogram, y, rtol=1e-5, atol=1e-4)
        ((_, x, _),) = images_of(module, iter([scan]), 1)
        np.testing.assert_allclose(scan.hu(x), expected, atol=0.05)


def test_a_disc_in_dicom_has_its_size_and_place_in_mm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    reconstruct_by(module, tmp_path / "in", formats="[dicom]")
    out = dcmread(tmp_path / "out" / "a.dcm")
    step = float(out.PixelSpacing[0])
    assert step == pytest.approx(200 / 128)
    share = (out.pixel_array + float(out.RescaleIntercept) + 1000) / 1000
    diameter = 2 * np.sqrt(share.sum() / np.pi) * step
    assert diameter == pytest.approx(120, rel=0.005)
    x, y = (float(out.ImagePositionPatient[k]) + np.arange(128) * step for k in (0, 1))
    centre = (share.sum(0) * x).sum() / share.sum(), (share.sum(1) * y).sum() / share.sum()
    assert centre == pytest.approx((20, 12), abs=0.1)


def test_what_has_no_size_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = at_true_size("geometry.field_of_view=20", "geometry.detector_pitch=4", "data.simulation_factor=2")
    for k in range(2):
        make_ct(tmp_path / "in" / f"{k}.dcm")  # 32 mm wide
        np.save(tmp_path / "in" / f"{k}.npy", dcmread(tmp_path / "in" / f"{k}.dcm").pixel_array - 1024.0)
    make_ct(tmp_path / "in" / "odd.dcm", PixelSpacing=None)
    assert len(images(module, tmp_path / "in", 2)) == 4
    skipped, unsized = capsys.readouterr().err.splitlines()
    assert "no pixel size in the file): odd.dcm" in skipped
    assert unsized.startswith("warning: 2 slices are in files without a pixel size")


def test_a_network_of_nan_writes_nothing(tmp_path: Path) -> None:
    module = tiny_module()
    next(module.network.parameters()).data.fill_(np.nan)
    with pytest.raises(DataError, match=r"the reconstruction of s\.npy has NaN"):
        reconstruct_by(module, series(tmp_path / "s.npy", 1), formats="[npy,png]")
    assert not (tmp_path / "out").exists()


def test_where_memory_is_short_batches_become_smaller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real allocations: tests/promises/test_memory.py."""
    module, path = tiny_module(), series(tmp_path / "a.npy", 5)
    exact, forward, most = images(module, path, 1), module.network.forward, 1

    def limited(y: torch.Tensor) -> torch.Tensor:
        if len(y) > most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nat a place")
        return forward(y)

    monkeypatch.setattr(module.network, "forward", limited)
    np.testing.assert_array_equal(images(module, path, 3), exact)
    assert capsys.readouterr().err == "warning: out of memory with 3 slices at once: continuing with batch_size=1\n"
    most = 0
    with pytest.raises(OutOfMemory, match=r"single slice of 16 × 16 \(.*memory\): close other programs"):
        images(module, path, 1)


def test_what_is_no_file_of_numbers_is_not_opened(tmp_path: Path) -> None:
    """Pipes, which would never end, and arrays that would take gigabytes."""
    module, path = tiny_module(), tmp_path / "a.npy"
    os.mkfifo(path)
    assert not holds_sinograms(tmp_path, module.projector.geometry, settings())
    with pytest.raises(DataError, match=r"has no \.npy file"):
        sinogram_files(path)
    path.unlink()
    np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(40_000, 40_000))  # sparse
    start = time.perf_counter()
    assert not holds_sinograms(path, module.projector.geometry, settings())
    with pytest.raises(DataError, match="40000 × 40000 values, not 1 to 8192"):
        next(measured(path, module, settings(angle_span=6, detector_pitch=1)))
    assert time.perf_counter() - start < 2


def test_endings_of_scans_may_be_in_capitals(tmp_path: Path) -> None:
    """Beside others they were left out, and alone they were slices."""
    module = tiny_module()
    (y,) = sinograms(module)
    for name in ("a.npy", "b.NPY", "alone/c.Npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with (tmp_path / name).open("wb") as stream:
            np.save(stream, y)
    for path in (tmp_path, tmp_path / "b.NPY", tmp_path / "alone"):
        assert holds_sinograms(path, module.projector.geometry, settings())
    assert holds_sinograms(tmp_path / "scan.MAT", module.projector.geometry, settings())
    scans = [scan.name for scan in measured(tmp_path, module, settings(unit="value"))]
    assert scans == ["a", "alone/c", "b"]


def test_a_scan_of_no_use_in_a_stack_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All others are written."""
    module = tiny_module()
    (y,) = sinograms(module)
    np.save(tmp_path / "a.npy", np.stack([y, y, np.full_like(y, np.nan), y]))
    reconstruct_by(module, tmp_path / "a.npy", unit="value", formats="[npy]", batch_size=2)
    assert "skipped:" in (said := capsys.readouterr().err)
    assert "a.npy#2 has 0 measured views" in said
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == [f"a_{k}{end}.npy" for k in (0, 1, 3) for end in ("", "_fbp")]


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
    return build_module(config_of(*words, *SCANNER)).eval()


def check(module: ReconstructionModule, path: Path, y: np.ndarray, **keys: object) -> None:
    np.save(path, y.astype(np.float32))
    list(measured(path, module, settings(kind="sinograms", **keys)))


@pytest.mark.parametrize("photons", [0, 1e3])
def test_a_right_scan_is_accepted(
    fbp_module: ReconstructionModule, tmp_path: Path, photons: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """1000 photons a ray are a hundredth of a low dose."""
    path = tmp_path / "a.npy"
    check(fbp_module, path, scan(fbp_module, photons))
    check(fbp_module, path, scan(fbp_module, photons, n_detectors=96, detector_pitch=10.0), detector_pitch=10)
    check(fbp_module, path, scan(fbp_module, photons, n_views=48), angle_span=2 * np.pi)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("offset", [0.25, -1.3])
def test_a_detector_that_is_off_is_told_once_with_its_offset(
    fbp_module: ReconstructionModule, tmp_path: Path, offset: float, capsys: pytest.CaptureFixture[str]
) -> None:
    y = scan(fbp_module, 1e5, detector_offset=offset)
    check(fbp_module, tmp_path / "a.npy", np.stack([y, y]))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "detector_offset" in line]
    (value,) = re.findall(r"a\.npy#0: its detector seems to be off: geometry\.detector_offset=(\S+) fits", line)
    assert float(value) == pytest.approx(offset, abs=0.03)
    right = fbp_module.config.geometry.changed(detector_offset=float(value))
    check(build_module(fbp_module.config.changed(geometry=right)).eval(), tmp_path / "a.npy", np.stack([y, y]))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("scale", ["log10", "pixels of 1.6 mm", "pixels of 0.5 mm", "transmission"])
def test_a_scan_in_another_scale_is_told_once(
    fbp_module: ReconstructionModule, tmp_path: Path, scale: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its image fits it, but its object is no body: a body's mean, weighted by attenuation, is near 0 HU."""
    narrow = fbp_module.config.geometry.changed(n_detectors=80)  # as wide as the body: air beside it fits no image
    module = build_module(fbp_module.config.changed(geometry=narrow)).eval()
    p = scan(module, 1e5)
    y = {
        "log10": p / np.log(10), "pixels of 1.6 mm": p / 1.6, "pixels of 0.5 mm": p / 0.5, "transmission": np.exp(-p),
    }[scale]  # fmt: skip
    check(module, tmp_path / "a.npy", np.stack([y, y]))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "HU on average" in line]
    assert re.search(r"a\.npy#0 would be an object of -?\d+ HU on average, but .*transmission or −log10.*pixels", line)


WRONG: dict[str, tuple[dict[str, Any], dict[str, object], str]] = {
    "short": ({"angle_span": 4.1}, {}, r"fits no image.* span 23[45]°: geometry\.angle_span=4\.[01]"),
    "twice": ({}, {"detector_pitch": 10}, "fits no image"),
    "a tenth": ({}, {"detector_pitch": 0.5}, r"HU on average.*detector_pitch="),
    "a thousandth": ({}, {"detector_pitch": 0.005}, "cannot see the object"),
    "degrees": ({}, {"angle_span": 360}, "degrees must be converted"),
    "zeros": ({}, {}, "has 16 measured views"),
    "nearly zeros": ({}, {}, "fits no image"),
    "far to the right": ({"detector_offset": 7.0}, {}, r"fits no image.*off: geometry\.detector_offset=(6\.9|7\.0)"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_scan_of_another_geometry_is_refused(fbp_module: ReconstructionModule, tmp_path: Path, fault: str) -> None:
    changes, keys, words = WRONG[fault]
    y = scan(fbp_module, 1e4, **changes)
    if "zeros" in fault:
        y[1::2] = 1e-3 * (fault != "zeros")
    with pytest.raises(DataError, match=words):
        check(fbp_module, tmp_path / "a.npy", y, **keys)


def test_a_scan_that_nearly_fits_is_told_and_so_is_the_misfit_of_its_image(
    fbp_module: ReconstructionModule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirrored = r"a\.npy: mirrored it is [01]\.\d% from an image, but now [1-9]\d?\.\d%: .*angle_span=-6\.283"
    for changes, words in (
        ({"angle_span": -2 * np.pi}, mirrored),
        ({"source_to_axis": 400.0}, r"a\.npy: the best image differs from it by [2-9]\.\d%"),
    ):
        check(fbp_module, tmp_path / "a.npy", scan(fbp_module, **changes))
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(words, line), line
    y = scan(fbp_module)
    y[3] = np.nan
    np.save(tmp_path / "a.npy", y.astype(np.float32))
    reconstruct_by(fbp_module, tmp_path / "a.npy", formats="[npy]")
    (told,) = re.findall(r"a: A x differs from the sinogram by ([\d.]+)%", capsys.readouterr().out)
    x = torch.from_numpy((np.load(tmp_path / "out" / "a.npy") + 1000) / 3000)[None, None]
    left = fbp_module.projector(x)[0, 0].numpy() * OF_ONE - y
    assert told == f"{100 * np.sqrt(np.nansum(left**2) / np.nansum(y**2)):.1f}"


@pytest.mark.parametrize("kind", ["slices", "sinograms"])
def test_slices_of_a_series_without_dicom_follow_each_other(
    fbp_module: ReconstructionModule, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stack is a series, and so are the files of a folder, in the order of the numbers in their names."""
    module = build_module(fbp_module.config.changed(model=section("model", "learn", n_iterations=1, channels=2)))
    y = scan(fbp_module).astype(np.float32) if kind == "sinograms" else phantom(64, seed=0, part="test", index=1)
    (tmp_path / "in" / "many").mkdir(parents=True)
    np.save(tmp_path / "in" / "stack.npy", np.stack([y] * 3))
    for k in (2, 10, 9):
        np.save(tmp_path / "in" / "many" / f"s{k}.npy", y)
    reconstruct_by(module, tmp_path / "in", kind=kind, formats="[dicom]", slice_spacing=2.5)
    assert "slices without DICOM follow each other in steps of 2.5 mm (slice_spacing=)" in capsys.readouterr().out
    uids = set()
    names = [[f"stack_{k}" for k in range(3)], [f"many/s{k}" for k in (2, 9, 10)]]
    for end in ("", "_fbp") if kind == "sinograms" else ("",):
        for series_names in names:
            files = [dcmread(tmp_path / "out" / f"{name}{end}.dcm") for name in series_names]
            for k, file in enumerate(files):
                assert list(map(float, file.ImagePositionPatient)) == [0, 0, k * 2.5]
                assert (file.InstanceNumber, file.SliceThickness, file.SliceLocation) == (k + 1, 2.5, k * 2.5)
            uids.add(frozenset(file.SeriesInstanceUID for file in files))
    assert len(uids) == len(frozenset.union(*uids)) == 2 * (1 + (kind == "sinograms"))


LONG = "n" * 251
NAMES = {
    "too long for its ending": ({f"{LONG}abc": 0, "b.npy": 0}, ["b"], f"{LONG}abc: File name too long"),
    "too long for its number": ({f"{LONG}.npy": 2, "b.npy": 0}, ["b"], "File name too long"),
    "a folder": ({"a": 0, "a.npy/x.npy": 0, "a.npy/y.npy": 0, "b.npy": 0}, ["a_1", "a.npy/x", "a.npy/y", "b"], None),
    "a file and a folder of a file": ({"a.npy": 0, "a.npy.npy/x.npy": 0, "b.npy": 0}, ["a", "a.npy.npy/x", "b"], None),
    "a line feed": ({"a\nb.npy": 2}, ["a\nb_0", "a\nb_1"], None),
    "four bytes a letter": ({"\U0001fa7b" * 60 + ".npy": 0, "b.npy": 0}, ["\U0001fa7b" * 60, "b"], None),
}


@pytest.mark.parametrize("case", NAMES)
def test_an_unwritable_name_costs_one_slice(fbp_module: ReconstructionModule, tmp_path: Path, case: str) -> None:
    inputs, outputs, why = NAMES[case]
    for name, count in inputs.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:  # np.save would add an ending
            images = [phantom(16, seed=0, part="test", index=k) for k in range(count or 1)]
            np.save(stream, np.stack(images) if count else images[0])
    if why is None:
        assert reconstruct_by(fbp_module, tmp_path / "in", formats="[npy]") == len(outputs)
    else:
        with pytest.raises(DataError, match=rf"of \d reconstructions are not written \(.*{why}.*\): rename or move"):
            reconstruct_by(fbp_module, tmp_path / "in", formats="[npy]")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert sorted(path.relative_to(tmp_path / "out").as_posix()[:-4] for path in files) == sorted(outputs)


def test_a_slice_that_fails_half_way_leaves_no_file(fbp_module: ReconstructionModule, tmp_path: Path) -> None:
    (tmp_path / "out" / "s_1.png").mkdir(parents=True)  # its .npy is written first
    with pytest.raises(DataError, match=r"1 of 3 reconstructions are not written \(.*s_1\.png exists already"):
        reconstruct_by(fbp_module, series(tmp_path / "s.npy", 3), formats="[png,npy]")
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_file())
    assert names == ["s_0.npy", "s_0.png", "s_2.npy", "s_2.png"]


def test_the_mean_over_symmetries_and_a_spread_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both in HU. The tiny scan has 8 views."""
    module, path = trained(0.05), series(tmp_path / "a.npy", 2)
    for symmetries in (1, 8):
        keys = {"symmetries": symmetries, "output": tmp_path / f"{symmetries}", "formats": "[npy,dicom]"}
        reconstruct_by(module, path, **keys)
    assert "NAME_spread" in capsys.readouterr().out
    assert not [*(tmp_path / "1").glob("*spread*")]
    (scan, _) = simulated_scans(path, [path], module)
    with torch.no_grad():
        turned = images_by_symmetry(module, scan.sinogram, symmetries_of_scan(module.projector)) * 3000 - 1000
    mean, spread = (np.load(tmp_path / "8" / f"a_0{end}.npy") for end in ("", "_spread"))
    np.testing.assert_allclose(mean, turned.mean(0)[0, 0], atol=0.05)
    np.testing.assert_allclose(spread, turned.std(0)[0, 0], atol=0.05)
    assert spread.max() > 1
    pytest.importorskip("highdicom")
    assert "Deviation over symmetries" in dcmread(tmp_path / "8" / "a_0_spread.dcm").SeriesDescription


@pytest.mark.parametrize(("views", "cures"), [(6, Cures(passes=3, start="tv")), (16, Cures(passes=2, mix=0.5))])
def test_slices_and_sinograms_of_another_scan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, views: int, cures: Cures
) -> None:
    """Its rays are used as they are, not interpolated to those of the training."""
    monkeypatch.setattr("qnmixer.reconstruction.cures._TV_ITERATIONS", 40)
    module, path = tiny_module(), series(tmp_path / "a.npy", 1)
    keys = {"geometry.n_views": views, "unit": "value", **vars(cures)}
    reconstruct_by(module, path, **keys)
    said = capsys.readouterr().out
    assert f"geometry.n_views=8, not {views}: its step sizes follow the scan, ×" in said
    assert ("start=tv: 40 iterations of TV come first; " in said) == (cures.start == "tv")
    assert f"passes={cures.passes}: {cures.passes} times" in said
    module = load_run(tmp_path / "run.ckpt")
    scanned = on_scan(module, module.config.changed(geometry=module.config.geometry.changed(n_views=views)), cures)
    (scan,) = simulated_scans(path, [path], scanned)
    assert scan.sinogram.shape[2] == views
    np.save(tmp_path / "y.npy", scan.sinogram[0, 0].numpy())
    reconstruct_by(module, tmp_path / "y.npy", **keys)
    with torch.no_grad():
        expected = scan.hu(scanned(scan.sinogram))
    for name in ("a", "y"):
        np.testing.assert_allclose(np.load(tmp_path / "out" / f"{name}.npy"), expected, atol=0.05)
