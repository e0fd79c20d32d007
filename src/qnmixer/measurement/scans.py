"""Whether a measured sinogram is one of a geometry, in the unit of the network: the nearest image says it."""

import math
from collections.abc import Iterator

from torch import Tensor
from torch.nn.functional import avg_pool2d

from qnmixer.errors import DataError
from qnmixer.physics import FanBeamProjector

# How far the best image of a geometry is from a scan, as a share of the scan, and the share of its noise that is added
# to the limits. Measured with CT slices at 256 × 256, 64 views: right scans 0.3 to 1.5 % (real discs over 30°: 1.3 %),
# with 1000 photons a ray 5 to 9 % at 20 % noise, with scatter of 1 % of the air's counts 6 %. Wrong ones: mirrored 6 to
# 15 %, one view without an object 12 %, 235° as a turn 11 to 22 %, half of the views empty 24 to 64 %. Right, but wider
# than the image: a table 4 %, arms 13 %.
_STEPS, _FAR, _ABSURD, _OF_NOISE = 10, 0.02, 0.15, 0.5
_MIRRORED = 0.5
"""A scan is called mirrored if its misfit then falls below this share: to a fifteenth to a quarter with those slices,
over 150° to an eleventh to a fifth. Of a right one it rises."""
_DENSITIES = 0.05, 1.0
"""Mean x of an object: above 1, it is denser than all that the network knows. Counts are far beyond."""
_BODIES = -200, 400
"""HU: real slices have means from −62 to 230, drawn ones to 490; with −log10 about −550, in pixels of 1.6 mm −350."""

_OFFSET, _NEARER, _SHIFT, _ROUNDS = 0.05, 0.95, 3, 5
"""An offset of the detector is said from so many bins on, and if it brings ‖A x − y‖² below this share.

Measured on the same slices: 0.1 to 8 bins are found to 0.03. Right scans have 0 ± 0.05, also with another source
distance, pitch or first angle, scatter or dead bins. A gain of the bins that rises by 6 % over the detector is taken
for 0.2. An arc of 150° shows an offset from about a bin on, and 30 to 90° of real discs show none.
"""


_UNLIKE_RUN = (
    "If it is no −log of transmission, give that (unit=attenuation). If its views or bins are not those of the run, "
    "give its angle_span= and detector_pitch="
)


def misfit(projector: FanBeamProjector, x: Tensor, y: Tensor, missing: Tensor | None = None, bins: int = 1) -> float:
    """‖A x − y‖ / ‖y‖ of an image [1, 1, S, S] over the views that are not missing, with means of `bins` neighbours."""
    views = slice(None) if missing is None else ~missing
    residual, y = (avg_pool2d(sinogram[:, :, views], (1, bins)) for sinogram in (projector(x) - y, y))
    return float(residual.norm() / y.norm())


def distance_of(projector: FanBeamProjector, y: Tensor, missing: Tensor | None, bins: int) -> float:
    """The misfit of the best image of a scan [1, 1, V, D]. Arguments as of `misfit`."""
    return misfit(projector, projector.least_squares(y, _STEPS), y, missing, bins)


def noise_of(sinogram: Tensor) -> float:
    """Noise of neighbouring bins [..., D], as a share of the sinogram's norm. NaN do not count."""
    # Second differences, 1 −2 1, remove a smooth object. They have 6 times the variance of white noise.
    roughness, norm = (values.double().square().nansum() for values in (sinogram.diff(n=2), sinogram))
    return math.sqrt(float(roughness / 6 / norm))


