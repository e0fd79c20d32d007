"""What slices show of their unit and of the order of their axes: a line where it is odd, and none for real ones."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.slices import SliceInfo, clean_hu, doubted, unit_signs
from qnmixer.settings.data import DataConfig
from qnmixer.settings.run import section

from .conftest import make_ct

Stack = np.ndarray[Any, Any]
DISC = np.hypot(*(np.mgrid[:40, :40] - 19.5)) < 20


def volume(seed: int = 0, n: int = 3) -> Stack:
    """Tissue in noisy air, with some bone, [n, 40, 40] in HU."""
    y, x = np.mgrid[:40, :40] - 19.5
    hu = np.random.default_rng(seed).normal(-1000, 10, (n, 40, 40))
    hu[:, np.hypot(x, y) < 14] = 40 + seed
    hu[:, np.hypot(x - 5, y) < 2] = 800
    return np.clip(np.rint(hu), -1024, None)


def lines_of(data: DataConfig) -> list[str]:
    """What is said when the slices are opened."""
    with warnings.catch_warnings(record=True, action="always") as said:
        SliceDataModule(data).setup()
    return [str(warning.message) for warning in said]


def told(option: str, root: Path, **keys: Any) -> list[str]:
    keys = {"root": str(root), "image_size": 16, "num_workers": 0, "cache_dir": str(root.with_name("cache"))} | keys
    return lines_of(section("data", option, **keys))


def stacks(root: Path, other: Callable[[Stack], Stack], which: int = 2, n: int = 3) -> Path:
    """Four patients of n slices, one of whom is otherwise."""
    root.mkdir()
    for k in range(4):
        np.save(root / f"P{k}.npy", other(volume(k, n)) if k == which else volume(k, n))
    return root


OTHER_UNITS: dict[str, Callable[[Stack], Stack]] = {
    "HU + 1024": lambda hu: hu + 1024,
    "HU + 1024 with padding": lambda hu: np.where(DISC, hu + 1024, -2000),
    "HU + 1000, unsigned": lambda hu: np.clip(hu + 1000, 0, None).astype(np.uint16),
    "HU - 1024": lambda hu: hu - 1024,
    "grey values": lambda hu: np.rint(np.clip((hu + 160) / 400, 0, 1) * 255),
    "HU / 1000": lambda hu: np.where(hu > 500, 2.5, hu / 1000),
    "one slice of three": lambda hu: hu + np.array([0, 0, 1024])[:, None, None],
}


@pytest.mark.parametrize("unit", OTHER_UNITS)
def test_a_patient_in_another_unit_is_named(unit: str, tmp_path: Path) -> None:
    """Also from the cache, and in a mix."""
    root = stacks(tmp_path / "root", OTHER_UNITS[unit])
    folder = {"share": 0.5, "name": "numpy", "root": str(root), "cache_dir": str(tmp_path / "cache")}
    sources = {"slices": folder, "drawn": {"share": 0.5, "name": "phantoms"}}
    mixed = section("data", "mixed", sources=sources, image_size=16, num_workers=0)
    for (line,) in (told("numpy", root), told("numpy", root), lines_of(mixed)):
        assert re.search(r"1 of 4 patients \(P2\) have no air .*is this really in HU .*subtract 1024 from", line)


def test_slices_from_0_to_1_among_slices_in_hu_are_skipped(tmp_path: Path) -> None:
    (line,) = told("numpy", stacks(tmp_path / "root", lambda hu: np.clip(hu / 2000, 0, 1)))
    assert re.search(r"skipped 3 .*\(3 values from −1 to 2, which are not HU\): P2.npy#0", line)


@pytest.mark.parametrize("padding", [None, -1000])
def test_a_patient_in_another_unit_is_named_from_dicom(padding: int | None, tmp_path: Path) -> None:
    """RescaleIntercept was lost. Padding is air then, whatever the unit is."""
    for k in range(4):
        for z, hu in enumerate(volume(k)):
            tags: dict[str, Any] = {"PatientID": f"P{k}", "ImagePositionPatient": [0, 0, z]}
            if k == 1:
                tags |= {"RescaleIntercept": 0}
            if k == 1 and padding is not None:
                hu, tags["PixelPaddingValue"] = np.where(DISC, hu, padding - 1024), padding
            make_ct(tmp_path / "root" / f"{k}/{z}", hu, **tags)
    (line,) = told("dicom", tmp_path / "root")
    assert "1 of 4 patients (P1) have no air" in line


REAL: dict[str, Stack] = {
    "padding outside of the circle": np.where(DISC, volume(), -2000),
    "a wide patient, and no air in the circle": np.where(DISC, np.clip(volume(), -100, None), -3024),
    "flat air": np.where(volume() < -900, -1000, volume()),
    "air in one slice of three": np.concatenate([np.clip(volume(n=2), -100, None), volume(n=1)]),
    "bone in the last slice": np.concatenate([volume(n=2), np.where(volume(n=1) > 0, 900, volume(n=1))]),
}


@pytest.mark.parametrize("what", REAL)
def test_what_scanners_give_is_not_doubted(what: str) -> None:
    signs = [
        unit_signs(clean_hu(hu.astype(np.float32)), SliceInfo("a.npy", k, 3, "", "", k))
        for k, hu in enumerate(REAL[what])
    ]
    assert doubted(["P"] * 3, signs) == []


@pytest.mark.parametrize("option", ["dicom", "numpy"])
def test_no_real_folder_is_doubted(real_ct: Path, option: str, tmp_path: Path) -> None:
    lines = told(option, real_ct / {"dicom": "dicom", "numpy": "hu_npy"}[option], cache_dir=str(tmp_path))
    assert not any("HU" in line or "[H, W, N]" in line for line in lines)


@pytest.mark.parametrize("how", ["np.moveaxis(volume, 0, -1)", "volume.T"])
def test_a_stack_with_its_slices_last_is_named_and_the_line_turns_it(how: str, tmp_path: Path) -> None:
    (tmp_path / "the root").mkdir()
    for k in range(4):
        its = volume(k, 25)
        last = (np.moveaxis(its, 0, -1) if "moveaxis" in how else its.T) if k in (1, 2) else its
        np.save(tmp_path / "the root" / f"P{k}.npy", last)
    for name in ("P1.npy", "P2.npy"):
        (line,) = [line for line in told("numpy", tmp_path / "the root") if "skipped" not in line]
        assert re.search(rf"stacks are read as \[N, H, W\].*as in \[H, W, N\] \({name}", line)
        code = line[line.index("numpy.save(") : line.index("; what nibabel")]
        if "T" in how:
            code = code.replace("numpy.moveaxis(", "").replace(", -1, 0))", ".T)")
        exec(code, {"numpy": np})  # what the line says
        np.testing.assert_array_equal(np.load(tmp_path / "the root" / name), volume(int(name[1]), 25))
    assert told("numpy", tmp_path / "the root") == []


def test_a_few_slices_last_are_named_too(tmp_path: Path) -> None:
    few = np.moveaxis(volume(3, 5), 0, -1)[:, :37]
    (line,) = told("numpy", stacks(tmp_path / "root", lambda _: few, which=3))
    assert "shape [40, 37, 5], as [H, W, N]; numpy.moveaxis(array, -1, 0) turns it to [N, H, W]): P3.npy" in line


@pytest.mark.parametrize("shape", [(40, 40, 40), (3, 40, 30), (40, 40), (25, 40, 40), (30, 40, 40)], ids=str)
def test_stacks_that_may_well_be_n_h_w_are_not_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    for k in range(4):
        (tmp_path / "root" / f"P{k}").mkdir(parents=True)
        np.save(tmp_path / "root" / f"P{k}" / "a.npy", np.resize(volume(k, 40), shape))
    assert told("numpy", tmp_path / "root") == []
