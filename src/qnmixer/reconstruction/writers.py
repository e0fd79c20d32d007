"""Write reconstructions: derived DICOM, NumPy, PNG. Each file is written completely or not at all."""

import copy
import datetime
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pydicom.dataset import Dataset
from pydicom.filebase import DicomBytesIO
from pydicom.filewriter import dcmwrite, write_data_element
from pydicom.sequence import Sequence
from pydicom.uid import generate_uid
from pydicom.valuerep import format_number_as_ds

from qnmixer.data.cache import square_padding
from qnmixer.data.dicom import frame_count, functional_group
from qnmixer.errors import DataError
from qnmixer.files import atomic_file
from qnmixer.physics.units import FloatArray

CT_IMAGE = "1.2.840.10008.5.1.4.1.1.2"
_INTERCEPT = -1024  # HU of a stored 0, as scanners have it

# Tags of the patient, the study, the scanner and the place of the slice: they are also true for a reconstruction. Other
# tags may describe the source's pixels, name the patient elsewhere (OriginalAttributesSequence), or be unknown here.
_KEPT_TAGS = (
    "SpecificCharacterSet", "TimezoneOffsetFromUTC",
    "PatientName", "PatientID", "IssuerOfPatientID", "OtherPatientIDs", "PatientBirthDate", "PatientSex", "PatientAge",
    "PatientSize", "PatientWeight", "PatientComments", "PatientIdentityRemoved", "DeidentificationMethod",
    "StudyInstanceUID", "StudyID", "StudyDate", "StudyTime", "StudyDescription", "AccessionNumber",
    "ReferringPhysicianName", "ClinicalTrialSponsorName", "ClinicalTrialProtocolID", "ClinicalTrialProtocolName",
    "ClinicalTrialSiteID", "ClinicalTrialSubjectID", "ClinicalTrialTimePointID",
    "SeriesNumber", "Laterality", "PatientPosition", "BodyPartExamined", "ProtocolName", "FrameOfReferenceUID",
    "PositionReferenceIndicator", "Manufacturer", "ManufacturerModelName", "InstitutionName", "StationName",
    "DeviceSerialNumber", "SoftwareVersions", "AcquisitionNumber", "AcquisitionDate", "AcquisitionTime",
    "AcquisitionDateTime", "InstanceNumber", "ImagePositionPatient", "ImageOrientationPatient", "SliceLocation",
    "SliceThickness", "SpacingBetweenSlices", "PixelSpacing", "PatientOrientation", "GantryDetectorTilt", "KVP",
    "XRayTubeCurrent", "ExposureTime", "Exposure", "DistanceSourceToDetector", "DistanceSourceToPatient",
    "SpiralPitchFactor", "ContrastBolusAgent", "ContrastBolusRoute", "WindowCenter", "WindowWidth",
    "BurnedInAnnotation", "LossyImageCompression", "LossyImageCompressionRatio", "LossyImageCompressionMethod",
)  # fmt: skip

# The functional groups in which enhanced images have these tags. A plain CT image has them at its top level.
_GROUPS = {
    "PixelSpacing": "PixelMeasuresSequence",
    "SliceThickness": "PixelMeasuresSequence",
    "SpacingBetweenSlices": "PixelMeasuresSequence",
    "ImagePositionPatient": "PlanePositionSequence",
    "ImageOrientationPatient": "PlaneOrientationSequence",
    "WindowCenter": "FrameVOILUTSequence",
    "WindowWidth": "FrameVOILUTSequence",
    "KVP": "CTXRayDetailsSequence",
}

# Tags that a CT image must have. Their values may be empty.
_REQUIRED = (
    "PatientName", "PatientID", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID",
    "AccessionNumber", "ReferringPhysicianName", "Manufacturer", "PatientPosition", "PositionReferenceIndicator",
    "AcquisitionNumber", "SliceThickness", "KVP",
)  # fmt: skip


def write_npy(path: Path, hu: FloatArray) -> None:
    """HU [H, W] as a float32 `.npy`."""
    with new_file(path) as stream:
        np.save(stream, np.asarray(hu, np.float32))


