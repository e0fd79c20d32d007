"""Promise 6: DICOM in and out within 0.5 HU, positions right; every beam against ASTRA; sinograms keyed by (seed,
stream, sample).

Slices and scans from files, through `reconstruct`; and the noise of a run, whoever simulates it.
"""

import math
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
import torch
from PIL import Image

from qnmixer.module import ReconstructionModule
from qnmixer.physics import FanBeamProjector
from qnmixer.physics.noise import attenuation_per_value
from qnmixer.reconstruction.checkpoints import load_run

from ..conftest import csv_rows, metrics, rows_without_times
from .commands import BINS, SIZE, VIEWS, contents, reconstruction, record, run, slice_hu, training, weights, write_ct

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("commands")]


def test_one_seed_gives_one_run_with_any_number_of_workers(trained: Path, tmp_path: Path) -> None:
    """As in a notebook: the process has trained, and drawn from every generator."""
    random.random(), np.random.rand(), torch.rand(3)  # noqa: NPY002
    assert training(tmp_path / "again", "noise=field", "callbacks=default", "data.num_workers=1").code == 0
    assert rows_without_times(tmp_path / "again") == rows_without_times(trained)
    assert training(tmp_path / "other", "noise=field", "test_after_training=false", "seed=43").code == 0
    trained_weights = weights(trained)
    for name, same in (("again", True), ("other", False)):
        run_weights = weights(tmp_path / name)
        assert all(torch.equal(trained_weights[key], run_weights[key]) for key in trained_weights) == same
        assert (metrics(trained)["train/loss"] == metrics(tmp_path / name)["train/loss"]) == same


def hu_of(module: ReconstructionModule, y: torch.Tensor) -> np.ndarray[Any, Any]:
    """HU of the network's answer to one sinogram."""
    with torch.no_grad():
        x = module.network(y)[0, 0].numpy()
    return -1000 + (module.config.data.hu_max + 1000) * x


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
        stored_hu = result.pixel_array * float(result.RescaleSlope) + float(result.RescaleIntercept)
        assert np.abs(stored_hu - hu).max() <= 0.5
        assert hu.shape == (SIZE, SIZE)
        assert (result.PatientID, result.PatientName) == (source.PatientID, source.PatientName)
        assert result.ImageType[0] == "DERIVED"
        assert result.SOPInstanceUID != source.SOPInstanceUID
        assert result.SeriesInstanceUID != source.SeriesInstanceUID
        assert "8 simulated views" in result.SeriesDescription
        uids.add((result.SOPInstanceUID, result.SeriesInstanceUID, result.PatientID))
        with Image.open(path.with_suffix(".png")) as picture:
            assert picture.size == (SIZE, SIZE)
            expected = np.clip((hu + 160) / 400, 0, 1) * 255
            np.testing.assert_allclose(np.asarray(picture, float), expected, atol=0.51)
    assert [len({*column}) for column in zip(*uids, strict=True)] == [6, 3, 3]  # each series is one of its own
    assert len({(series, patient) for _, series, patient in uids}) == 3


def test_hu_are_those_of_the_network_and_near_the_truth(noise_free: Path, tmp_path: Path) -> None:
    hu = slice_hu(3, SIZE)
    np.save(tmp_path / "a.npy", hu)
    assert reconstruction(noise_free, tmp_path / "a.npy", tmp_path / "out", "formats=[npy]").code == 0
    module = load_run(noise_free).eval()
    x = torch.from_numpy((np.clip(hu, -1000, 2000) + 1000) / 3000)[None, None].float()
    output = np.load(tmp_path / "out" / "a.npy")
    np.testing.assert_allclose(output, hu_of(module, module.projector(x)), atol=0.05)
    assert np.abs(output - hu).mean() < 150
    assert np.corrcoef(output.ravel(), hu.ravel())[0, 1] > 0.9


