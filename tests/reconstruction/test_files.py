"""Reading slices to reconstruct, and writing reconstructions."""

import errno
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.dataset import Dataset
from pydicom.uid import generate_uid

from qnmixer.data.cache import to_square
from qnmixer.data.slices import Slice
from qnmixer.errors import DataError
from qnmixer.physics.units import FloatArray
from qnmixer.reconstruction.input_slices import read_slices, slice_files
from qnmixer.reconstruction.writers import write_dicom, write_npy, write_png

from ..data.conftest import body_hu, make_ct

WORDS: dict[str, Any] = {"description": "Derived by QN-Mixer from 32 simulated sparse views"}


def hu_of(path: Path) -> Any:
    dataset = dcmread(path)
    return dataset.pixel_array * float(dataset.RescaleSlope) + float(dataset.RescaleIntercept)


def slices(path: Path) -> list[Slice]:
    return [*read_slices(path, slice_files(path))]


def noise(size: int) -> FloatArray:
    return np.random.default_rng(0).uniform(-1100, 3000, (size, size)).astype(np.float32)


def test_dicom_keeps_the_patient_and_says_that_it_is_derived(tmp_path: Path) -> None:
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
    assert out.SourceImageSequence[0].ReferencedSOPInstanceUID == source.SOPInstanceUID
    assert not {element.keyword for element in out} & {  # these belonged to the pixels of the source
        "PixelPaddingValue", "ConvolutionKernel", "PresentationLUTShape", "ICCProfile", "VOILUTSequence",
        "OriginalAttributesSequence", "DataSetTrailingPadding",
    }  # fmt: skip
    assert b"EARLIER" not in (tmp_path / "out.dcm").read_bytes()
    assert np.abs(hu_of(tmp_path / "out.dcm") - noise(20)).max() <= 0.5


@pytest.mark.parametrize(("shape", "spacing", "new", "first"), [
    ((40, 60), [0.8, 0.8], [2.4, 2.4], [-10 + 0.8, -20 + 0.8 - 10 * 0.8, 30]),  # padded to a square of 60
    ((40, 40), [60, 30], [120, 60], [5, 10, 30]),  # not believed: taken for square pixels
    (None, None, [1.5625, 1.5625], [0, 0, 0]),  # no source
])  # fmt: skip
def test_a_point_lies_at_the_same_millimetres_before_and_after(
    tmp_path: Path, shape: Any, spacing: Any, new: list[float], first: list[float]
) -> None:
    template = None
    if shape is not None:
        make_ct(tmp_path / "in.dcm", body_hu(*shape), PixelSpacing=spacing, ImagePositionPatient=[-10, -20, 30])
        (source,) = slices(tmp_path / "in.dcm")
        template = source.template
    write_dicom(tmp_path / "out.dcm", noise(20), template=template, series_uid="1.2", pixel_spacing=1.5625, **WORDS)
    out = dcmread(tmp_path / "out.dcm")
    assert list(out.PixelSpacing) == pytest.approx(new)
    assert list(out.ImagePositionPatient) == pytest.approx(first)
    assert (out.Rows, out.Columns) == (20, 20)


def test_multi_frame_source_gives_single_frames(tmp_path: Path) -> None:
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
    assert out.SourceImageSequence[0].ReferencedFrameNumber == 2
    assert out.RescaleIntercept == -1024
    assert np.abs(hu_of(tmp_path / "out.dcm") - noise(40)).max() <= 0.5


def test_every_real_file_round_trips(real_ct: Path, tmp_path: Path) -> None:
    """Read, resample, write, read: HU within 0.5, and pydicom finds nothing to complain about."""
    found = slices(real_ct / "dicom_odd")
    assert len(found) == 9
    for number, piece in enumerate(found):
        hu, path = to_square(piece.hu, 256), tmp_path / f"{number}.dcm"
        write_dicom(path, hu, template=piece.template, frame=piece.info.frame, series_uid=generate_uid(), **WORDS)
        assert np.abs(hu_of(path) - hu).max() <= 0.5
        out = dcmread(path)
        assert str(out)  # every element can be read
        assert out.PatientName == piece.template.PatientName


def test_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """Under a file-size limit every writer fails as on a full disk: no half file, the earlier one intact."""
    write_npy(tmp_path / "old", np.zeros((2, 2), np.float32))
    before, hu = (tmp_path / "old").read_bytes(), noise(99)
    writers = (
        lambda path: write_npy(path, hu),
        lambda path: write_png(path, hu, window=(-1100, 3000)),
        lambda path: write_dicom(path, hu, series_uid="1.2", **WORDS),
    )
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        for write in writers:
            with pytest.raises(OSError, match="too large") as error:
                write(tmp_path / "new")
            assert error.value.errno == errno.EFBIG
            with pytest.raises(DataError, match="old exists already and is not overwritten"):
                write(tmp_path / "old")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_bytes() == before


def test_inputs_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_ct(tmp_path / "in" / "a", np.stack([body_hu(), body_hu()]))
    np.save(tmp_path / "in" / "b.npy", body_hu(30, 50))
    np.save(tmp_path / "in" / "gone.npy", body_hu())
    (tmp_path / "in" / "c.txt").write_text("hello")
    files = slice_files(tmp_path / "in")
    (tmp_path / "in" / "gone.npy").unlink()
    pieces = [*read_slices(tmp_path / "in", files)]
    assert [piece.info.name for piece in pieces] == ["a#0", "a#1", "b.npy"]
    assert pieces[0].template is not None
    assert pieces[2].template is None
    assert pieces[2].hu.shape == (30, 50)
    said = capsys.readouterr().err
    assert "(1 not DICOM; 1 unreadable (FileNotFoundError)): c.txt, gone.npy" in said
    assert "HU (air" not in said


def test_the_usable_parts_of_a_directly_named_file_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = make_ct(tmp_path / "a.dcm", np.stack([body_hu(), body_hu()]))
    dataset.PerFrameFunctionalGroupsSequence[0].PixelValueTransformationSequence[0].RescaleSlope = 0
    dataset.save_as(tmp_path / "a.dcm")
    assert [piece.info.name for piece in slices(tmp_path / "a.dcm")] == ["a.dcm#1"]
    assert capsys.readouterr().err.endswith("give no HU): a.dcm#0\n")


def test_unsigned_values_are_skipped_and_no_air_is_doubted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "unsigned.npy", np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32))
    np.save(tmp_path / "unit.npy", np.linspace(0, 1, 1024, dtype=np.float32).reshape(32, 32))
    assert [piece.info.name for piece in slices(tmp_path)] == ["unit.npy"]
    skipped, doubted = capsys.readouterr().err.splitlines()
    assert "which are no HU): unsigned.npy" in skipped
    assert "is this really in HU" in doubted
