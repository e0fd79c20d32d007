"""DICOM files that the tests write themselves."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import dcmread
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
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
    dataset = item(
        SOPClassUID=CTImageStorage if hu.ndim == 2 else EnhancedCTImageStorage, SOPInstanceUID=generate_uid(),
        Modality="CT", ImageType=["ORIGINAL", "PRIMARY", "AXIAL"], PatientID="P1", PatientName="Doe^Jane",
        StudyDescription="Abdomen", SeriesNumber=3, InstanceNumber=7,
    )  # fmt: skip
    study = f"1.2.{zlib.crc32(tags.get('PatientID', 'P1').encode())}"  # one for each patient
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = study, f"{study}.5"
    orientation = item(ImageOrientationPatient=[1, 0, 0, 0, 1, 0])
    spacing = item(PixelSpacing=[0.8, 0.8], SliceThickness=3)
    if hu.ndim == 2:
        dataset.update(orientation)
        dataset.update(spacing)
        dataset.update({"RescaleSlope": 1, "RescaleIntercept": -1024, "ImagePositionPatient": [-10, -20, 30]})
    else:  # which has them in functional groups
        shared = item(PlaneOrientationSequence=[orientation], PixelMeasuresSequence=[spacing])
        dataset.SharedFunctionalGroupsSequence = [shared]
        dataset.PerFrameFunctionalGroupsSequence = [
            item(
                PixelValueTransformationSequence=[
                    item(RescaleSlope=1, RescaleIntercept=-1024 - 100 * frame, RescaleType="HU")
                ],
                PlanePositionSequence=[item(ImagePositionPatient=[-10, -20, 30 - 2 * frame])],
            )
            for frame in range(len(hu))
        ]
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.set_pixel_data((hu + 1024).astype("<i2"), "MONOCHROME2", 16, generate_instance_uid=False)
    for keyword, value in tags.items():
        if value is None:
            delattr(dataset, keyword)
        else:
            setattr(dataset, keyword, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return dcmread(path)


def item(**tags: Any) -> Dataset:
    """Tags together, such as an item of a sequence."""
    dataset = Dataset()
    dataset.update(tags)
    return dataset
