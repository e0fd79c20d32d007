from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import dcmread, dcmwrite
from pydicom.uid import UID, DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian, RLELossless
from tests.compressed import compressed
from tests.limits import within_limits

from qnmixer.data.dicom import DicomReader, decode_frame, open_ct
from qnmixer.data.slices import SkipFile, Slice

from .conftest import body_hu, item, make_ct


def read(path: Path) -> list[Slice]:
    return list(DicomReader().read(path.parent, path.name))


def test_hu_follow_the_rescale_tags_and_content_tells_a_file(tmp_path: Path) -> None:
    make_ct(tmp_path / "photo.jpg", body_hu(), RescaleSlope=2, RescaleIntercept=-500)
    np.testing.assert_array_equal(read(tmp_path / "photo.jpg")[0].hu, 2 * (body_hu() + 1024) - 500)


def test_multi_frame_uses_each_frames_own_rescale_and_position(tmp_path: Path) -> None:
    hu = np.stack([body_hu(), body_hu(seed=9)])
    make_ct(tmp_path / "multi.dcm", hu)
    slices = read(tmp_path / "multi.dcm")
    np.testing.assert_array_equal(slices[0].hu, hu[0])
    np.testing.assert_array_equal(slices[1].hu, hu[1] - 100)
    assert [s.info.name for s in slices] == ["multi.dcm#0", "multi.dcm#1"]
    assert [s.info.position for s in slices] == [30, 28]


@pytest.mark.parametrize("padding", [-2000, -32768, -31000, 30000])
def test_padding_that_no_tissue_has_is_air_everywhere(tmp_path: Path, padding: int) -> None:
    hu = body_hu()
    hu[:5] = hu[20, 20] = padding - 1024
    make_ct(tmp_path / "a", hu, PixelPaddingValue=padding)
    found = read(tmp_path / "a")[0].hu
    assert (found[:5] == -1000).all()
    assert found[20, 20] == -1000


@pytest.mark.parametrize(("shift", "tags"), [
    (0, {"PixelPaddingValue": 0}),  # signed HU: water
    (1024, {"PixelPaddingValue": 1024, "PixelRepresentation": 0}),
    (0, {"PixelPaddingValue": 0, "PixelPaddingRangeLimit": 0}),
])  # fmt: skip
def test_padding_of_a_value_that_tissue_has_is_none_inside(tmp_path: Path, shift: int, tags: dict[str, Any]) -> None:
    """It is air where it fills the corners, such as around a round field of view; inside, it is tissue."""
    stored = body_hu() + shift
    stored[18:22, 10:14] = shift
    y, x = np.mgrid[:40, :40] - 19.5
    for outside in (np.zeros((40, 40), bool), x**2 + y**2 > 20**2):
        pixels = np.where(outside, shift, stored).astype("<i2").tobytes()
        make_ct(tmp_path / "a", stored, RescaleIntercept=-shift, PixelData=pixels, **tags)
        np.testing.assert_array_equal(read(tmp_path / "a")[0].hu, np.where(outside, -1000, stored - shift))
    make_ct(tmp_path / "a", body_hu(), PixelPaddingValue=-2000, PixelPaddingRangeLimit=1100)  # not believed
    np.testing.assert_array_equal(read(tmp_path / "a")[0].hu, body_hu())


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(("sign", "low", "shift", "right"), [
    (0, 0, 0, True), (1, -1024, 0, True), (0, 0, 4, False), (1, 0, 4, False), (0, 3000, 0, False),
])  # fmt: skip
def test_bits_beyond_those_stored_are_looked_at(
    tmp_path: Path, sign: int, low: int, shift: int, right: bool, compress: bool
) -> None:
    """HighBit may be wrong, and the pixels may be where it says: only what fits BitsStored is read."""
    stored = (body_hu() + 1000 + low).astype("<i2")
    hu = stored - 1000.0 - low
    pixels = (stored << shift).tobytes()
    tags = {"RescaleIntercept": -1000 - low, "PixelRepresentation": sign, "BitsStored": 12, "HighBit": 15}
    dataset = make_ct(tmp_path / "a", hu, PixelData=pixels, **tags)
    if compress:
        dataset.compress(RLELossless)
        dataset.save_as(tmp_path / "a")
    if right:
        np.testing.assert_array_equal(read(tmp_path / "a")[0].hu, hu)
    else:
        with pytest.raises(SkipFile, match="values need more than its 12 bits \\(BitsStored\\)"):
            read(tmp_path / "a")


