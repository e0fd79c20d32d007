"""The fan-beam scan: positions of the source, the detector bins and the pixels. Millimetres and radians."""

import math
from dataclasses import dataclass

import numpy as np

from qnmixer.errors import GeometryError

FULL_TURN = 2 * math.pi
"""Radians of a full turn."""
_ANGLE_TOLERANCE = 1e-9

PAPER_FIELD_OF_VIEW = 400.0
"""Image width of the paper's geometry in mm (inferred: the convention of DuDoTrans)."""


@dataclass(frozen=True)
class FanBeamGeometry:
    """Fan beam with a flat, equally spaced detector around a square image centred on the axis.

    Convention (ASTRA's `fanflat`): at angle β the source is at `source_to_axis`·(sin β, −cos β), the detector centre
    at `axis_to_detector`·(−sin β, cos β), the detector coordinate u runs along (cos β, sin β) and bin k is centred at
    u = (k − (n_detectors − 1)/2)·`detector_pitch`. Row 0 of the image is at the top (largest y), column 0 at the left
    (smallest x). View j is at `first_angle` + j·`angle_span`/`n_views`.

    Args:
        image_size: H = W in pixels.
        pixel_size: width of a pixel in mm.
        n_views: V, number of source positions.
        n_detectors: D, number of detector bins.
        detector_pitch: distance of neighbouring bin centres in mm.
        source_to_axis: distance of the source from the axis of rotation in mm; the source stays outside the image.
        axis_to_detector: distance of the detector from the axis in mm; 0 is a virtual detector through the axis.
        first_angle: β of view 0 in radians.
        angle_span: radians from view 0 to where view n_views would be; negative turns clockwise.

    Raises:
        GeometryError: if a value is impossible or no ray can see the object.
    """

    image_size: int
    pixel_size: float
    n_views: int
    n_detectors: int
    detector_pitch: float
    source_to_axis: float
    axis_to_detector: float
    first_angle: float = 0.0
    angle_span: float = FULL_TURN

    def __post_init__(self) -> None:
        for name in ("image_size", "n_views", "n_detectors"):
            self._require_count(name)
        for name in ("pixel_size", "detector_pitch", "source_to_axis"):
            self._require(name, positive=True)
        for name in ("axis_to_detector", "first_angle", "angle_span"):
            self._require(name, positive=False)
        if self.source_to_detector <= 0:
            raise GeometryError(
                f"axis_to_detector={self.axis_to_detector} puts the detector behind the source "
                f"(source_to_axis={self.source_to_axis}): give a value above {-self.source_to_axis}"
            )
        if not 0 < abs(self.angle_span) <= FULL_TURN + _ANGLE_TOLERANCE:
            raise GeometryError(
                f"angle_span={self.angle_span} is outside (0, 2π]: give radians, at most a full turn "
                f"({FULL_TURN:.4f}); degrees must be converted"
            )
        if self.source_to_axis <= self.image_radius:
            raise GeometryError(
                f"source_to_axis={self.source_to_axis} mm puts the source inside the image, whose corners are "
                f"{self.image_radius:.6g} mm from the axis: increase it or lower the field of view"
            )
        self._require_sight()

    @classmethod
    def paper(cls, n_views: int, image_size: int = 256) -> "FanBeamGeometry":
        """The paper's scan: 400 mm field of view, 512 bins of 1.875 mm, distances 600 and 290 mm, half-step start.

        Fingerprinted from the published panels and completed by the DuDoTrans convention.
        """
        return cls(
            image_size=image_size,
            pixel_size=PAPER_FIELD_OF_VIEW / max(image_size, 1),
            n_views=n_views,
            n_detectors=512,
            detector_pitch=1.875,
            source_to_axis=600.0,
            axis_to_detector=290.0,
            first_angle=math.pi / max(n_views, 1),
        )

    @property
    def source_to_detector(self) -> float:
        """Distance from the source to the detector in mm."""
        return self.source_to_axis + self.axis_to_detector

    @property
    def image_radius(self) -> float:
        """Distance of the image's corners from the axis in mm."""
        return self.image_size * self.pixel_size / math.sqrt(2)

    @property
    def angle_step(self) -> float:
        """Signed angle between neighbouring views in radians."""
        return self.angle_span / self.n_views

    @property
    def is_full_turn(self) -> bool:
        """Whether the views cover a full turn. Then each line is seen from both sides."""
        return abs(abs(self.angle_span) - FULL_TURN) <= _ANGLE_TOLERANCE

    @property
    def has_quarter_turn_symmetry(self) -> bool:
        """Whether turning the image by 90° maps the set of views onto itself. Then a quarter of the views is enough."""
        return self.is_full_turn and self.n_views % 4 == 0

    @property
    def n_distinct_views(self) -> int:
        """How many of the first views give all others by quarter turns of the image."""
        return self.n_views // (4 if self.has_quarter_turn_symmetry else 1)

    def angles(self) -> np.ndarray:
        """Source angle β of each view in radians, float64 [V]."""
        return self.first_angle + self.angle_step * np.arange(self.n_views)

    def bin_positions(self) -> np.ndarray:
        """Detector coordinate u of each bin centre in mm, float64 [D]."""
        return (np.arange(self.n_detectors) - (self.n_detectors - 1) / 2) * self.detector_pitch

    def _require_count(self, name: str) -> None:
        """Raise GeometryError for a value that is not a whole number of at least one."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise GeometryError(f"{name}={value!r} must be a whole number of at least 1")

    def _require(self, name: str, positive: bool) -> None:
        """Raise GeometryError for a value that is not finite, or not positive if `positive`."""
        value = getattr(self, name)
        number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or (positive and value <= 0):
            raise GeometryError(f"{name}={value!r} must be a {'positive, ' if positive else ''}finite number")

    def _require_sight(self) -> None:
        """Raise GeometryError for a fan that is narrower than a pixel, or whose rays all miss the image."""
        fan_width = self.n_detectors * self.detector_pitch * self.source_to_axis / self.source_to_detector
        slopes = self.bin_positions() / self.source_to_detector
        nearest_ray = self.source_to_axis * np.abs(slopes / np.hypot(1, slopes)).min()
        if fan_width < self.pixel_size or nearest_ray > self.image_size * self.pixel_size / 2:
            raise GeometryError(
                f"detector_pitch={self.detector_pitch} mm and n_detectors={self.n_detectors} cannot see the object: "
                f"they span {fan_width:.3g} mm at the axis, nearest ray {nearest_ray:.3g} mm from it, for an image of "
                f"{self.image_size * self.pixel_size:.6g} mm: change one of them"
            )
