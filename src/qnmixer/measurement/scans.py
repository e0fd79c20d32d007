"""Whether a measured sinogram is one of a geometry, in the unit of the network: the nearest image says it."""

import math
from collections.abc import Iterator
from functools import partial

from torch import Tensor
from torch.nn.functional import avg_pool2d

from qnmixer.errors import DataError
from qnmixer.measurement.faults import fault_of, nearest_image
from qnmixer.physics import FanBeamProjector

# How far the best image of a geometry is from a scan, as a share of the scan, and the share of its noise that is added
# to the limits. Measured with CT slices at 256 × 256, 64 views: right scans 0.3 to 1.5 % (real discs over 30°: 1.3 %),
# with 1000 photons a ray 5 to 9 % at 20 % noise, with scatter of 1 % of the air's counts 6 %. Wrong ones: mirrored 6 to
# 15 %, one view without an object 12 %, 235° as a turn 11 to 22 %, half of the views empty 24 to 64 %. Right, but wider
# than the image: a table 4 %, arms 13 %.
_FAR, _ABSURD, _OF_NOISE = 0.02, 0.15, 0.5
_DENSITIES = 0.05, 1.0
"""Mean x of an object: above 1, it is denser than all that the network knows. Counts are far beyond."""
_BODIES = -200, 400
"""HU: real slices have means from −62 to 230, drawn ones to 490; with −log10 about −550, in pixels of 1.6 mm −350."""

_UNLIKE_RUN = (
    "If it is no −log of transmission, give that (unit=attenuation). If its views or bins are not those of the run, "
    "give its angle_span= and detector_pitch="
)


def noise_of(sinogram: Tensor) -> float:
    """Noise of neighbouring bins [..., D], as a share of the sinogram's norm. NaN do not count."""
    # Second differences, 1 −2 1, remove a smooth object. They have 6 times the variance of white noise.
    roughness, norm = (values.double().square().nansum() for values in (sinogram.diff(n=2), sinogram))
    return math.sqrt(float(roughness / 6 / norm))


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
    is_known: bool = False,
) -> Iterator[str]:
    """Lines of what may be wrong with a sinogram [1, 1, V, D] in the unit of the network.

    `place`, and the key and value of its `unit`, are for messages; `is_body`: False for objects of any density;
    `is_known`: False to look for another arc, or an offset of the detector.

    Raises DataError for counts, transmissions, a wrong unit, and a scan that no image explains.
    """
    hu_offset, scale = scaling
    (x, distance), allowance = nearest_image(projector, y, missing), _OF_NOISE * noise
    fault_here = partial(fault_of, projector, y, distance, missing, _FAR + allowance, is_known)
    if not distance <= _ABSURD + allowance:
        raise DataError(
            f"{place} fits no image: the best one differs from it by {distance:.0%}, with noise of {noise:.0%}. "
            f"{fault_here().capitalize() or _UNLIKE_RUN}"
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
    if fault := fault_here():
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
