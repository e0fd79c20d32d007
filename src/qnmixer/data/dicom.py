"""CT in DICOM: find CT images among files, and read their pixels in HU, their patient and their position."""

import io
import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydicom.dataset import Dataset, FileDataset
from pydicom.encaps import parse_basic_offsets, parse_fragments
from pydicom.errors import InvalidDicomError
from pydicom.filereader import read_file_meta_info, read_partial
from pydicom.pixels.utils import pixel_array
from pydicom.uid import (
    UID,
    CTImageStorage,
    DeflatedExplicitVRLittleEndian,
    EnhancedCTImageStorage,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000TransferSyntaxes,
    JPEGLSTransferSyntaxes,
    LegacyConvertedEnhancedCTImageStorage,
)

from qnmixer.data.decoder import decode_apart
from qnmixer.data.slices import DERIVED, OpenFile, SkipFile, Slice, SliceInfo, reading, require_size
from qnmixer.physics.units import AIR, FloatArray

_SLOPES = 1e-3, 1e3  # the range of plausible rescale slopes: with any other, 16 bits cannot hold HU
_SPACINGS = 0.01, 20.0  # the range of plausible pixel sizes of CT, in mm
_LEAST_AXIAL = 0.8  # the cosine of the largest angle to an axial plane, 37°; a gantry tilts by up to 30°
_OVERLAY_BIT = 0x6000, 0x0102
_DENSEST_TISSUE = 3071.0  # HU, the largest value of 12 bits
CT_CLASSES = CTImageStorage, EnhancedCTImageStorage, LegacyConvertedEnhancedCTImageStorage
_SOP_CLASS, _IMAGES = 0x00080016, "1.2.840.10008.5.1.4.1.1."
"""The tag of SOPClassUID, and how the classes of images begin."""
_PIXELS = "PixelData", "FloatPixelData", "DoubleFloatPixelData"
_LOCALIZERS = re.compile(r"(?<![A-Z0-9])(?:LOCALI[SZ]ER|SCOUT|TOPOGRAM|SURVIEW|SCANOGRAM)(?![A-Z0-9])")
_COMPUTED = re.compile(
    r"(?<![A-Z0-9])(?:"
    r"M(?:AX|IN)?[ _]?IP|MAXIMUM|MINIMUM|PROJECTION|VRT|SSD"
    r"|ADDITION|SUBTRACT(?:ION|ED)|DIVISION|MULTIPLICATION|STD_DEVIATION|T_TEST|Z_SCORE"
    r"|IODINE|WATER|CALCIUM|URIC_?ACID|MAT_SPECIFIC|MAT_FRACTIONAL|MAT_VALUE_BASED"
    r"|EFF_ATOMIC_NUM|Z[ _]?EFF(?:ECTIVE)?|ELECTRON[ _]DENSITY|R?CBF|R?CBV|MTT|TTP|TMAX"
    r"|SCREEN[ _]?(?:SAVE|SHOT|CAPTURE)|DOSE[ _]?(?:REPORT|INFO)"
    r")(?![A-Z0-9])"
)
"""Words of ImageType and FrameType: DICOM's (PS3.3 C.8.16.1.4 and C.8.15.2.1.1) and those of scanners."""
_NAMES = "PatientID", "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "InstanceNumber"
"""Tags that identify patient, series and slice. A file in which one of these is unreadable is not used."""


def open_ct(path: Path) -> FileDataset:
    """Read one file and check that it is a CT image. Raises SkipFile with the reason if it is not."""
    with reading("unreadable"):
        try:
            dataset = _opened(path)
        except InvalidDicomError:
            raise SkipFile("not DICOM") from None
        _require_ct(dataset)
        for keyword in _NAMES:
            dataset.get(keyword)
    return dataset


def _opened(path: Path) -> FileDataset:
    """`dcmread` of a file, but zeros at the end are not taken for tags. A deflated file is refused.

    Planning systems leave out the header, or the transfer syntax in it. Then the tags show how they are encoded.
    """
    with path.open("rb") as stream:
        has_header = stream.read(132)[128:] == b"DICM"
        if not has_header:
            _require_tags(stream)
        # No scanner deflates, and a small file could unpack to gigabytes.
        elif read_file_meta_info(path).get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
            raise SkipFile("deflated")
        stream.seek(0)
        dataset = read_partial(stream, lambda tag, *_: tag == 0, force=not has_header)
    if "TransferSyntaxUID" not in dataset.file_meta:
        if "PixelData" in dataset and dataset["PixelData"].is_undefined_length:
            raise SkipFile("compressed, and no TransferSyntaxUID says how")
        is_implicit, is_little_endian = dataset.original_encoding
        little_endian = ImplicitVRLittleEndian if is_implicit else ExplicitVRLittleEndian
        dataset.file_meta.TransferSyntaxUID = little_endian if is_little_endian else ExplicitVRBigEndian
    return dataset


