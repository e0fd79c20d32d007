"""Reading slices to reconstruct, and writing reconstructions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.dataset import Dataset
from pydicom.uid import generate_uid

from qnmixer.engine.data.cache import Grid
from qnmixer.engine.data.slices import FloatArray, Slice
from qnmixer.engine.inference.scan import input_files
from qnmixer.engine.inference.slices import read_slices
from qnmixer.engine.inference.writers import write_dicom, write_npy, write_png
from qnmixer.errors import DataError

WORDS: dict[str, Any] = {"description": "Derived by QN-Mixer from 32 simulated sparse views"}


def hu_of(path: Path) -> Any:
    dataset = dcmread(path)
    return dataset.pixel_array * float(dataset.RescaleSlope) + float(dataset.RescaleIntercept)


def slices(path: Path) -> list[Slice]:
    return [*read_slices(path, input_files(path))]


def noise(size: int) -> FloatArray:
    return np.random.default_rng(0).uniform(-1100, 3000, (size, size)).astype(np.float32)


def test_dicom_keeps_the_patient_and_says_that_it_is_derived(make_ct: Any, tmp_path: Path) -> None:
    make_ct(tmp_path / "in.dcm", PixelPaddingValue=-2000, ConvolutionKernel="B30", PresentationLUTShape="INVERSE")
    source = dcmread(tmp_path / "in.dcm")
    source.ICCProfile, source.PatientIdentityRemoved = b"\0" * 16, "YES"
    source.VOILUTSequence = [Dataset()]
    source.OriginalAttributesSequence = [Dataset()]
    source.OriginalAttributesSequence[0].PatientID = "EARLIER"
    source.add_new(0xFFFCFFFC, "OB", b"\0" * 8)
    uid = generate_uid()
    write_dicom(tmp_path / "out.dcm", noise(20), template=source, series_uid=uid, **WORDS)
    out = dcmread(tmp_path / "out.dcm")
    kept = ("PatientID", "PatientName", "PatientIdentityRemoved", "StudyInstanceUID", "StudyDescription")
    for keyword in (*kept, "InstanceNumber"):
        assert out[keyword].value == source[keyword].value
    assert out.SeriesInstanceUID == uid
    assert out.SOPInstanceUID == out.file_meta.MediaStorageSOPInstanceUID != source.SOPInstanceUID
    assert out.ImageType[:2] == ["DERIVED", "SECONDARY"]
    assert "QN-Mixer" in out.DerivationDescription
    assert "QN-Mixer" in out.SeriesDescription
    assert not {element.keyword for element in out} & {  # these belonged to the pixels of the source
        "PixelPaddingValue", "ConvolutionKernel", "PresentationLUTShape", "ICCProfile", "VOILUTSequence",
        "OriginalAttributesSequence", "DataSetTrailingPadding",
    }  # fmt: skip
    assert b"EARLIER" not in (tmp_path / "out.dcm").read_bytes()
    assert np.abs(hu_of(tmp_path / "out.dcm") - noise(20)).max() <= 0.5


@pytest.mark.parametrize(
    ("shape", "spacing", "new", "first"),
    [
        ((40, 60), [0.8, 0.8], [2.4, 2.4], [-10 + 0.8, -20 + 0.8 - 10 * 0.8, 30]),  # padded to a square of 60
        ((40, 40), [60, 30], [120, 60], [5, 10, 30]),  # not believed: taken for square pixels
        (None, None, [1.5625, 1.5625], [0, 0, 0]),  # no source
    ],
)
def test_a_point_lies_at_the_same_millimetres_before_and_after(
    make_ct: Any, body_hu: Any, tmp_path: Path, shape: Any, spacing: Any, new: list[float], first: list[float]
) -> None:
    template = None
    if shape is not None:
        make_ct(tmp_path / "in.dcm", body_hu(*shape), PixelSpacing=spacing, ImagePositionPatient=[-10, -20, 30])
        template = dcmread(tmp_path / "in.dcm")
    write_dicom(tmp_path / "out.dcm", noise(20), template=template, series_uid="1.2", pixel_spacing=1.5625, **WORDS)
    out = dcmread(tmp_path / "out.dcm")
    assert list(out.PixelSpacing) == pytest.approx(new)
    assert list(out.ImagePositionPatient) == pytest.approx(first)
    assert (out.Rows, out.Columns) == (20, 20)


def test_grid_of_a_source_whose_pixels_are_not_square(make_ct: Any, body_hu: Any, tmp_path: Path) -> None:
    """It is that of the image on which the slice lies: a square of 120 mm around its middle."""
    position = {"PixelSpacing": [3, 2], "ImagePositionPatient": [-10, -20, 30]}
    make_ct(tmp_path / "in.dcm", body_hu(40, 50), **position)
    (source,) = slices(tmp_path / "in.dcm")
    hu = Grid(60, None).place(source.hu, source.spacing)
    write_dicom(tmp_path / "out.dcm", hu, template=dcmread(tmp_path / "in.dcm"), series_uid="1.2", **WORDS)
    out = dcmread(tmp_path / "out.dcm")
    assert list(out.PixelSpacing) == [2, 2]
    assert list(out.ImagePositionPatient) == [-20, -20.5, 30]
    assert np.abs(hu_of(tmp_path / "out.dcm") - hu).max() <= 0.5
    centre = {}
    for name, (down, right), first in (("in", (3, 2), (-20, -10)), ("out", (2, 2), (-20.5, -20))):
        bone = hu_of(tmp_path / f"{name}.dcm").clip(100) - 100
        y, x = ((bone * its).sum() / bone.sum() for its in np.mgrid[: bone.shape[0], : bone.shape[1]])
        centre[name] = (first[0] + down * y, first[1] + right * x)
    assert centre["out"] == pytest.approx(centre["in"], abs=0.2)


def test_multi_frame_source_gives_single_frames(make_ct: Any, body_hu: Any, tmp_path: Path) -> None:
    make_ct(tmp_path / "in.dcm", np.stack([body_hu(), body_hu()]))
    template = dcmread(tmp_path / "in.dcm")
    write_dicom(tmp_path / "out.dcm", noise(40), template=template, frame=1, series_uid="1.2", **WORDS)
    out = dcmread(tmp_path / "out.dcm")
    assert out.SOPClassUID == "1.2.840.10008.5.1.4.1.1.2"
    assert "PerFrameFunctionalGroupsSequence" not in out
    assert "NumberOfFrames" not in out
    assert list(out.ImagePositionPatient) == [-10, -20, 28]
    assert list(out.PixelSpacing) == [0.8, 0.8]
    assert out.InstanceNumber == 2
    assert out.RescaleIntercept == -1024
    assert np.abs(hu_of(tmp_path / "out.dcm") - noise(40)).max() <= 0.5


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write_npy(path := tmp_path / "old", np.zeros((2, 2), np.float32))
    before, hu = path.read_bytes(), noise(99)
    for write in (
        lambda: write_npy(path, hu),
        lambda: write_png(path, hu, window=(-1100, 3000)),
        lambda: write_dicom(path, hu, series_uid="1.2", **WORDS),
    ):
        with pytest.raises(DataError, match="old exists already and is not overwritten"):
            write()
    assert [it.read_bytes() for it in tmp_path.iterdir()] == [before]


def test_inputs_of_a_folder(make_ct: Any, body_hu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_ct(tmp_path / "in" / "a", np.stack([body_hu(), body_hu()]))
    np.save(tmp_path / "in" / "b.npy", body_hu(30, 50))
    np.save(tmp_path / "in" / "gone.npy", body_hu())
    (tmp_path / "in" / "c.txt").write_text("hello")
    files = input_files(tmp_path / "in")
    (tmp_path / "in" / "gone.npy").unlink()
    pieces = [*read_slices(tmp_path / "in", files)]
    assert [piece.info.name for piece in pieces] == ["a#0", "a#1", "b.npy"]
    assert pieces[2].hu.shape == (30, 50)
    said = capsys.readouterr().err
    assert "(1 not DICOM; 1 not a whole .npy array of numbers (FileNotFoundError)): c.txt, gone.npy" in said


def test_values_that_are_no_hu_are_skipped(body_hu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "unsigned.npy", np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32))
    np.save(tmp_path / "unit.npy", np.linspace(0, 1, 1024, dtype=np.float32).reshape(32, 32))
    np.save(tmp_path / "slice.npy", body_hu())
    assert [piece.info.name for piece in slices(tmp_path)] == ["slice.npy"]
    said = capsys.readouterr().err
    assert "1 no air, −1000 HU: give kind=sinograms if it is a scan" in said
    assert "which are no HU): unit.npy, unsigned.npy" in said