def write_png(path: Path, hu: FloatArray, *, window: tuple[float, float]) -> None:
    """HU [H, W] as an 8-bit PNG, from black to white in the window. Its Description gives the window."""
    low, high = window
    pixels = np.rint(np.clip((hu - low) / (high - low), 0, 1) * 255).astype(np.uint8)
    metadata = PngInfo()
    metadata.add_text("Description", f"{low:g} HU is black, {high:g} HU is white")
    with new_file(path) as stream:
        Image.fromarray(pixels).save(stream, format="PNG", pnginfo=metadata)


def window_of(hu: FloatArray) -> tuple[float, float]:
    """The window that shows almost all values of a reconstruction: from its 1st to its 99th percentile, in HU."""
    low, high = np.percentile(hu, (1, 99)).round().tolist()
    return low, max(high, low + 1)


@contextmanager
def new_file(path: Path) -> Iterator[io.BytesIO]:
    """A stream that is written in one piece at the end. A full disk then raises the plain OSError with its errno."""
    encoded = io.BytesIO()
    yield encoded
    if path.exists():  # for example, written by another process
        raise DataError(f"{path} exists already and is not overwritten: give another output=")
    with atomic_file(path) as stream:
        stream.write(encoded.getbuffer())


def write_dicom(
    path: Path,
    hu: FloatArray,
    *,
    series_uid: str,  # one for each source series; a missing study or frame of reference UID is made from it
    description: str,  # for DerivationDescription; the text before a semicolon is the SeriesDescription
    template: Dataset | None = None,  # the source; None: a minimal image of an anonymous patient is written
    frame: int = 0,  # of the template, for multi-frame sources
    pixel_spacing: float = 1.0,  # mm, used only without a template
    field_of_view: float | None = None,  # mm of a square in the middle of the template, which the image covers
    place: int = 0,  # of the slice in its series, from 0, used only without a template
    slice_spacing: float = 1.0,  # mm from one place to the next
) -> Dataset:
    """Write HU [S, S] as a CT image with the tags of the patient and the study. The image is marked as derived.

    Spacing and position follow from the part of the source slice that the image covers: a square in its middle
    (`to_grid`), or all of it, padded to a square. Rounding is at most 0.5 HU.

    Raises OSError if the disk is full. No half-written file stays.
    """
    with new_file(path) as stream, warnings.catch_warnings(action="ignore"):  # of odd values in the source
        source = _anonymous(hu.shape, pixel_spacing, place, slice_spacing) if template is None else template
        dataset = _kept_tags(source, frame)
        _set_source(dataset, source, frame)
        _set_grid(dataset, (int(source.Rows), int(source.Columns)), hu.shape, field_of_view)
        _mark_as_derived(dataset, series_uid, description)
        _set_pixels(dataset, hu)
        dcmwrite(stream, dataset, enforce_file_format=True)
    return dataset


def _anonymous(shape: tuple[int, ...], pixel_spacing: float, place: int, slice_spacing: float) -> Dataset:
    """A source of an unknown patient, with the grid and the place of the image. Each series is a study of its own."""
    source = Dataset()
    source.PatientName, source.PatientID = "Anonymous", "ANONYMOUS"
    source.InstanceNumber, (source.Rows, source.Columns) = place + 1, shape
    source.PixelSpacing = [format_number_as_ds(pixel_spacing)] * 2
    source.SliceThickness = source.SpacingBetweenSlices = format_number_as_ds(slice_spacing)
    source.SliceLocation = format_number_as_ds(place * slice_spacing)
    source.ImageOrientationPatient, source.ImagePositionPatient = [1, 0, 0, 0, 1, 0], [0, 0, source.SliceLocation]
    return source


def _kept_tags(source: Dataset, frame: int) -> Dataset:
    """The tags of a frame of a source that are also true for an image derived from it."""
    dataset = Dataset()
    for keyword in _KEPT_TAGS:
        with suppress(Exception):  # damaged ones, which pydicom cannot read, or reads but cannot write
            group = functional_group(source, frame, _GROUPS.get(keyword, ""))
            element = copy.deepcopy((group if keyword in group else source)[keyword])
            stream = DicomBytesIO()
            stream.is_little_endian, stream.is_implicit_VR = True, False
            write_data_element(stream, element)
            dataset.add(element)
    for keyword in _REQUIRED:
        if keyword not in dataset:
            setattr(dataset, keyword, None)
    if frame_count(source) > 1:
        dataset.InstanceNumber = frame + 1
    return dataset