def _require_tags(stream: BinaryIO) -> None:
    """Raise InvalidDicomError unless a file without a header begins with tags that name a class of DICOM images."""
    stream.seek(0)
    if stream.read(2) == b"\x08\0":  # group 0008, which every image has
        stream.seek(0)
        with suppress(Exception):  # other bytes make pydicom raise anything
            start = read_partial(stream, lambda tag, *_: tag == 0 or tag > _SOP_CLASS, force=True)
            if str(start.SOPClassUID).startswith(_IMAGES):
                return
    raise InvalidDicomError


def _require_ct(dataset: FileDataset) -> None:
    """Raise SkipFile unless this is a slice image of a CT scanner, with as many frames as it claims."""
    sop_class = dataset.get("SOPClassUID") or dataset.file_meta.get("MediaStorageSOPClassUID")
    if dataset.get("Modality") != "CT" or (sop_class and sop_class not in CT_CLASSES):
        raise SkipFile("not a CT image")
    pixels = next((dataset[keyword].value for keyword in _PIXELS if keyword in dataset), None)
    if pixels is None:
        raise SkipFile("no pixel data, perhaps truncated")
    # A decoder may trust PhotometricInterpretation only, and write three samples into the memory of one.
    grey = str(dataset.get("PhotometricInterpretation", "MONOCHROME2")).startswith("MONOCHROME")
    if int(dataset.get("SamplesPerPixel", 1)) != 1 or not grey:
        raise SkipFile("a colour image")
    require_size(int(dataset.Rows), int(dataset.Columns))
    # To try each frame that a file claims could take hours.
    if _is_compressed(dataset):
        stream = io.BytesIO(pixels)
        parse_basic_offsets(stream)
        max_frames = parse_fragments(stream)[0]
    else:
        max_frames = len(pixels) * 8 // (int(dataset.Rows) * int(dataset.Columns) * max(1, int(dataset.BitsAllocated)))
    if not 1 <= frame_count(dataset) <= max_frames:
        raise SkipFile(f"{frame_count(dataset)} frames and pixel data of {max_frames}, perhaps truncated")


def _is_compressed(dataset: FileDataset) -> bool:
    return dataset.file_meta.TransferSyntaxUID.is_compressed


def frame_count(dataset: Dataset) -> int:
    """The number of frames in a file."""
    return int(dataset.get("NumberOfFrames") or 1)


def functional_group(dataset: Dataset, frame: int, sequence: str) -> Dataset:
    """Item of a functional group of an enhanced image: that of the frame, else the shared one, else an empty one."""
    per_frame = dataset.get("PerFrameFunctionalGroupsSequence") or []
    shared_groups = dataset.get("SharedFunctionalGroupsSequence") or []
    sequences = (group.get(sequence) for group in (*per_frame[frame : frame + 1], *shared_groups))
    return next((items[0] for items in sequences if items), Dataset())


def frame_tag(dataset: Dataset, frame: int, sequence: str, keyword: str) -> Any:
    """The value of a tag for a frame; None if there is none.

    Enhanced images have it in a functional group, plain images at the top level.
    """
    value = functional_group(dataset, frame, sequence).get(keyword)
    return dataset.get(keyword) if value is None else value


def rescale_of(dataset: Dataset, frame: int) -> tuple[float, float]:
    """(slope, intercept) from stored values of a frame to HU. Raises SkipFile if the file has none."""
    kind, slope, intercept = (
        frame_tag(dataset, frame, "PixelValueTransformationSequence", keyword)
        for keyword in ("RescaleType", "RescaleSlope", "RescaleIntercept")
    )
    kind = str(kind or "HU").strip()
    # US means unspecified. GDCM, and so ITK, writes it into every CT image without a type. Only original images of a
    # scanner must be in HU (DICOM, CT Image Module).
    if not (kind == "HU" or (kind == "US" and _is_original(dataset, frame))):
        raise SkipFile(f"RescaleType {kind}, not HU")
    if slope is None or intercept is None:
        raise SkipFile("no RescaleSlope/RescaleIntercept")
    slope, intercept = float(slope), float(intercept)
    if not (_SLOPES[0] <= abs(slope) <= _SLOPES[1] and math.isfinite(intercept)):
        raise SkipFile(f"RescaleSlope {slope} and RescaleIntercept {intercept} give no HU")
    return slope, intercept


