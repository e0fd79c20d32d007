"""Training slices are known in a test in whatever form they come, and nothing in the record names anybody."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
import torch

from qnmixer.data.cache import clean_hu, to_grid, to_square
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.fingerprints import alike, look, original
from qnmixer.data.phantoms.phantoms import phantom
from qnmixer.data.splits import RunSplit, SplitRecord, is_split_record
from qnmixer.physics import FanBeamGeometry
from qnmixer.settings.data import FolderData
from qnmixer.settings.run import section

from .conftest import make_ct

GEOMETRY = FanBeamGeometry(32, 400 / 32, 8, 48, 20.0, 600.0, 400.0)
PATIENTS = ("JanetDoe", "P1", "P2", "P3")


@cache
def slice_hu(number: int) -> np.ndarray[Any, Any]:
    return clean_hu(phantom(128, seed=0, part="test", index=number).round())


@pytest.fixture(scope="module")
def ct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four patients with two slices each; the first two train."""
    root = tmp_path_factory.mktemp("ct")
    for p, patient in enumerate(PATIENTS):
        for k in range(2):
            make_ct(root / patient / f"{k}.dcm", slice_hu(2 * p + k), PatientID=patient)
    return root


def settings(root: Path, kind: str = "dicom", **keys: Any) -> FolderData:
    return section("data", kind, root=str(root), image_size=32, num_workers=0, **keys)


def record_of(root: Path, **keys: Any) -> SplitRecord:
    """Of a run that trains on two patients."""
    lists = {"split": "explicit", "val_patients": ["P2"], "test_patients": ["P3"]}
    module = SliceDataModule(settings(root, **lists, **keys), geometry=GEOMETRY)
    module.setup()
    return module.split.record


def seen(record: SplitRecord, config: FolderData) -> tuple[int, int]:
    """Those of a whole folder that are training slices, and that are likely some."""
    return SliceDataModule(config.changed(split="all"), geometry=GEOMETRY).trained("test", record)


@pytest.mark.parametrize(
    "keys", [{}, {"pixel_size": "header"}, {"image_size": 48}, {"hu_max": 1500.0}, {"include": "*Doe*"}], ids=str
)
def test_the_same_files_are_known_whatever_the_grid(ct: Path, keys: dict[str, Any]) -> None:
    expected = 2 if "include" in keys else 4
    assert seen(record_of(ct), settings(ct).changed(**keys)) == (expected, 0)
    assert seen(record_of(ct, pixel_size="header"), settings(ct).changed(**keys)) == (expected, 0)


def test_of_a_part_that_is_cut_short_only_its_slices_count(ct: Path) -> None:
    cut = SliceDataModule(settings(ct).changed(split="all"), geometry=GEOMETRY, first=3)
    assert (len(cut.dataset("test")), cut.trained("test", record_of(ct))) == (3, (3, 0))


@pytest.mark.parametrize(("change", "expected"), [
    (np.asarray, (4, 0)),  # in another format, without any tag
    (np.flipud, (4, 0)),
    (np.transpose, (4, 0)),
    (lambda hu: np.pad(hu, ((0, 60), (7, 0)), constant_values=-3024), (4, 0)),
    (lambda hu: hu[hu.max(1) > -500], (4, 0)),  # air rows cut off
    (lambda hu: to_square(hu, 96), (0, 4)),
    (lambda hu: to_square(hu, 300), (0, 4)),
    (lambda hu: to_grid(hu, (1.0, 1.0), 128, 160.0), (0, 4)),  # smaller in the image
    (lambda hu: to_square(np.rot90(hu).copy(), 100), (0, 4)),
    (lambda hu: hu + np.random.default_rng(0).normal(0, 10, hu.shape), (0, 4)),  # as a lossy file
    (lambda hu: hu[24:-24, 24:-24], (0, 0)),  # a part of the body: not known
])  # fmt: skip
def test_copies(ct: Path, tmp_path: Path, change: Callable[[Any], Any], expected: tuple[int, int]) -> None:
    for p in range(4):
        (tmp_path / "copies" / f"c{p}").mkdir(parents=True)
        for k in range(2):
            np.save(tmp_path / "copies" / f"c{p}" / f"{k}.npy", change(slice_hu(2 * p + k)))
    assert seen(record_of(ct), settings(tmp_path / "copies", "numpy")) == expected


def test_other_slices_of_training_patients_are_told_by_their_ids(ct: Path, tmp_path: Path) -> None:
    """Not by the names of folders, which many data sets share."""
    record = record_of(ct)
    for p, patient in enumerate(["JanetDoe", "P2", "other"]):
        make_ct(tmp_path / "new" / PATIENTS[p] / "0.dcm", slice_hu(50 + p), PatientID=patient)
    assert seen(record, settings(tmp_path / "new")) == (0, 1)
    for path in (tmp_path / "new").rglob("*.dcm"):
        file = pydicom.dcmread(path)
        file.PatientID, file.StudyInstanceUID, file.SeriesInstanceUID = "ANON", "", ""
        file.save_as(path)
    assert seen(record, settings(tmp_path / "new")) == (0, 0)


def test_one_tag_for_all_says_nothing_where_folders_are_the_patients(tmp_path: Path) -> None:
    for p, folder in enumerate(PATIENTS):
        its = {"PatientID": "ANON", "StudyInstanceUID": "", "SeriesInstanceUID": ""}
        make_ct(tmp_path / folder / "0.dcm", slice_hu(p), **its)
    config = settings(tmp_path, patient_from="folder", split="explicit", val_patients=["P2"], test_patients=["P3"])
    module = SliceDataModule(config)
    module.setup()
    assert module.trained("test", module.split.record) == (0, 0)


def test_a_record_has_numbers_only_and_a_broken_one_is_none(ct: Path) -> None:
    record = record_of(ct)
    assert is_split_record(record)
    assert all(its.dtype == torch.int64 for part in record.values() for its in part.values())
    broken = record | {"train": record["train"] | {"looks": record["train"]["looks"][1:]}}
    assert not is_split_record(broken)


def test_only_the_source_that_is_evaluated_counts(ct: Path) -> None:
    """Training slices of a mix are no test slices where the test is on phantoms."""
    record = record_of(ct)
    split = RunSplit()
    config = settings(ct).changed(split="all")
    part = {"patients": ["x"], "digests": record["train"]["slices"].tolist()[:1]}
    split.settle("data.sources.slices", *part.values(), config)
    assert split.trained("test", record) == (1, 0)
    assert split.trained("test", record, "data.sources.phantoms") == (0, 0)


def test_different_slices_are_neither_equal_nor_alike() -> None:
    train, test = ([phantom(64, seed=0, part=part, index=i) for i in range(40)] for part in ("train", "test"))
    assert len({*map(original, [*train, *test])}) == 80
    looks = [torch.tensor([number for hu in its for number in look(hu)]) for its in (train, test)]
    assert not alike(*looks).any()
    assert alike(looks[0], looks[0]).all()
    assert not alike(looks[0], looks[0][:0]).any()