@pytest.mark.parametrize("what", ["padding", "overlay", "no sign"])
def test_what_else_may_be_in_bits_beyond_those_stored(tmp_path: Path, what: str) -> None:
    hu = body_hu()
    tags: dict[str, Any] = {"RescaleIntercept": -1000, "PixelRepresentation": 0, "BitsStored": 12, "HighBit": 11}
    stored = (hu + 1000).astype("<u2")
    if what == "no sign":  # of negative values in the other bits
        stored, tags["RescaleIntercept"], tags["PixelRepresentation"] = hu.astype("<i2") & 0xFFF, 0, 1
    else:
        stored[0] = stored[0] | 1 << 15
    if what == "padding":
        tags["PixelPaddingValue"], hu[0] = int(stored[0, 0]), -1000
    dataset = make_ct(tmp_path / "a", hu, PixelData=stored.tobytes(), **tags)
    if what == "overlay":
        dataset.add_new((0x6000, 0x0102), "US", 15)  # OverlayBitPosition
        dataset.save_as(tmp_path / "a")
    np.testing.assert_array_equal(read(tmp_path / "a")[0].hu, hu)


@pytest.mark.parametrize(("orientation", "axial"), [
    ([1, 0, 0, 0, 0, -1], False),  # coronal
    ([0, 1, 0, 0, 0, -1], False),  # sagittal
    ([1, 0, 0, 0, 0.7, -0.7], False),
    ([1, 0, 0, 0, 0.8660254, -0.5], True),  # a gantry tilts by up to 30°
    ([-1, 0, 0, 0, -1, 0], True), ([0.5, 0, 0, 0, 0.5, 0], True),
    ([0, 0, 0, 0, 0, 0], True),  # says nothing
])  # fmt: skip
@pytest.mark.parametrize("n_frames", [1, 2])
def test_only_axial_planes_are_read(tmp_path: Path, orientation: list[float], axial: bool, n_frames: int) -> None:
    dataset = make_ct(tmp_path / "a", np.stack([body_hu()] * n_frames) if n_frames > 1 else body_hu())
    its = dataset.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0] if n_frames > 1 else dataset
    its.ImageOrientationPatient = orientation
    dataset.save_as(tmp_path / "a")
    if axial:
        assert len(read(tmp_path / "a")) == n_frames
    else:
        with pytest.raises(SkipFile, match="not an axial plane"):
            read(tmp_path / "a")


def test_zeros_at_the_end_of_a_file_take_no_time(tmp_path: Path) -> None:
    """A file may be long and take no room on the disk: gigabytes of zeros would be 100 million tags."""
    make_ct(tmp_path / "a", body_hu())
    with (tmp_path / "a").open("r+b") as stream:
        stream.truncate(2**28)
    with within_limits():
        np.testing.assert_array_equal(read(tmp_path / "a")[0].hu, body_hu())


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, ExplicitVRLittleEndian])
@pytest.mark.parametrize("without", ["header", "syntax"])
def test_a_file_without_its_header_is_read(tmp_path: Path, without: str, syntax: UID) -> None:
    """As planning systems write them. A folder of them had no usable slice."""
    dataset = make_ct(tmp_path / "a", body_hu())
    if without == "header":
        del dataset.file_meta
        dataset.preamble = None
    else:
        del dataset.file_meta.TransferSyntaxUID
    encoding = {"implicit_vr": syntax.is_implicit_VR, "little_endian": True}
    dcmwrite(tmp_path / "a", dataset, **encoding)
    assert ((tmp_path / "a").read_bytes()[128:132] == b"DICM") == (without == "syntax")
    np.testing.assert_array_equal(read(tmp_path / "a")[0].hu, body_hu())
    with (tmp_path / "a").open("r+b") as stream:
        stream.truncate((tmp_path / "a").stat().st_size - 500)
    with pytest.raises(SkipFile, match="1 frames and pixel data of 0, perhaps truncated"):
        read(tmp_path / "a")


def test_compressed_pixels_without_a_syntax_are_not_guessed(tmp_path: Path) -> None:
    dataset = make_ct(tmp_path / "a")
    dataset.compress(RLELossless)
    del dataset.file_meta.TransferSyntaxUID
    dcmwrite(tmp_path / "a", dataset, implicit_vr=False, little_endian=True)
    with pytest.raises(SkipFile, match="no TransferSyntaxUID says how"):
        read(tmp_path / "a")