def _is_original(dataset: Dataset, frame: int) -> bool:
    kind = frame_tag(dataset, frame, "CTImageFrameTypeSequence", "FrameType") or dataset.get("ImageType") or ""
    origin = kind if isinstance(kind, str) else kind[0]
    return origin == "ORIGINAL" and dataset.get("MultienergyCTAcquisition") != "YES"


def _require_slice(dataset: Dataset, frame: int, derived: bool) -> None:
    """Raise SkipFile for a localizer and, unless `derived`, for a frame that was computed of slices and is no slice.

    Reformats, mean slabs, filtered and monoenergetic images are slices in HU.
    """
    types = (dataset.get("ImageType"), frame_tag(dataset, frame, "CTImageFrameTypeSequence", "FrameType"))
    words = "\\".join(kind if isinstance(kind, str) else "\\".join(kind) for kind in types if kind).upper()
    if _LOCALIZERS.search(words):
        raise SkipFile("a localizer")
    if not derived and (match := _COMPUTED.search(words)):
        raise SkipFile(f"{DERIVED} ({match[0]})")


def _require_axial(dataset: Dataset, frame: int) -> None:
    """Raise SkipFile for a coronal, sagittal or oblique reformat, and for pixels that are not square."""
    with suppress(TypeError, ValueError):  # a damaged tag says nothing
        orientation = frame_tag(dataset, frame, "PlaneOrientationSequence", "ImageOrientationPatient")
        axes = np.asarray(orientation, float).reshape(2, 3)
        normal = np.cross(axes[0], axes[1])
        if abs(normal[2]) < _LEAST_AXIAL * np.linalg.norm(normal):  # zeros say nothing
            raise SkipFile("not an axial plane (ImageOrientationPatient)")
    spacing = pixel_spacing(dataset, frame)
    if spacing is not None and not math.isclose(*spacing, rel_tol=1e-3):
        raise SkipFile("pixels that are not square (PixelSpacing)")