def offset_of(
    projector: FanBeamProjector, y: Tensor, distance: float, missing: Tensor | None, bins: int, limit: float
) -> float | None:
    """By how many bins the detector of a scan [1, 1, V, D] is further to the right than that of the projector.

    None if no offset brings the best image nearer, as in a short arc, or none to `limit`: then something else is wrong.
    `distance`: the misfit of the best image of y; `missing`, `bins`: as in `misfit`.
    """

    def square(shift: int) -> float:
        # In steps of a bin, which change no value. At both ends there is air.
        return distance_of(projector, y.roll(shift, -1), missing, bins) ** 2

    shift, here = 0, distance**2
    for _ in range(_ROUNDS):
        before, after = square(shift - 1), square(shift + 1)
        slope, curvature = (after - before) / 2, before - 2 * here + after
        vertex = -slope / curvature if curvature > 0 else math.copysign(_SHIFT, -slope)
        if abs(vertex) <= 1:  # near its minimum the square is a parabola
            is_right = here - slope**2 / curvature / 2 < min(_NEARER * distance**2, limit**2)
            return shift + vertex if is_right and abs(shift + vertex) > _OFFSET else None
        shift += round(max(-_SHIFT, min(vertex, _SHIFT)))
        here = square(shift)
    return None


def fault_of(
    projector: FanBeamProjector,
    y: Tensor,
    distance: float,
    missing: Tensor | None,
    bins: int,
    limit: float,
    is_offset_known: bool,
) -> str:
    """What is wrong with the geometry of a scan, by what fits it better; "" if nothing does.

    `limit`: the largest misfit of right scans. Other arguments as of `offset_of` and `doubts_of_scan`.
    """
    geometry = projector.geometry
    # A fan the other way round is that of no image. A parallel beam is that of the mirrored object.
    if distance > limit and (mirrored := distance_of(projector, y.flip(-1), missing, bins)) < _MIRRORED * distance:
        remedy = f"mirror its bins, or give geometry.angle_span={-geometry.angle_span:.4g} if its source turns so"
        return f"mirrored it is {mirrored:.1%} from an image, but now {distance:.1%}: {remedy}"
    if is_offset_known or (offset := offset_of(projector, y, distance, missing, bins, limit)) is None:
        return ""
    offset += geometry.detector_offset
    return f"its detector seems to be off: geometry.detector_offset={offset:.2f} fits an image better"


def doubts_of_scan(
    place: str,
    projector: FanBeamProjector,
    y: Tensor,
    scaling: tuple[float, float],
    unit: str,
    *,
    noise: float,
    missing: Tensor | None = None,
    is_body: bool = True,
    is_offset_known: bool = False,
) -> Iterator[str]:
    """Lines of what may be wrong with a sinogram [1, 1, V, D] in the unit of the network.

    `place`, and the key and value of its `unit`, are for messages; `is_body`: False for objects of any density;
    `is_offset_known`: False to look for an offset of the detector.

    Raises DataError for counts, transmissions, a wrong unit, and a scan that no image explains.
    """
    hu_offset, scale = scaling
    x = projector.least_squares(y, _STEPS)
    bins = max(1, y.shape[-1] // 64)
    distance, allowance = misfit(projector, x, y, missing, bins), _OF_NOISE * noise
    fault = fault_of(projector, y, distance, missing, bins, _FAR + allowance, is_offset_known)
    if not distance <= _ABSURD + allowance:
        raise DataError(
            f"{place} fits no image: the best one differs from it by {distance:.0%}, with noise of {noise:.0%}. "
            f"{fault.capitalize() or _UNLIKE_RUN}"
        )
    blocks = avg_pool2d(x, max(1, x.shape[-1] // 64))  # less noise
    # A mean weighted by x itself, so that air around the object counts little.
    density = float(blocks.square().sum() / blocks.sum())
    hu = hu_offset + scale * density
    if not _DENSITIES[0] < density < _DENSITIES[1]:
        raise DataError(
            f"{place} would be an object of {hu:.0f} HU on average. Either it is no "
            f"−log of transmission in {unit} (unit=attenuation is −log(counts / unattenuated counts), unit=value "
            "the network's value × mm), or detector_pitch= is not that of its bins"
        )
    if fault:
        yield f"{place}: {fault}"
    elif distance > _FAR + allowance:
        yield (
            f"{place}: the best image differs from it by {distance:.1%}, so its geometry may be a little wrong, or "
            "the object reaches beyond the image"
        )
    if is_body and not _BODIES[0] < hu < _BODIES[1]:
        yield (
            f"{place} would be an object of {hu:.0f} HU on average, but a body or water is near 0: is it a "
            "transmission or −log10 instead of −ln, in units of pixels instead of mm, or of another "
            "water_attenuation=?"
        )