@pytest.mark.parametrize("content", [
    b"\x08\0", b"\x08\0\x16\0" * 9999, b"\x08\0\x16\0\x04\0\0\0ab.c" * 999, b"\x08\0\x16\0\xff\xff\xff\xff" * 999,
    b"\x08\0\x05\0\xff\xff\xff\x7f" + bytes(9999), np.full(9999, 8, "<i2").tobytes(),
    b"\x08\0\x05\0CS" + bytes(range(256)) * 99, b"hello" * 100,
])  # fmt: skip
def test_other_bytes_that_begin_as_tags_are_not_dicom(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with within_limits(), pytest.raises(SkipFile, match=r"^not DICOM$"):
        read(tmp_path / "a")


def test_a_deflated_file_is_not_unpacked(tmp_path: Path) -> None:
    """It may be of any size then."""
    dataset = make_ct(tmp_path / "a")
    dataset.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    dataset.save_as(tmp_path / "a", enforce_file_format=True)
    with pytest.raises(SkipFile, match="deflated"):
        read(tmp_path / "a")


@pytest.mark.parametrize(("tags", "reason"), [
    ({"RescaleSlope": None}, "RescaleSlope"),
    ({"RescaleIntercept": None}, "RescaleSlope"),
    ({"Modality": "MR"}, "not a CT image"),
    ({"SOPClassUID": "1.2.840.10008.5.1.4.1.1.7"}, "not a CT image"),
    ({"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"]}, "localizer"),
    ({"PixelData": None}, "no pixel data"),
    ({"PixelSpacing": [0.8, 0.7]}, "pixels that are not square"),
    ({"PhotometricInterpretation": "RGB"}, "a colour image"),  # JPEG 2000 of these can end a decoder
    ({"RescaleType": "Z_EFF"}, "RescaleType Z_EFF, not HU"),
    ({"RescaleType": "US", "ImageType": ["DERIVED", "SECONDARY", "AXIAL"]}, "RescaleType US, not HU"),
    ({"RescaleType": "US", "ImageType": "DERIVED"}, "RescaleType US, not HU"),
    ({"RescaleType": "US", "ImageType": None}, "RescaleType US, not HU"),
    ({"RescaleType": "US", "MultienergyCTAcquisition": "YES"}, "RescaleType US, not HU"),
])  # fmt: skip
def test_files_of_no_use_say_why(tmp_path: Path, tags: dict[str, Any], reason: str) -> None:
    make_ct(tmp_path / "a", **tags)
    with pytest.raises(SkipFile, match=reason):
        read(tmp_path / "a")


@pytest.mark.parametrize("tags", [
    *({"ImageType": words} for words in (
        ["ORIGINAL", "PRIMARY", "AXIAL", "CT_SOM5 SPI"], ["ORIGINAL", "PRIMARY", "AXIAL", "ADD"],
        ["DERIVED", "SECONDARY", "AXIAL", "CT_SOM5 MPR"], ["DERIVED", "SECONDARY", "REFORMATTED", "AVERAGE"],
        ["DERIVED", "PRIMARY", "VOLUME", "MEAN"], ["DERIVED", "PRIMARY", "VOLUME", "RESAMPLED"],
        ["DERIVED", "PRIMARY", "AXIAL", "VMI"], ["ORIGINAL", "PRIMARY", "MIPLEX"], "DERIVED", None,
    )),
    {"RescaleType": "US"},  # as GDCM leaves them
    {"RescaleType": "US", "ImageType": "ORIGINAL"},
    {"RescaleType": "HU", "ImageType": ["DERIVED", "SECONDARY", "AXIAL"]},
    {"ImageType": ["DERIVED", "SECONDARY", "AXIAL"]},  # none: DICOM asks for a type where it is not HU
    {"RescaleType": ""},
], ids=str)  # fmt: skip
def test_what_dicom_takes_for_hu_is_read(tmp_path: Path, tags: dict[str, Any]) -> None:
    make_ct(tmp_path / "a", body_hu(), **tags)
    np.testing.assert_array_equal(read(tmp_path / "a")[0].hu, body_hu())


def test_the_type_of_a_frame_counts(tmp_path: Path) -> None:
    """A file of mixed frames: one of a scanner, and a map of blood flow that was computed of them."""
    dataset = make_ct(tmp_path / "multi.dcm", np.stack([body_hu(), body_hu()]), ImageType=["MIXED", "PRIMARY"])
    for group, words in zip(dataset.PerFrameFunctionalGroupsSequence, ("ORIGINAL NONE", "DERIVED RCBF"), strict=True):
        group.PixelValueTransformationSequence[0].RescaleType = "US"
        group.CTImageFrameTypeSequence = [item(FrameType=words.replace(" ", " PRIMARY PERFUSION ").split())]
    dataset.save_as(tmp_path / "multi.dcm")
    opened = open_ct(tmp_path / "multi.dcm")
    np.testing.assert_array_equal(decode_frame(opened, 0), body_hu())
    with pytest.raises(SkipFile, match="RescaleType US, not HU"):
        decode_frame(opened, 1)


