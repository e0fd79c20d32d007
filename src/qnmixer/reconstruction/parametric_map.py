"""Write a map of HU as a DICOM parametric map, by highdicom. No viewer takes it for a CT image."""

import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
from highdicom.content import VOILUTTransformation
from highdicom.pm import ParametricMap, RealWorldValueMapping
from pydicom.dataset import Dataset
from pydicom.sr.coding import Code
from pydicom.uid import generate_uid

from qnmixer.physics.units import FloatArray
from qnmixer.reconstruction.writers import new_file

_HU = Code("[hnsf'U]", "UCUM", "Hounsfield unit")


def write_parametric_map(path: Path, values: FloatArray, image: Dataset, *, series_uid: str, label: str) -> None:
    """Write values [S, S] in HU, as float32, at the place of the CT image from which they are derived.

    Args:
        path: a new file.
        values: in HU.
        image: the CT image, as `write_dicom` returns it.
        series_uid: of the map's series.
        label: what the values are: of the content and the series; at most 64 characters count.
    """
    highest = float(values.max())
    mapping = RealWorldValueMapping(
        lut_label="HU",
        lut_explanation=label[:64],
        unit=_HU,
        value_range=(float(values.min()), highest),
        slope=1.0,
        intercept=0.0,
    )
    with warnings.catch_warnings(action="ignore"):  # of odd names in the source
        dataset = ParametricMap(
            source_images=[image],
            pixel_array=np.ascontiguousarray(values, np.float32),
            series_instance_uid=series_uid,
            series_number=int(image.SeriesNumber) + 1,
            sop_instance_uid=generate_uid(),
            instance_number=int(image.get("InstanceNumber") or 1),
            manufacturer="qnmixer",
            manufacturer_model_name="qnmixer",
            software_versions=f"highdicom {version('highdicom')}",
            device_serial_number="none",
            contains_recognizable_visual_features=False,
            real_world_value_mappings=[mapping],
            voi_lut_transformations=[VOILUTTransformation(window_center=highest / 2, window_width=max(1.0, highest))],
            content_description=label[:64],
            series_description=label[:64],
        )
    with new_file(path) as stream:
        dataset.save_as(stream, enforce_file_format=True)
