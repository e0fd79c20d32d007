"""The scan: positions of the source, the detector bins and the pixels. Millimetres and radians."""

import math
from dataclasses import dataclass

import numpy as np

from qnmixer.errors import GeometryError

FULL_TURN = 2 * math.pi
"""Radians of a full turn."""
BEAMS = ("fan_flat", "fan_curved", "parallel")
"""Kinds of beam by name."""
_ANGLE_TOLERANCE = 1e-6
"""Radians: π with six decimals counts as π. In an image of 1024 × 1024 a corner moves by less than 0.001 pixels."""
_LARGEST = 1e9
"""Of any value. A source 1000 km away gives parallel rays; squares of much larger numbers overflow."""

PAPER_FIELD_OF_VIEW = 400.0
"""Image width of the paper's geometry in mm (inferred: the convention of DuDoTrans)."""


@dataclass(frozen=True)
class FanBeamGeometry:
    """Rays of a fan or parallel beam, and a square image centred on the axis of rotation.

    Convention (ASTRA's `fanflat`): at angle β the source is at `source_to_axis`·(sin β, −cos β), the detector centre
    at `axis_to_detector`·(−sin β, cos β), and the detector coordinate u runs along (cos β, sin β). Bin k is centred at
    u = (k − (n_detectors − 1)/2 + `detector_offset`)·`detector_pitch`. Row 0 of the image is at the top (largest y),
    column 0 at the left (smallest x). View j is at `first_angle` + j·`angle_span`/`n_views`.

    The beams:

    - fan_flat: bins lie on a line; the ray of bin u leaves the central ray by γ = atan(u / source_to_detector).
    - fan_curved: bins lie on an arc around the source, u is measured along it, and γ = u / source_to_detector.
    - parallel: rays run along (−sin β, cos β), at the distance u from the axis; there is no source.

    Args:
        image_size: H = W in pixels.
        pixel_size: width of a pixel in mm.
        n_views: V, number of views.
        n_detectors: D, number of detector bins (pixels of one detector row).
        detector_pitch: distance of neighbouring bin centres in mm, along the arc if the detector is curved.
        source_to_axis: distance of the source from the axis of rotation (isocentre) in mm; elsewhere SOD, DSO or SID.
            The source stays outside the image. A parallel beam has none and ignores it.
        axis_to_detector: distance of the detector from the axis in mm; 0 is a virtual detector through the axis. A
            parallel beam ignores it.
        first_angle: β of view 0 in radians, at most a full turn; all angles are within one, and 90 would be degrees.
        angle_span: radians from view 0 to where view n_views would be; negative turns clockwise. A rounded full turn,
            or half turn of a parallel beam, becomes the exact one.
        beam: fan_flat, fan_curved or parallel.
        detector_offset: shift of all bins along u, in bins; a quarter gives a full turn twice as fine samples.

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
    beam: str = "fan_flat"
    detector_offset: float = 0.0

    def __post_init__(self) -> None:
        self._require("image_size", "n_views", "n_detectors", is_whole=True)
        if self.beam not in BEAMS:
            raise GeometryError(f"beam={self.beam!r} is not known: choose {', '.join(BEAMS)}")
        self._require("pixel_size", "detector_pitch")
        self._require("first_angle", "angle_span", "detector_offset", positive=False)
        for name, least in (("angle_span", _ANGLE_TOLERANCE), ("first_angle", 0.0)):
            if not least <= abs(value := getattr(self, name)) <= FULL_TURN + _ANGLE_TOLERANCE:
                raise GeometryError(
                    f"{name}={value} is outside of {least:g} to 2π: give radians, at most a full turn "
                    f"({FULL_TURN:.6f}); degrees must be converted"
                )
        for turn in (FULL_TURN,) if self.is_fan else (FULL_TURN, FULL_TURN / 2):
            if abs(abs(self.angle_span) - turn) <= _ANGLE_TOLERANCE:  # symmetric matrices are right for exact ones only
                # A frozen dataclass refuses plain assignment.
                object.__setattr__(self, "angle_span", math.copysign(turn, self.angle_span))
        if self.is_fan:
            self._require_source()
        self._require_sight()

    @classmethod
    def paper(cls, n_views: int, image_size: int = 256) -> "FanBeamGeometry":
        """The paper's scan: 400 mm field of view, 512 bins of 1.875 mm, distances 600 and 290 mm, half-step start.

        Fingerprinted from the published panels and completed by the DuDoTrans convention.
        """
        return cls(
            image_size=image_size,
            pixel_size=PAPER_FIELD_OF_VIEW / image_size,
            n_views=n_views,
            n_detectors=512,
            detector_pitch=1.875,
            source_to_axis=600.0,
            axis_to_detector=290.0,
            first_angle=math.pi / n_views,
        )

    @property
    def is_fan(self) -> bool:
        """Whether the rays of a view meet in a source."""
        return self.beam != "parallel"

    @property
    def source_to_detector(self) -> float:
        """Distance from the source to the detector (SDD, DSD) in mm; of no meaning for a parallel beam."""
        return self.source_to_axis + self.axis_to_detector

    @property
    def field_of_view(self) -> float:
        """Width of the image in mm."""
        return self.image_size * self.pixel_size

    @property
    def pitch_at_axis(self) -> float:
        """Distance in mm of neighbouring rays of a view, where the central ray passes the axis."""
        return self.detector_pitch * (self.source_to_axis / self.source_to_detector if self.is_fan else 1)

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
        return abs(self.angle_span) == FULL_TURN

    @property
    def short_scan(self) -> float:
        """Radians of the shortest arc that sees each line through the field's circle: 180° plus the fan angle."""
        return math.pi + (2 * math.asin(self.field_of_view / 2 / self.source_to_axis) if self.is_fan else 0.0)

    @property
    def has_half_turn_symmetry(self) -> bool:
        """Whether a parallel beam over π goes on with its own views, seen from the other side.

        Then half of the views are enough, and half of the bins: bin D − 1 − i sees the same lines as bin i.
        """
        # With an offset, the mirrored bin sees other lines.
        half = not self.is_fan and abs(self.angle_span) == FULL_TURN / 2 and self.detector_offset == 0
        return half and self.n_views % 2 == 0 and self.image_size % 2 == 0

    @property
    def has_quarter_turn_symmetry(self) -> bool:
        """Whether turning the image by 90° maps the views onto each other. Then some of them are enough.

        In a full turn a quarter of the views is enough. Images with a pixel in the middle are taken as they are.
        """
        full = self.is_full_turn and self.n_views % 4 == 0 and self.image_size % 2 == 0
        return full or self.has_half_turn_symmetry

    @property
    def n_distinct_views(self) -> int:
        """How many of the first views give all others by quarter turns of the image."""
        if not self.has_quarter_turn_symmetry:
            return self.n_views
        return self.n_views // (4 if self.is_full_turn else 2)

    @property
    def n_distinct_bins(self) -> int:
        """How many of the first bins give all others by quarter turns of the image."""
        return (self.n_detectors + 1) // 2 if self.has_half_turn_symmetry else self.n_detectors

    def angles(self) -> np.ndarray:
        """Angle β of each view in radians, float64 [V]."""
        return self.first_angle + self.angle_step * np.arange(self.n_views)

    def bin_positions(self) -> np.ndarray:
        """Detector coordinate u of each bin centre in mm, float64 [D]."""
        return (np.arange(self.n_detectors) - (self.n_detectors - 1) / 2 + self.detector_offset) * self.detector_pitch

    def fan_angles(self) -> np.ndarray:
        """Angle γ between the ray of each bin and the central ray in radians, float64 [D]; 0 for a parallel beam."""
        u = self.bin_positions()
        if not self.is_fan:
            return np.zeros_like(u)
        return np.arctan2(u, self.source_to_detector) if self.beam == "fan_flat" else u / self.source_to_detector

    def ray_distances(self) -> np.ndarray:
        """Signed distance s of the ray of each bin from the axis in mm, float64 [D].

        The ray of bin γ in view β is the line of all points x with x·(cos φ, sin φ) = s, where φ = β − γ.
        """
        return self.source_to_axis * np.sin(self.fan_angles()) if self.is_fan else self.bin_positions()

    def _require(self, *names: str, positive: bool = True, is_whole: bool = False) -> None:
        """Raise GeometryError for a value that is no number, too large to compute with, or not positive."""
        for name in names:
            value = getattr(self, name)
            kind = (int, np.integer) if is_whole else (int, float, np.number)
            # True counts as a whole number in Python, and not here.
            number = isinstance(value, kind) and not isinstance(value, bool) and abs(float(value)) <= _LARGEST
            if not number or (positive and value <= 0):
                words = "whole, " * is_whole + "positive, " * positive + "finite"
                raise GeometryError(f"{name}={value!r} must be a {words} number of at most {_LARGEST:g}")

    def _require_source(self) -> None:
        """Raise GeometryError for distances of a fan beam at which the source or the detector cannot be."""
        self._require("source_to_axis")
        self._require("axis_to_detector", positive=False)
        if self.source_to_detector <= 0:
            raise GeometryError(f"axis_to_detector={self.axis_to_detector} mm puts the detector behind the source")
        if self.source_to_axis <= self.image_radius:
            raise GeometryError(
                f"source_to_axis={self.source_to_axis} mm puts the source inside the image, whose corners are "
                f"{self.image_radius:.6g} mm from the axis: increase it or lower the field of view"
            )
        if self.beam == "fan_curved" and np.abs(self.fan_angles()).max() >= math.pi / 2:
            raise GeometryError(f"n_detectors={self.n_detectors} make a curved detector of more than 180°: lower it")

    def _require_sight(self) -> None:
        """Raise GeometryError for a beam on one side of the axis, narrower than a pixel, or beside the image."""
        width, nearest_ray = self.n_detectors * self.pitch_at_axis, np.abs(self.ray_distances()).min()
        sees_axis = abs(self.detector_offset) < self.n_detectors / 2
        if not sees_axis or width < self.pixel_size or nearest_ray > self.field_of_view / 2:
            raise GeometryError(
                f"detector_pitch={self.detector_pitch} mm, n_detectors={self.n_detectors} and detector_offset="
                f"{self.detector_offset} cannot see the object: the beam is {width:.3g} mm wide at the axis, its "
                f"nearest ray {nearest_ray:.3g} mm from it, the image {self.field_of_view:.6g} mm wide: change one"
            )
