"""The scan of a section `geometry`, by torch alone."""

from collections.abc import Mapping
from typing import Any

from qnmixer.errors import GeometryError
from qnmixer.physics import FanBeamGeometry

_LARGEST = 8192  # pixels of a side, views and bins of a scan, as in `qnmixer.settings`


def scan_of(section: Mapping[str, Any], image_size: int) -> FanBeamGeometry:
    """The scan of a section `geometry`, for images of this size. Raises GeometryError if it is impossible."""
    keys = {key: value for key, value in section.items() if key not in ("name", "field_of_view", "fbp_filter")}
    if not all(0 < n <= _LARGEST for n in (image_size, keys["n_views"], keys["n_detectors"])):
        raise GeometryError(f"image_size, n_views or n_detectors is not in 1 to {_LARGEST}")
    if keys["first_angle"] is None:  # half a step between views
        keys["first_angle"] = 0.5 * keys["angle_span"] / keys["n_views"]
    return FanBeamGeometry(image_size=image_size, pixel_size=section["field_of_view"] / image_size, **keys)
