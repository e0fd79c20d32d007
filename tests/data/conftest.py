"""DICOM files that the tests write themselves."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence
from pydicom.uid import CTImageStorage, EnhancedCTImageStorage, ExplicitVRLittleEndian, generate_uid


def body_hu(rows: int = 40, columns: int = 40, *, seed: int = 0) -> np.ndarray[Any, Any]:
    """A disc of tissue in air with a bone in it, in whole HU."""
    y, x = np.mgrid[:rows, :columns]
    hu = np.full((rows, columns), -1000.0)
    hu[(y - rows / 2) ** 2 + (x - columns / 2) ** 2 < (min(rows, columns) * 0.4) ** 2] = 40 + seed
    hu[rows // 2 : rows // 2 + 4, columns // 2 : columns // 2 + 3] = 800
    return hu


def make_ct(path: Path, hu: np.ndarray[Any, Any] | None = None, **tags: Any) -> FileDataset:
    """Write a CT image; 3-D hu makes an enhanced one; a tag of None is left out."""
    hu = body_hu() if hu is None else hu
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    dataset = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.SOPClassUID, dataset.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    dataset.Modality, dataset.ImageType = "CT", ["ORIGINAL", "PRIMARY", "AXIAL"]
    dataset.PatientID, dataset.PatientName = "P1", "Doe^Jane"
    study = f"1.2.{zlib.crc32(tags.get('PatientID', 'P1').encode())}"  # one for each patient
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = study, f"{study}.5"
    dataset.StudyDescription, dataset.SeriesNumber, dataset.InstanceNumber = "Abdomen", 3, 7
    dataset.PixelSpacing, dataset.SliceThickness = [0.8, 0.8], 3
    dataset.ImagePositionPatient, dataset.ImageOrientationPatient = [-10, -20, 30], [1, 0, 0, 0, 1, 0]
    dataset.RescaleSlope, dataset.RescaleIntercept = 1, -1024
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit, dataset.PixelRepresentation = 16, 16, 15, 1
    dataset.Rows, dataset.Columns = hu.shape[-2:]
    dataset.add_new("PixelData", "OW", (hu + 1024).astype("<i2").tobytes())
    if hu.ndim == 3:
        _enhance(dataset, len(hu))
    for keyword, value in tags.items():
        if value is None:
            delattr(dataset, keyword)
        else:
            setattr(dataset, keyword, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return dataset


def _enhance(dataset: FileDataset, n_frames: int) -> None:
    """Move what an enhanced CT keeps in functional groups there."""
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = EnhancedCTImageStorage
    dataset.NumberOfFrames = n_frames
    shared, orientation, measures = Dataset(), Dataset(), Dataset()
    orientation.ImageOrientationPatient = dataset.ImageOrientationPatient
    measures.PixelSpacing, measures.SliceThickness = dataset.PixelSpacing, dataset.SliceThickness
    shared.PlaneOrientationSequence, shared.PixelMeasuresSequence = Sequence([orientation]), Sequence([measures])
    dataset.SharedFunctionalGroupsSequence = Sequence([shared])
    groups = []
    for frame in range(n_frames):
        group, rescale, position = Dataset(), Dataset(), Dataset()
        rescale.RescaleSlope, rescale.RescaleIntercept, rescale.RescaleType = 1, -1024 - 100 * frame, "HU"
        position.ImagePositionPatient = [-10, -20, 30 - 2 * frame]
        group.PixelValueTransformationSequence = Sequence([rescale])
        group.PlanePositionSequence = Sequence([position])
        groups.append(group)
    dataset.PerFrameFunctionalGroupsSequence = Sequence(groups)
    for keyword in (
        "RescaleSlope", "RescaleIntercept", "ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing",
        "SliceThickness",
    ):  # fmt: skip
        delattr(dataset, keyword)
