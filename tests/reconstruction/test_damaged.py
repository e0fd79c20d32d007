"""Damaged files: each is read correctly or skipped with a reason, and nothing else happens."""

import io
import random
import warnings
import zlib
from collections.abc import Iterator
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.dataelem import RawDataElement
from pydicom.pixels.utils import pixel_array
from pydicom.tag import Tag
from pydicom.uid import JPEGLSLossless, RLELossless
from tests.compressed import compressed
from tests.limits import within_limits

from qnmixer.data.dicom import DicomReader
from qnmixer.data.slices import SkipFile, Slice
from qnmixer.errors import DataError
from qnmixer.reconstruction.input_slices import read_slices, slice_files
from qnmixer.reconstruction.writers import write_dicom

from ..data.conftest import body_hu, make_ct

TAGS: dict[str, tuple[int, str, list[bytes]]] = {
    "RescaleSlope": (0x00281053, "DS", [b"abc", b"1,5", b"1\\2", b"0", b"nan", b"1e30"]),
    "RescaleIntercept": (0x00281052, "DS", [b"abc", b"1\\2", b"inf"]),
    "NumberOfFrames": (0x00280008, "IS", [b"abc", b"1\\2", b"1000000", b"2000000000", b"-1"]),
    "PixelSpacing": (0x00280030, "DS", [b"abc", b"1", b"1\\2\\3", b"nan\\nan", b"1e400\\1", b"0\\0"]),
    "ImagePositionPatient": (0x00200032, "DS", [b"a\\b\\c", b"1\\2", b"1\\2\\3\\4", b"nan\\0\\0"]),
    "ImageOrientationPatient": (0x00200037, "DS", [b"1", b"1\\0\\0\\0\\1", b"nan\\0\\0\\0\\1\\0"]),
    "SeriesNumber": (0x00200011, "IS", [b"abc", b"1\\2"]),
    "WindowCenter": (0x00281050, "DS", [b"abc"]),
    "PatientID": (0x00100020, "ZZ", [b"P1"]),
    "StudyInstanceUID": (0x0020000D, "ZZ", [b"1.2"]),
    "StationName": (0x00081010, "ZZ", [b"CT01"]),
    "PixelPaddingValue": (0x00280120, "ZZ", [b"\0\0"]),
    "PhotometricInterpretation": (0x00280004, "CS", [b"RGB", b"YBR_FULL"]),
    "Rows": (0x00280010, "US", [b"\xff\xff", b"\0\0"]),
    "BitsAllocated": (0x00280100, "US", [b"\0\0", b"\x07\0", b"\x20\0"]),
}
DESCRIBING = {"PixelSpacing", "ImageOrientationPatient", "SeriesNumber", "WindowCenter", "StationName"}
"""Tags without which a slice is what it is."""


def with_tag(good: Path, path: Path, keyword: str, value: bytes) -> Path:
    number, vr, _ = TAGS[keyword]
    dataset, tag = dcmread(good), Tag(number)
    padded = value + b" " * (len(value) % 2)
    dataset._dict[tag] = RawDataElement(tag, vr, len(padded), padded, 0, False, True)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=False)
    return path


def damages(good: Path, count: int, rng: random.Random) -> Iterator[bytes]:
    """Files with some bytes replaced, in the tags or in the pixels, or cut."""
    raw = good.read_bytes()
    pixels = max(raw.find(b"\xe0\x7f\x10\x00"), 400)
    for number in range(count):
        if number % 6 == 5:
            yield raw[: rng.randrange(100, len(raw))]
            continue
        damaged = bytearray(raw)
        for _ in range(rng.choice((1, 1, 2, 4, 8))):
            low, high = (132, pixels) if number % 3 else (pixels + 8, len(raw))
            damaged[rng.randrange(low, high)] = rng.randrange(256)
        yield bytes(damaged)


def right_hu(path: Path, frame: int) -> Any:
    """HU as pydicom has them of the same tags."""
    dataset = dcmread(path)
    raw = pixel_array(dataset, index=frame)
    rescale: Any = dataset
    if "PerFrameFunctionalGroupsSequence" in dataset:
        rescale = dataset.PerFrameFunctionalGroupsSequence[frame].PixelValueTransformationSequence[0]
    hu = raw * float(rescale.RescaleSlope) + float(rescale.RescaleIntercept)
    return np.where((hu < -1024) | (raw == dataset.get("PixelPaddingValue")), -1000, hu)


