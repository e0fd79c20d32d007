"""The scan's description: what it computes and what it refuses."""

import math
from dataclasses import replace

import numpy as np
import pytest

from qnmixer.errors import GeometryError
from qnmixer.physics import FanBeamGeometry

PAPER = FanBeamGeometry.paper(32)


def test_paper_geometry_is_the_fingerprinted_one() -> None:
    assert PAPER.image_radius == pytest.approx(200 * math.sqrt(2))  # 400 mm wide
    assert (PAPER.n_detectors, PAPER.detector_pitch) == (512, 1.875)
    assert (PAPER.source_to_axis, PAPER.axis_to_detector) == (600, 290)
    assert PAPER.angles()[0] == pytest.approx(math.pi / 32)
    assert np.diff(PAPER.angles()) == pytest.approx(np.full(31, math.pi / 16))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("beam", "rounded", "exact"), [
    ("fan_flat", (6.28318531, 6.2831853, 6.283185, 6.283186), 2 * math.pi),
    ("parallel", (6.28318531, 6.2831853, 6.283185, 6.283186), 2 * math.pi),
    ("parallel", (3.14159265, 3.1415927, 3.141593), math.pi),
])  # fmt: skip
def test_a_turn_that_is_typed_with_six_decimals_is_the_exact_one(
    beam: str, rounded: tuple[float, ...], exact: float, sign: int
) -> None:
    """Then it has the same matrices, also on the disk."""
    whole = replace(PAPER, beam=beam, angle_span=sign * exact)
    for span in rounded:
        its = replace(whole, angle_span=sign * span)
        assert its == whole
        assert its.has_quarter_turn_symmetry
    for other in (exact - 1e-5, 1.0, *([3.14159265] if beam == "fan_flat" else [])):
        assert replace(whole, angle_span=sign * other).angle_span == sign * other


@pytest.mark.parametrize(("change", "words"), [
    ({"n_views": 2.5}, "n_views=2.5"),
    ({"n_detectors": -1}, "n_detectors=-1"),
    ({"pixel_size": math.nan}, "pixel_size=nan"),
    ({"detector_pitch": -1.875}, "detector_pitch=-1.875"),
    ({"source_to_axis": math.inf}, "source_to_axis=inf"),
    ({"source_to_axis": 280.0}, "inside the image"),
    ({"axis_to_detector": -600.0}, "behind the source"),
    ({"first_angle": "0"}, "first_angle='0'"),
    ({"first_angle": 90.0}, "degrees must be converted"),
    ({"angle_span": 1e-320}, "angle_span=1e-320"),
    ({"angle_span": 360.0}, "degrees must be converted"),
    ({"detector_pitch": 1e-4}, "cannot see the object"),
    ({"beam": "cone"}, "beam='cone' is not known: choose fan_flat, fan_curved, parallel"),
    ({"detector_offset": 1.7e308}, "detector_offset=1.7e\\+308"),
    ({"beam": "fan_curved", "source_to_axis": 1e200}, "source_to_axis=1e\\+200"),
    ({"detector_offset": -256.0}, "detector_offset=-256.0 cannot see the object"),
    ({"beam": "fan_curved", "detector_pitch": 6.0}, "curved detector of more than 180°"),
])  # fmt: skip
def test_impossible_geometries_get_one_line(change: dict[str, float], words: str) -> None:
    with pytest.raises(GeometryError, match=words) as caught:
        replace(PAPER, **change)
    assert "\n" not in str(caught.value)


def test_a_short_scan_is_half_a_turn_and_the_fan() -> None:
    geometry = FanBeamGeometry(64, 4.0, 16, 96, 4.0, 500.0, 250.0)
    fan = 2 * math.atan(128 / math.sqrt(500**2 - 128**2))  # a tangent from the source to the circle of the field
    assert geometry.short_scan == pytest.approx(math.pi + fan)
    assert replace(geometry, beam="parallel").short_scan == math.pi
