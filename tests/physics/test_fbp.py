"""Filtered back-projection of every beam: gain, redundancy of short scans and of detectors with an offset."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from qnmixer.physics import FBP_WINDOWS, FanBeamGeometry, FanBeamProjector
from qnmixer.physics.fbp import ray_weights

from .ellipses import ellipse_image, relative_error

PAPER = replace(FanBeamGeometry.paper(256, image_size=64), n_detectors=128, detector_pitch=7.5)
PARALLEL = replace(PAPER, beam="parallel", detector_pitch=5.0)
CURVED = replace(PAPER, beam="fan_curved")
HALF_TURN = replace(PARALLEL, n_views=128, angle_span=math.pi)
FAR = {"n_detectors": 64, "detector_offset": 24.0}
BEAMS = {
    "fan_flat": PAPER,
    "fan_curved": CURVED,
    "fan_curved, quarter offset, clockwise": replace(CURVED, detector_offset=1.25, angle_span=-2 * math.pi),
    "parallel": PARALLEL,
    "parallel over π": HALF_TURN,
    "parallel over −π, bins not mirrored": replace(HALF_TURN, angle_span=-math.pi, detector_offset=0.25),
    "fan_flat far to one side": replace(PAPER, **FAR),
    "fan_curved far to the other": replace(CURVED, n_detectors=64, detector_offset=-24.25),
    "parallel far to one side": replace(PARALLEL, **FAR),
}


def body(geometry: FanBeamGeometry) -> Tensor:
    """The pixels [H, W] inside the body, two away from its edge and from those of its organs."""
    x = ellipse_image(geometry)
    low, high = (-torch.nn.functional.max_pool2d(-x, 5, 1, 2), torch.nn.functional.max_pool2d(x, 5, 1, 2))
    return ((high - low < 1e-6) & (x > 0.5))[0, 0]


def reconstruct(geometry: FanBeamGeometry, fbp_filter: str = "ramp") -> Tensor:
    """FBP [H, W] of the ellipses."""
    operator = FanBeamProjector(geometry, fbp_filter)
    return operator.fbp(operator(ellipse_image(geometry)))[0, 0]


@pytest.mark.parametrize(("name", "fbp_filter"), [
    *((name, "ramp") for name in BEAMS), *(("fan_flat", name) for name in FBP_WINDOWS if name != "ramp"),
])  # fmt: skip
def test_every_beam_and_every_filter_has_unit_gain(name: str, fbp_filter: str) -> None:
    geometry = BEAMS[name]
    x, found = ellipse_image(geometry)[0, 0], reconstruct(geometry, fbp_filter)
    axis = torch.arange(64) - 31.5
    seen = torch.hypot(axis[:, None], axis) < 32  # by a turn of the scan, from all sides
    assert float(found[seen].mean() / x[seen].mean()) == pytest.approx(1, abs=1e-3)
    inside = body(geometry)
    assert float(found[inside].mean() / x[inside].mean()) == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize(
    ("beam", "degrees", "offset"), [("fan_flat", 232, 0.25), ("fan_curved", -240, 0.0), ("parallel", 200, 0.25)]
)
def test_a_short_scan_gives_what_the_full_turn_gives(beam: str, degrees: int, offset: float) -> None:
    """By rms inside the body; single pixels differ by more."""
    span = math.radians(degrees)
    short = replace(BEAMS[beam], n_views=120, first_angle=0.7, angle_span=span, detector_offset=offset)
    inside, full_turn = body(short), replace(BEAMS[beam], n_views=180, detector_offset=offset)
    assert relative_error(reconstruct(short)[inside], reconstruct(full_turn)[inside]) < 0.01


def test_a_quarter_offset_samples_a_full_turn_twice_as_finely() -> None:
    coarse = replace(CURVED, n_views=240, n_detectors=96, detector_pitch=10.0)
    x, inside = ellipse_image(coarse)[0, 0], body(coarse)
    centred, quarter = (reconstruct(replace(coarse, detector_offset=offset)) for offset in (0.0, 0.25))
    assert relative_error(quarter[inside], x[inside]) < 0.6 * relative_error(centred[inside], x[inside])


@pytest.mark.parametrize("beam", ["fan_flat", "fan_curved", "parallel"])
@pytest.mark.parametrize("span", [2 * math.pi, 4.5, -3.7])
@pytest.mark.parametrize("offset", [0.0, 0.25, -12.5])
def test_the_weights_of_all_copies_of_a_line_sum_to_one(beam: str, span: float, offset: float) -> None:
    """The copy of ray (β, γ) is (β + π − 2γ, −γ); bins are left out whose copy is near an end of the detector."""
    geometry = replace(BEAMS[beam], n_views=2880, n_detectors=96, detector_pitch=8.0, angle_span=span)
    geometry = replace(geometry, first_angle=0.3, detector_offset=offset)
    gamma, bins = geometry.fan_angles(), np.arange(96)
    weights = np.broadcast_to(ray_weights(geometry) / np.cos(gamma), (2880, 96))
    place = 95 - 2 * offset - bins
    measured = (place > 2) & (place < 93)
    for view in range(5, 2880, 389):
        total = weights[view].copy()
        other = (geometry.angles()[view] + math.pi - 2 * gamma - geometry.first_angle) / geometry.angle_step
        for turn in (-2, -1, 0, 1):
            at = np.rint(other + turn * 2 * math.pi / abs(geometry.angle_step)).astype(int)
            for k in bins[measured & (at >= 0) & (at < 2880)]:
                total[k] += np.interp(place[k], bins, weights[at[k]])
        error = np.abs(total[measured | (place < -2) | (place > 97)] - 1)
        assert error.mean() < 0.01
        assert error.max() < 0.2  # at the ends of the scan weights change within a view