def test_a_tilde_is_the_home_folder(noise_free: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quoted, because Hydra refuses it otherwise, and shells replace it only at the start of a word."""
    home, cwd = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    cwd.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(cwd)
    (home / "run").symlink_to(noise_free)
    np.save(home / "a.npy", slice_hu(3, SIZE))
    words = ["input='~/a.npy'", "output='~/out'", "formats=[npy]", "accelerator=cpu"]
    assert run("reconstruct", "run='~/run'", *words).code == 0
    assert [path.name for path in (home / "out").iterdir()] == ["a.npy"]
    assert training(tmp_path / "finetuned", "finetune='~/run'", "test_after_training=false").code == 0
    assert "run=~nobody_is_so/run does not exist" in run("reconstruct", "run='~nobody_is_so/run'", *words).error
    assert not list(cwd.iterdir())


def test_a_single_file_and_a_stack(noise_free: Path, ct: Path, tmp_path: Path) -> None:
    outcome = reconstruction(noise_free, ct / "B" / "1.dcm", tmp_path / "one", "formats=[dicom]")
    assert "reconstructions: 1, as dicom" in outcome.stdout
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["1.dcm"]
    np.save(tmp_path / "stack.npy", np.stack([slice_hu(k) for k in range(3)]))
    outcome = reconstruction(noise_free, tmp_path / "stack.npy", tmp_path / "stack", "formats=[npy,dicom]")
    assert "reconstructions: 3, as" in outcome.stdout
    names = [f"stack_{k}.{end}" for k in range(3) for end in ("dcm", "npy")]
    assert sorted(path.name for path in (tmp_path / "stack").iterdir()) == names
    datasets = [pydicom.dcmread(tmp_path / "stack" / f"stack_{k}.dcm") for k in range(3)]
    assert [int(dataset.InstanceNumber) for dataset in datasets] == [1, 2, 3]
    assert len({dataset.SeriesInstanceUID for dataset in datasets}) == 1


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


@pytest.mark.parametrize(("unit", "kind"), [("attenuation", "auto"), ("value", "sinograms")])
def test_sinograms_in_either_unit(noise_free: Path, measured: Measured, tmp_path: Path, unit: str, kind: str) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    y = measured.y * (measured.per_value if unit == "attenuation" else 1)
    np.save(folder / "pair.npy", y)
    np.save(folder / "single.npy", y[1].astype(np.float64))
    outcome = reconstruction(noise_free, folder, tmp_path / "out", f"unit={unit}", f"kind={kind}")
    assert outcome.code == 0, outcome.stderr
    for name, index in (("pair_0", 0), ("pair_1", 1), ("single", 1)):
        hu = np.load(tmp_path / "out" / f"{name}.npy")
        np.testing.assert_allclose(hu, measured.hu[index], atol=0.5)
        low, high = np.percentile(hu, (1, 99)).round()
        for stem in (name, f"{name}_fbp"):
            with Image.open(tmp_path / "out" / f"{stem}.png") as picture:
                assert picture.info["Description"] == f"{low:g} HU is black, {high:g} HU is white"
        fbp = load_run(noise_free).projector.fbp(torch.from_numpy(measured.y[index])[None, None].float())[0, 0]
        np.testing.assert_allclose(np.load(tmp_path / "out" / f"{name}_fbp.npy"), 3000 * fbp - 1000, atol=0.5)
        fbp_dataset = pydicom.dcmread(tmp_path / "out" / f"{name}_fbp.dcm")
        assert fbp_dataset.SeriesDescription.startswith("FBP, 8 measured views")
        dataset = pydicom.dcmread(tmp_path / "out" / f"{name}.dcm")
        assert np.abs(dataset.pixel_array * dataset.RescaleSlope + dataset.RescaleIntercept - hu).max() <= 0.5
        assert "8 measured views" in dataset.SeriesDescription
        assert dataset.SeriesInstanceUID != fbp_dataset.SeriesInstanceUID
        assert [float(s) for s in dataset.PixelSpacing] == [12.5, 12.5]


def test_water_attenuation_sets_the_hu(noise_free: Path, measured: Measured, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", measured.y[0] * measured.per_value * 1.25)
    options = ["water_attenuation=0.024", "formats=[npy]"]
    assert reconstruction(noise_free, tmp_path / "a.npy", tmp_path / "out", *options).code == 0
    np.testing.assert_allclose(np.load(tmp_path / "out" / "a.npy"), measured.hu[0], atol=0.5)


BAD_SCANS: dict[str, tuple[str, str]] = {
    "counts": ("kind=sinograms", "no −log of transmission"),
    "transmission": ("kind=sinograms", "unit=attenuation"),
    "value as attenuation": ("kind=sinograms", "unit=value"),
    "attenuation as value": ("kind=sinograms unit=value", "unit=attenuation"),
    "negated": ("kind=sinograms unit=value", "no −log of transmission"),
    "dead bin": ("kind=sinograms", "NaN or infinite"),
    "empty scan": ("kind=sinograms", "has 0 measured views"),
    "turned": ("kind=sinograms", r"\[8, 48\]"),
    "too few views": ("kind=sinograms", "geometry.n_views"),
    "text": ("kind=sinograms", "scan.npy"),
    # A scan of another shape is not taken for a slice.
    "turned slice": ("", f"has no air.*\\[{VIEWS}, {BINS}\\]"),
    "square slice": ("", f"has no air.*\\[{VIEWS}, {BINS}\\]"),
}


@pytest.mark.parametrize("fault", BAD_SCANS)
def test_sinograms_of_the_wrong_shape_or_unit(noise_free: Path, measured: Measured, tmp_path: Path, fault: str) -> None:
    p = measured.y[0] * measured.per_value
    broken_scan = p.copy()
    broken_scan[2, 3] = np.inf
    scans = {
        "counts": 1e5 * np.exp(-p), "transmission": np.exp(-p), "value as attenuation": measured.y[0],
        "attenuation as value": p, "negated": -measured.y[0], "dead bin": broken_scan, "empty scan": np.zeros_like(p),
        "turned": p.T, "too few views": p[:5], "text": np.array(["a", "b"]),
        "turned slice": np.linspace(0, 4, BINS * VIEWS).reshape(BINS, VIEWS),
        "square slice": np.linspace(0, 4, 64**2).reshape(64, 64),
    }  # fmt: skip
    np.save(tmp_path / "scan.npy", scans[fault])
    options, words = BAD_SCANS[fault]
    outcome = reconstruction(noise_free, tmp_path / "scan.npy", tmp_path / "out", *options.split())
    assert re.search(words, outcome.error)
    assert "scan.npy" in outcome.error
    assert not list((tmp_path / "out").rglob("*.*"))


def test_a_sinogram_needs_a_scale(minmax: Path, tmp_path: Path, measured: Measured) -> None:
    np.save(tmp_path / "a.npy", measured.y[0])
    error = reconstruction(minmax, tmp_path / "a.npy", tmp_path / "out", "kind=sinograms").error
    assert "data.scaling=minmax" in error


@pytest.mark.parametrize(("content", "words"), [
    ("missing", "does not exist"), ("text", "no usable slice"), ("nan", "NaN or infinite"), ("scans", "no .npy file"),
])  # fmt: skip
def test_inputs_of_no_use(noise_free: Path, tmp_path: Path, content: str, words: str) -> None:
    source = tmp_path / "in"
    if content != "missing":
        source.mkdir()
        (source / "a.txt").write_text("hello")
    if content == "nan":
        np.save(source / "a.npy", np.full((32, 32), np.nan))
    kind = "sinograms" if content == "scans" else "auto"
    error = reconstruction(noise_free, source, tmp_path / "out", f"kind={kind}").error
    assert words in error
    assert str(source) in error
    assert not list((tmp_path / "out").rglob("*.*"))


def test_real_ct(real_ct: Path, tmp_path: Path) -> None:
    source = ["data=dicom", f"data.root={real_ct / 'dicom'}", f"data.cache_dir={tmp_path / 'cache'}"]
    outcome = training(tmp_path / "run", *source, "data.num_workers=1")
    assert outcome.code == 0, outcome.stderr
    assert "train 20 slices of 1 patient, val 1 slices of 1 patient, test 1 slices of 1 patient" in outcome.text
    assert max(metrics(tmp_path / "run")["train/grad_norm"]) < 10

    evaluation = run(
        "evaluate", f"run={tmp_path / 'run'}", *source, "data.split=all", f"hydra.run.dir={tmp_path / 'evaluated'}"
    )
    assert evaluation.code == 0, evaluation.stderr
    results = record(tmp_path / "evaluated")["test"]
    assert results["QN-Mixer"]["psnr"] > results["FBP"]["psnr"]
    assert len({line["slice"] for line in csv_rows(tmp_path / "evaluated" / "images.csv")}) == 22

    slice_path = sorted((real_ct / "dicom" / "chest_ge").rglob("*"))[-1]
    assert reconstruction(tmp_path / "run", slice_path, tmp_path / "out").code == 0
    (result_path,) = (tmp_path / "out").glob("*.dcm")
    original, result = pydicom.dcmread(slice_path), pydicom.dcmread(result_path)
    assert result.PatientID == original.PatientID
    hu = result.pixel_array * float(result.RescaleSlope) + float(result.RescaleIntercept)
    assert np.abs(hu - np.load(result_path.with_suffix(".npy"))).max() <= 0.5
    truth = original.pixel_array * float(original.RescaleSlope) + float(original.RescaleIntercept)
    resized_truth = np.asarray(Image.fromarray(np.clip(truth, -1000, 2000).astype(np.float32)).resize((SIZE, SIZE)))
    assert np.corrcoef(hu.ravel(), resized_truth.ravel())[0, 1] > 0.9


def test_slices_without_a_study_share_a_new_one(noise_free: Path, tmp_path: Path) -> None:
    for number in range(2):
        path = tmp_path / "in" / f"{number}.dcm"
        write_ct(path, number, "P")
        dataset = pydicom.dcmread(path)
        del dataset.StudyInstanceUID
        dataset.save_as(path)
    assert reconstruction(noise_free, tmp_path / "in", tmp_path / "out", "formats=[dicom]").code == 0
    datasets = [pydicom.dcmread(path) for path in (tmp_path / "out").rglob("*.dcm")]
    assert len(datasets) == 2
    assert len({dataset.StudyInstanceUID for dataset in datasets}) == len({d.SeriesInstanceUID for d in datasets}) == 1


def test_scans_of_one_name_are_all_kept_and_a_bad_one_is_skipped(
    noise_free: Path, measured: Measured, tmp_path: Path
) -> None:
    scans = {"a/scan": measured.y[0], "a/scan_3": measured.y[0], "b/scan": measured.y, "bad": measured.y[:, :-1]}
    for name, y in scans.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "in" / f"{name}.npy", y)
    options = ["kind=sinograms", "unit=value", "formats=[npy]"]
    outcome = reconstruction(noise_free, tmp_path / "in", tmp_path / "out", *options)
    assert "reconstructions: 4, as" in outcome.stdout
    assert "skipped" in outcome.stderr
    names = ("a/scan", "a/scan_3", "b/scan_0", "b/scan_1")
    assert sorted(contents(tmp_path / "out")) == sorted(f"{name}{end}.npy" for name in names for end in ("", "_fbp"))


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
    geometry = replace(g, n_views=2 * VIEWS, n_detectors=2 * BINS, detector_pitch=pitch)
    x = torch.from_numpy((np.clip(slice_hu(0, SIZE), -1000, 2000) + 1000) / 3000)[None, None].float()
    np.save(tmp_path / "scan.npy", FanBeamProjector(geometry)(x)[0, 0].numpy())
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
    y = module.measurement.project(x[:, :, ::2, ::2], fine=x)
    np.testing.assert_allclose(np.load(tmp_path / "out" / "a.npy"), hu_of(module, y), atol=0.05)