@pytest.mark.parametrize("words", [
    ["DERIVED", "SECONDARY", "AXIAL", "CT_SOM5 MIP"], ["DERIVED", "PRIMARY", "AXIAL", "MAXIMUM"],
    ["DERIVED", "SECONDARY", "MIN IP"], ["DERIVED", "PRIMARY", "AXIAL", "SUBTRACTION"],
    ["DERIVED", "SECONDARY", "AXIAL", "DE_IODINE"], ["DERIVED", "PRIMARY", "VOLUME", "MAT_SPECIFIC"],
    ["DERIVED", "PRIMARY", "GSI", "WATER IODINE"], ["DERIVED", "SECONDARY", "SCREEN SAVE"],
    ["ORIGINAL", "PRIMARY", "SCREEN SAVE"], ["DERIVED", "PRIMARY", "AXIAL", "RCBF"],
], ids="-".join)  # fmt: skip
@pytest.mark.parametrize("n_frames", [1, 2])
def test_images_computed_of_slices_are_taken_if_asked_for(tmp_path: Path, words: list[str], n_frames: int) -> None:
    dataset = make_ct(tmp_path / "a", np.stack([body_hu()] * n_frames) if n_frames > 1 else body_hu(), ImageType=words)
    if n_frames > 1:  # one frame of it
        dataset.ImageType = [words[0], "PRIMARY", "VOLUME", "MIXED"]
        group = dataset.PerFrameFunctionalGroupsSequence[1]
        group.CTImageFrameTypeSequence = [item(FrameType=words)]
        dataset.save_as(tmp_path / "a")
    pieces = DicomReader().read(tmp_path, "a")
    assert len([*islice(pieces, n_frames - 1)]) == n_frames - 1
    with pytest.raises(SkipFile, match=r"^a derived image \("):
        next(pieces)
    assert len([*DicomReader(derived=True).read(tmp_path, "a")]) == n_frames


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("where", ["FrameType", "SharedFrameType", "ImageType", "SCOUT"])
def test_a_localizer_is_never_taken(tmp_path: Path, where: str, derived: bool) -> None:
    dataset = make_ct(tmp_path / "a", np.stack([body_hu(), body_hu()]))
    words = ["ORIGINAL", "PRIMARY", "SCOUT" if where == "SCOUT" else "LOCALIZER", "NONE"]
    dataset.ImageType = words if where == "ImageType" else ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
    if where != "ImageType":
        shared, last = dataset.SharedFunctionalGroupsSequence[0], dataset.PerFrameFunctionalGroupsSequence[1]
        group = shared if where == "SharedFrameType" else last
        group.CTImageFrameTypeSequence = [item(FrameType=words)]
    dataset.save_as(tmp_path / "a")
    opened = open_ct(tmp_path / "a")
    for frame in range(2):
        if frame == 0 and where in ("FrameType", "SCOUT"):
            np.testing.assert_array_equal(decode_frame(opened, frame, derived=derived), body_hu())
        else:
            with pytest.raises(SkipFile, match=r"^a localizer$"):
                decode_frame(opened, frame, derived=derived)


@pytest.mark.parametrize(
    "name", ["JPEG2000Lossless", "JPEGLSLossless", "JPEGLosslessProcess14", "JPEGLosslessProcess14_1", "RLELossless"]
)
def test_what_gdcm_encodes_decodes_exactly(tmp_path: Path, name: str) -> None:
    make_ct(tmp_path / "a", body_hu(33, 41))
    compressed(tmp_path / "a", tmp_path / "b", name)
    assert dcmread(tmp_path / "b").file_meta.TransferSyntaxUID.is_compressed
    np.testing.assert_array_equal(read(tmp_path / "b")[0].hu, body_hu(33, 41))
    data = (tmp_path / "b").read_bytes()
    (tmp_path / "b").write_bytes(data[: len(data) * 9 // 10])
    with pytest.raises(SkipFile):
        read(tmp_path / "b")


def test_every_real_file_decodes(real_ct: Path) -> None:
    expected = read(real_ct / "dicom_odd/CTImage.dcm")[0].hu
    for file in sorted(real_ct.glob("dicom*/**/*")):
        if file.is_file() and file.name != "eCT_Supplemental.dcm":
            for piece in read(file):
                assert piece.hu.max() > 100, file
                if file.name.startswith("CTImage.dcm"):  # six encodings of one slice
                    np.testing.assert_array_equal(piece.hu, expected)
    with pytest.raises(SkipFile, match="RescaleType US, not HU"):  # two maps of blood flow
        read(real_ct / "dicom_odd/eCT_Supplemental.dcm")
    hu = read(real_ct / "dicom_odd/J2K_pixelrep_mismatch.dcm")[0].hu  # a wrong sign in its stream
    assert (hu[0, 0], hu[256, 255], hu.max()) == (-2000, 30, 1896)
