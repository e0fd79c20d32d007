"""What is wrong with the geometry of a measured sinogram: another geometry, by which an image fits it."""

import math
from dataclasses import replace

from torch import Tensor
from torch.nn.functional import avg_pool2d

from qnmixer.physics import FanBeamProjector

_STEPS = 10  # iterations of least squares for the best image
_CLEARLY = 0.5
"""Another direction or angle is named if the misfit falls below this share with it. On real slices of 64 views a
mirrored one falls to a fifteenth to a quarter, over 150° to an eleventh to a fifth, and that of a right one rises."""
_GRID, _BINS, _COARSER = 64, 128, 0.015
"""The coarse grid for other angles, its bins, and how much further from a right scan its best image may be: measured as
above, right angles have 1.2 to 2.2 %, and the best angles of other wrong scans 5 % and more."""
_SPANS, _FINER = range(90, 361, 30), 10  # degrees; 180 to 330° that are read as a turn are found to 2°
_OFFSET, _NEARER, _SHIFT, _ROUNDS = 0.05, 0.95, 3, 5
"""An offset of the detector is said from so many bins on, and if it brings ‖A x − y‖² below this share.

Measured on the same slices: 0.1 to 8 bins are found to 0.03. Right scans have 0 ± 0.05, also with another source
distance, pitch or first angle, scatter or dead bins. A gain of the bins that rises by 6 % over the detector is taken
for 0.2. An arc of 150° shows an offset from about a bin on, and 30 to 90° of real discs show none.
"""


def misfit(projector: FanBeamProjector, x: Tensor, y: Tensor, missing: Tensor | None = None, bins: int = 1) -> float:
    """‖A x − y‖ / ‖y‖ of an image [1, 1, S, S] over the views that are not missing, with means of `bins` neighbours."""
    views = slice(None) if missing is None else ~missing
    residual, y = (avg_pool2d(sinogram[:, :, views], (1, bins)) for sinogram in (projector(x) - y, y))
    return float(residual.norm() / y.norm())


def nearest_image(projector: FanBeamProjector, y: Tensor, missing: Tensor | None) -> tuple[Tensor, float]:
    """The best image [1, 1, S, S] of a scan [1, 1, V, D], and its misfit by means over a 64th of the detector."""
    x = projector.least_squares(y, _STEPS)
    return x, misfit(projector, x, y, missing, max(1, y.shape[-1] // 64))


def vertex_of(before: float, here: float, after: float) -> float:
    """Where the parabola through values at −1, 0 and 1 has its minimum; ±∞, downhill, if it has none."""
    slope, curvature = (after - before) / 2, before - 2 * here + after
    return -slope / curvature if curvature > 0 else math.copysign(math.inf, -slope)


def offset_of(
    projector: FanBeamProjector, y: Tensor, distance: float, missing: Tensor | None, limit: float
) -> float | None:
    """By how many bins the detector of a scan [1, 1, V, D] is further to the right than that of the projector.

    None if no offset brings the best image nearer, as in a short arc, or none to `limit`: then something else is wrong.
    `distance`: the misfit of the best image of y; `missing`: as in `misfit`.
    """

    def square(shift: int) -> float:
        # In steps of a bin, which change no value. At both ends there is air.
        return nearest_image(projector, y.roll(shift, -1), missing)[1] ** 2

    shift, here = 0, distance**2
    for _ in range(_ROUNDS):
        before, after = square(shift - 1), square(shift + 1)
        vertex = vertex_of(before, here, after)
        if abs(vertex) <= 1:  # near its minimum the square is a parabola
            is_right = here + vertex * (after - before) / 4 < min(_NEARER * distance**2, limit**2)
            return shift + vertex if is_right and abs(shift + vertex) > _OFFSET else None
        shift += round(max(-_SHIFT, min(vertex, _SHIFT)))
        here = square(shift)
    return None


def angle_span_of(projector: FanBeamProjector, y: Tensor, missing: Tensor | None, limit: float) -> float | None:
    """The angle that the views of a scan [1, 1, V, D] span, in radians; None if none is right, and clearly better.

    It is looked for on a coarse grid. There are minima elsewhere, but none is as deep. Arguments as of `offset_of`.
    """
    geometry = projector.geometry
    merged = math.ceil(geometry.n_detectors / _BINS)
    n_bins = geometry.n_detectors // merged
    coarse = replace(
        geometry, image_size=_GRID, pixel_size=geometry.field_of_view / _GRID, n_detectors=n_bins,
        detector_pitch=geometry.detector_pitch * merged, detector_offset=geometry.detector_offset / merged,
    )  # fmt: skip
    y = avg_pool2d(y[..., : n_bins * merged], (1, merged))

    def square(degrees: float) -> float:
        span = math.copysign(math.radians(degrees), geometry.angle_span)
        projector = FanBeamProjector(replace(coarse, angle_span=span)).to(y.device)
        return misfit(projector, projector.least_squares(y, _STEPS), y, missing) ** 2

    nearest: float = min(_SPANS, key=square)
    for step in (_SPANS.step, _FINER):  # near its minimum the square is a parabola
        nearest = max(_SPANS[0] + step, min(nearest, _SPANS[-1] - step))
        vertex = vertex_of(*(square(nearest + k * step) for k in (-1, 0, 1)))
        nearest += step * max(-1.0, min(vertex, 1.0))
    here = math.degrees(abs(geometry.angle_span))
    is_right = square(nearest) < min(_CLEARLY**2 * square(here), (limit + _COARSER) ** 2)
    return math.copysign(math.radians(nearest), geometry.angle_span) if is_right else None


def fault_of(
    projector: FanBeamProjector, y: Tensor, distance: float, missing: Tensor | None, limit: float, is_known: bool
) -> str:
    """What is wrong with the geometry of a scan, by what fits it better; "" if nothing does.

    `limit`: the largest misfit of right scans. Other arguments as of `offset_of` and `doubts_of_scan`.
    """
    geometry = projector.geometry
    # A fan the other way round is that of no image. A parallel beam is that of the mirrored object.
    if distance > limit and (mirrored := nearest_image(projector, y.flip(-1), missing)[1]) < _CLEARLY * distance:
        remedy = f"mirror its bins, or give geometry.angle_span={-geometry.angle_span:.4g} if its source turns so"
        return f"mirrored it is {mirrored:.1%} from an image, but now {distance:.1%}: {remedy}"
    if is_known:
        return ""
    if (offset := offset_of(projector, y, distance, missing, limit)) is not None:
        offset += geometry.detector_offset
        return f"its detector seems to be off: geometry.detector_offset={offset:.2f} fits an image better"
    if distance > limit and (span := angle_span_of(projector, y, missing, limit)) is not None:
        return f"its views seem to span {math.degrees(span):.0f}°: geometry.angle_span={span:.4g} fits an image better"
    return ""
