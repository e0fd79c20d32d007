"""The symmetries of a scan: which it has, and that they are exact for A and for FBP."""

import math
from dataclasses import replace

import pytest
import torch

from qnmixer.physics import FanBeamGeometry, FanBeamProjector, images_by_symmetry, symmetries

FAN = FanBeamGeometry(
    image_size=16, pixel_size=6.25, n_views=8, n_detectors=33, detector_pitch=7.5, source_to_axis=150.0,
    axis_to_detector=72.5, first_angle=math.pi / 8,
)  # fmt: skip
ALL = [(quarters, flipped) for flipped in (False, True) for quarters in (0, 2, 1, 3)]
STEP = 2 * math.pi / 8


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, ALL),
    ({"first_angle": 0.0}, ALL),
    ({"angle_span": -2 * math.pi}, ALL),
    ({"beam": "fan_curved", "n_detectors": 32, "image_size": 15}, ALL),
    ({"first_angle": 0.1}, ALL[:4]),  # no view at −0.1
    ({"first_angle": STEP / 4}, ALL[:4]),
    ({"detector_offset": 0.25}, ALL[:4]),
    ({"n_views": 6, "first_angle": math.pi / 6}, [*ALL[:2], *ALL[4:6]]),  # no quarter turn
    ({"n_views": 6, "first_angle": 0.0}, [*ALL[:2], *ALL[4:6]]),
    ({"n_views": 7, "first_angle": 0.0}, [(0, False), (0, True)]),
    ({"angle_span": 2.0}, ALL[:1]),  # an arc
    ({"angle_span": 3.9, "n_views": 7, "first_angle": 0.3}, ALL[:1]),
    ({"angle_span": math.pi, "first_angle": math.pi / 16}, [(0, False), (2, True)]),  # an arc, symmetric to π/2
    ({"beam": "parallel", "angle_span": math.pi, "first_angle": 0.0}, ALL),
    ({"beam": "parallel", "angle_span": math.pi, "first_angle": 0.1}, ALL[:4]),
    ({"beam": "parallel", "angle_span": math.pi, "detector_offset": 0.25, "first_angle": 0.0}, ALL[:1]),
    ({"beam": "parallel", "angle_span": math.pi, "n_views": 5, "first_angle": 0.0}, [*ALL[:2], *ALL[4:6]]),
    ({"beam": "parallel"}, ALL),
    ({"beam": "parallel", "detector_offset": 0.25}, ALL),  # flips by the opposite views, whose bins keep their order
    ({"beam": "parallel", "detector_offset": 0.25, "n_views": 6, "first_angle": 0.0}, [*ALL[:2], *ALL[4:6]]),
    ({"beam": "parallel", "detector_offset": 0.25, "n_views": 7, "first_angle": 0.0}, [(0, False), (2, True)]),
])  # fmt: skip
def test_a_scan_has_the_symmetries_of_its_angles_and_bins(changes: dict, expected: list) -> None:
    projector = FanBeamProjector(replace(FAN, **changes)).double()
    found = symmetries(projector)
    assert [(g.quarters, g.flipped) for g in found] == expected
    x = torch.rand(2, 1, projector.geometry.image_size, projector.geometry.image_size, dtype=torch.float64)
    y = projector(x)
    for g in found:
        # Lengths are stored in float32.
        assert (projector(g.turn(x)) - g.reorder(y)).norm() <= 3e-7 * y.norm()
        assert torch.equal(g.turn_back(g.turn(x)), x)


def test_no_other_turn_or_flip_is_one() -> None:
    """The eight candidates by brute force: for those left out, no order of whole views equals A g x."""
    projector = FanBeamProjector(replace(FAN, n_views=6, first_angle=0.1))
    x = torch.rand(1, 1, 16, 16)
    y = projector(x)
    kept = {(g.quarters, g.flipped) for g in symmetries(projector)}
    assert kept == {(0, False), (2, False)}
    for quarters, flipped in {*ALL} - kept:
        turned = projector(torch.rot90(x.flip(3) if flipped else x, quarters, (2, 3)))
        views = torch.cat([y, y.flip(3)], 2)[0, 0]
        assert torch.cdist(turned[0, 0], views).amin(1).max() > 1e-2 * y.norm()


def test_what_fails_the_check_against_A_is_left_out() -> None:
    projector = FanBeamProjector(FAN)
    values = projector._rays.values
    with torch.no_grad():
        values.mul_(1 + 1e-3 * torch.rand(len(values), generator=torch.Generator().manual_seed(1)))
    # The matrix holds a quarter of the views, so quarter turns stay exact. Flips do not.
    assert [(g.quarters, g.flipped) for g in symmetries(projector)] == ALL[:4]


@pytest.mark.parametrize(("most", "expected"), [(1, ALL[:1]), (2, ALL[:2]), (4, ALL[:4])])
def test_at_most_so_many(most: int, expected: list) -> None:
    assert [(g.quarters, g.flipped) for g in symmetries(FanBeamProjector(FAN), most)] == expected


def test_FBP_gives_one_image_under_all_symmetries() -> None:
    projector = FanBeamProjector(FAN)
    y = projector(torch.rand(2, 1, 16, 16))
    images = images_by_symmetry(projector.fbp, y, symmetries(projector))
    assert images.shape == (8, 2, 1, 16, 16)
    assert (images - projector.fbp(y)).abs().max() < 1e-5 * images.abs().max()