def read(folder: Path) -> list[Slice]:
    """The slices of a folder, written as `reconstruct` does, and read as a cache is built; no exception but ours."""
    found: list[Slice] = []
    with suppress(DataError), redirect_stderr(io.StringIO()) as told:
        for piece in read_slices(folder, slice_files(folder)):
            found.append(piece)
            target = folder.with_name("written") / f"{len(found)}.dcm"
            target.unlink(missing_ok=True)
            write_dicom(
                target, piece.hu, series_uid="1.2", description="", template=piece.template, frame=piece.info.frame
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert str(dcmread(target))
    assert [line for line in told.getvalue().splitlines() if not line.startswith("warning: ")] == []
    for file in folder.iterdir():
        with suppress(SkipFile):
            for _ in DicomReader().read(folder, file.name):
                pass
    return found


@pytest.mark.parametrize("kind", ["plain", "enhanced", "RLE", "JPEG-LS", "JPEG 2000"])
def test_no_damaged_dicom_ends_a_run_or_has_other_hu(tmp_path: Path, kind: str) -> None:
    """50 damages of each kind, seeded."""
    hu = body_hu(16, 16)
    dataset = make_ct(tmp_path / "good", np.stack([hu, hu]) if kind == "enhanced" else hu)
    if kind in ("RLE", "JPEG-LS"):
        dataset.compress({"RLE": RLELossless, "JPEG-LS": JPEGLSLossless}[kind])
        dataset.save_as(tmp_path / "good")
    elif kind == "JPEG 2000":
        compressed(tmp_path / "good", tmp_path / "good")
    file = tmp_path / "folder" / "a.dcm"
    file.parent.mkdir()
    n_read = 0
    for content in damages(tmp_path / "good", 50, random.Random(0)):
        file.write_bytes(content)
        with within_limits():
            found = read(file.parent)
        n_read += len(found)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for piece in found:
                np.testing.assert_allclose(piece.hu, right_hu(file, piece.info.frame), rtol=1e-5)
    assert n_read > 5


@pytest.mark.parametrize("keyword", TAGS)
def test_an_odd_tag_skips_its_file_or_is_left_out(tmp_path: Path, keyword: str) -> None:
    for number, value in enumerate(TAGS[keyword][2]):
        folder = tmp_path / str(number)
        make_ct(folder / "good.dcm")
        with_tag(folder / "good.dcm", folder / "odd.dcm", keyword, value)
        with within_limits():
            found = read(folder)
        assert "good.dcm" in [piece.info.name for piece in found]
        if keyword in DESCRIBING:
            assert len(found) == 2
            np.testing.assert_array_equal(found[0].hu, found[1].hu)


def png_of(width: int, height: int) -> bytes:
    """A 16-bit grey PNG that says so large a size, and holds next to nothing."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([16, 0, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


def test_too_large_slices_are_skipped_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = "{{'descr': '{}', 'fortran_order': False, 'shape': {}, }}"
    for name, kind, shape, size in (
        ("a.npy", "|i1", (30_000, 30_000), 900_000_000),
        ("b.npy", "|i1", (65_535, 65_535), 65_535**2),
        ("c.npy", "|i1", (3_000_000, 1, 1), 3_000_000),
        ("d.npy", "<f4", "(16, 16", 1024),
        ("e.npy", "<f4", (True, 4), 16),
    ):
        text = header.format(kind, shape).ljust(117) + "\n"
        (tmp_path / name).write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode())
        with (tmp_path / name).open("r+b") as stream:
            stream.truncate(10 + len(text) + size)  # sparse
    (tmp_path / "f.png").write_bytes(png_of(13_000, 13_000))
    (tmp_path / "g.png").write_bytes(png_of(13_500, 13_500))
    np.save(tmp_path / "good.npy", body_hu(16, 16))
    with within_limits():
        assert [piece.info.name for piece in read_slices(tmp_path, slice_files(tmp_path))] == ["good.npy"]
    assert "skipped 7 of its files" in capsys.readouterr().err