def _stored(dataset: Dataset, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The values [H, W] of the bits that are stored, of decoded pixels with all their bits.

    Raises SkipFile if the other bits hold something too: then BitsStored is wrong, or the pixels are in upper bits.
    """
    exact_syntaxes = *JPEG2000TransferSyntaxes, *JPEGLSTransferSyntaxes  # their streams know the bits
    if raw.dtype.kind == "f" or dataset.file_meta.TransferSyntaxUID in exact_syntaxes:
        return raw
    bits = int(dataset.BitsStored)
    unused = 8 * raw.dtype.itemsize - bits
    values = raw << unused >> unused
    if (overlay := dataset.get(_OVERLAY_BIT)) is not None and overlay.value:  # older scanners draw into unused bits
        return values
    values = np.where(raw == dataset.get("PixelPaddingValue"), raw, values)  # padding may need more bits than pixels
    # A sign that is not repeated in the unused bits is fine.
    misfits = raw[values != raw]
    if misfits.size and not 0 <= misfits.min() <= misfits.max() < 2**bits:
        raise SkipFile(f"values need more than its {bits} bits (BitsStored)")
    return values


def frame_hu(dataset: Dataset, frame: int, raw: np.ndarray[Any, Any]) -> FloatArray:
    """Stored values [H, W] of a frame in HU. Pixels that the file marks as padding become air."""
    slope, intercept = rescale_of(dataset, frame)
    hu = raw.astype(np.float32) * np.float32(slope) + np.float32(intercept)
    if (padding := dataset.get("PixelPaddingValue")) is not None:
        low, high = sorted((padding, dataset.get("PixelPaddingRangeLimit", padding)))
        marked = (raw >= low) & (raw <= high)
        lowest, highest = sorted(slope * value + intercept for value in (low, high))
        if highest > AIR and lowest <= _DENSEST_TISSUE:  # tissue may have such values
            marked &= _outside(marked) & (low == high)
        hu[marked] = AIR
    return hu


def _outside(marked: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The marked pixels [H, W] in one line from the rim of a slice; none unless all four corners are marked."""
    if not marked[[0, 0, -1, -1], [0, -1, 0, -1]].all():
        return np.zeros_like(marked)
    sides = [np.rot90(np.logical_and.accumulate(np.rot90(marked, k)), -k) for k in range(4)]
    return np.logical_or.reduce(sides)


def decode_frame(dataset: FileDataset, frame: int, *, derived: bool = False) -> FloatArray:
    """One frame of an opened file as HU [H, W]. Raises SkipFile if it cannot be decoded, or is no axial slice in HU.

    With `derived`, an image that was computed of slices, such as a maximum intensity projection, counts as a slice.

    Compressed frames are decoded from the file in another process, because a decoder in C may crash its process. On
    Windows they are decoded in this one.
    """
    with reading("unreadable"):
        rescale_of(dataset, frame)
        _require_slice(dataset, frame, derived)
        _require_axial(dataset, frame)
    with reading("pixels cannot be decoded, perhaps truncated"):
        apart = _is_compressed(dataset) and os.name == "posix"
        path = str(dataset.filename)
        raw = decode_apart(path, frame) if apart else pixel_array(dataset, index=frame, correct_unused_bits=False)
        return frame_hu(dataset, frame, _stored(dataset, raw))


def slice_position(dataset: Dataset, frame: int) -> float:
    """Position of a frame along the patient in mm.

    If the file has no position, the result is InstanceNumber or the frame number. Raises SkipFile if the position is
    not a number.
    """
    position = frame_tag(dataset, frame, "PlanePositionSequence", "ImagePositionPatient")
    orientation = frame_tag(dataset, frame, "PlaneOrientationSequence", "ImageOrientationPatient")
    if position and orientation and len(position) == 3 and len(orientation) == 6:
        axes = np.asarray(orientation, float)
        along = float(np.dot(np.cross(axes[:3], axes[3:]), np.asarray(position, float)))
        if not math.isfinite(along):
            raise SkipFile("no position that is a number")
        return along
    return float(dataset.get("InstanceNumber") or 0) + frame / 1e6


def pixel_spacing(dataset: Dataset, frame: int) -> tuple[float, float] | None:
    """Millimetres between the rows of a frame, and between its columns; None if the file has no plausible values."""
    with suppress(Exception):  # a damaged tag makes pydicom raise anything
        rows, columns = map(float, frame_tag(dataset, frame, "PixelMeasuresSequence", "PixelSpacing"))
        if all(_SPACINGS[0] <= spacing <= _SPACINGS[1] for spacing in (rows, columns)):
            return rows, columns
    return None


def _is_unique(uid: str) -> bool:
    """Whether a UID is one: some programs write one word for everybody."""
    return "." in uid and UID(uid).is_valid


class DicomReader:
    """Decodes DICOM files.

    Args:
        derived: take images too that were computed of slices, by ImageType: projections, subtractions, iodine, screens.
    """

    kind = "dicom"
    wanted = "CT images in DICOM"
    endings = ".dcm", ".ima"
    magic = b""  # files of some programs have no header

    def __init__(self, derived: bool = False) -> None:
        self.derived = derived

    def open(self, path: Path) -> OpenFile:
        """Open one file. Raises SkipFile if it is no CT image."""
        dataset = open_ct(path)
        decode = partial(decode_frame, dataset, derived=self.derived)
        return OpenFile(frame_count(dataset), decode, partial(pixel_spacing, dataset), dataset)

    def read(self, root: Path, path: str) -> Iterator[Slice]:
        """Slices of one file. `patient` is the PatientID, or empty.

        Raises SkipFile if the file has no slices, and after its last slice if some of its frames are none.
        """
        file = self.open(root / path)
        dataset, n_frames = file.dataset, file.n_frames
        patient = str(dataset.get("PatientID") or "").strip()
        study, series, instance = (
            str(dataset.get(f"{level}InstanceUID") or "").strip() for level in ("Study", "Series", "SOP")
        )
        uids = " ".join(filter(_is_unique, (study, series)))
        skipped: list[tuple[str, str]] = []
        for frame in range(n_frames):
            try:
                with reading("no position"):
                    position = slice_position(dataset, frame)
                    spacing = file.spacing(frame)
                hu = file.decode(frame)
            except SkipFile as reason:
                skipped.append((f"{path}#{frame}" if n_frames > 1 else path, str(reason)))
                continue
            info = SliceInfo(path, frame, n_frames, patient, series or path.rpartition("/")[0], position, uids)
            yield Slice(info, hu, spacing, f"{instance}#{frame}" if _is_unique(instance) else "")
        if skipped:
            raise SkipFile(skipped[0][1], skipped)