def _set_source(dataset: Dataset, template: Dataset, frame: int) -> None:
    """Refer to the source image and the source frame."""
    if instance := template.get("SOPInstanceUID"):
        item = Dataset()
        item.ReferencedSOPClassUID = template.get("SOPClassUID") or CT_IMAGE
        item.ReferencedSOPInstanceUID = instance
        if frame_count(template) > 1:
            item.ReferencedFrameNumber = frame + 1
        dataset.SourceImageSequence = Sequence([item])


def _set_grid(dataset: Dataset, source: tuple[int, int], shape: tuple[int, ...], field_of_view: float | None) -> None:
    """Set the spacing and the centre of the first pixel of the resampled grid, see `write_dicom`."""
    spacing = _numbers(dataset, "PixelSpacing", 2)
    position = _numbers(dataset, "ImagePositionPatient", 3)
    orientation = _numbers(dataset, "ImageOrientationPatient", 6)
    if not spacing:
        return
    side, *paddings = square_padding(source)  # above and left of the source
    pixel_size = [side / n * mm for n, mm in zip(shape, spacing, strict=True)]
    # From the centre of the source's first pixel to that of the new one, mm
    down, right = (
        (size - mm) / 2 - padding * mm for size, mm, padding in zip(pixel_size, spacing, paddings, strict=True)
    )
    if field_of_view is not None:
        pixel_size = [field_of_view / n for n in shape]
        down, right = (
            ((n - 1) * mm - (field_of_view - size)) / 2 for n, mm, size in zip(source, spacing, pixel_size, strict=True)
        )
    dataset.PixelSpacing = [format_number_as_ds(size) for size in pixel_size]
    if not position or not orientation:
        return
    to_next_column, to_next_row = np.asarray(orientation[:3]), np.asarray(orientation[3:])  # directions of length 1
    first_pixel = np.asarray(position) + to_next_column * right + to_next_row * down
    dataset.ImagePositionPatient = [format_number_as_ds(float(value)) for value in first_pixel]


def _numbers(dataset: Dataset, keyword: str, count: int) -> list[float]:
    """The numbers of a tag; [] if it does not have this many finite numbers. The tag is then left out."""
    with suppress(TypeError, ValueError):
        values = [float(value) for value in dataset.get(keyword) or ()]
        if len(values) == count and np.isfinite(values).all():
            return values
    if keyword in dataset:
        del dataset[keyword]
    return []


def _mark_as_derived(dataset: Dataset, series_uid: str, description: str) -> None:
    """Give the image a new identity, and the tags that say that it is derived."""
    time = datetime.datetime.now()
    dataset.SOPClassUID = CT_IMAGE
    dataset.SeriesInstanceUID = series_uid
    for keyword, label in (("StudyInstanceUID", "study"), ("FrameOfReferenceUID", "frame of reference")):
        if not dataset.get(keyword):  # archives refuse an empty UID, so the series gets one
            setattr(dataset, keyword, generate_uid(entropy_srcs=[series_uid, label]))
    number = dataset.get("SeriesNumber")
    dataset.SeriesNumber = (number if isinstance(number, int) else 0) % 1_000_000 + 1000
    dataset.Modality = "CT"
    dataset.ImageType = ["DERIVED", "SECONDARY", "AXIAL"]
    dataset.DerivationDescription = description[:1024]
    dataset.SeriesDescription = description.partition(";")[0][:64]
    dataset.ContentDate = dataset.InstanceCreationDate = time.strftime("%Y%m%d")
    dataset.ContentTime = dataset.InstanceCreationTime = time.strftime("%H%M%S")


def _set_pixels(dataset: Dataset, hu: FloatArray) -> None:
    """Store HU as signed 16-bit numbers with slope 1. The image also gets a SOPInstanceUID of its own."""
    stored = np.clip(np.rint(np.asarray(hu, np.float64) - _INTERCEPT), -32768, 32767).astype(np.int16)
    dataset.RescaleSlope, dataset.RescaleIntercept, dataset.RescaleType = 1, _INTERCEPT, "HU"
    dataset.set_pixel_data(stored, "MONOCHROME2", bits_stored=16)
