"""Shared code of readers of measured sinograms: views chosen from a denser scan."""

import numpy as np

from qnmixer.errors import ConfigError
from qnmixer.physics import FanBeamGeometry

_TOLERANCE = 1e-3  # share of a step between views that counts as equal


def views_of(geometry: FanBeamGeometry, first_angle: float, step: float, count: int, extra: str) -> list[int]:
    """Indices of the measured views that the scan has, in the order of the scan.

    Of `count` measured views the first is at `first_angle`; `step` is the signed angle between them, a divisor of a
    full turn, all in radians. Raises ConfigError, which names the set's option of `geometry` (`extra`), if a view was
    not measured.
    """
    turn = round(2 * np.pi / abs(step))
    place = (geometry.angles() - first_angle) / step
    nearest = np.rint(place)
    index = np.mod(nearest, turn).astype(int)  # −6° is 354°
    if (wrong := np.flatnonzero((np.abs(place - nearest) > _TOLERANCE) | (index >= count))).size:
        j = int(wrong[0])
        raise ConfigError(
            f"view {j} of geometry, at {np.degrees(geometry.angles()[j]):.4g}°, is not one of the {count} measured "
            f"views: use geometry={extra} with n_views a divisor of {count}, or first_angle and angle_span in whole "
            f"steps of {np.degrees(abs(step)):.3g}°"
        )
    return [int(view) for view in index]
