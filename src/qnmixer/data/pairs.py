"""What the readers of measured sinograms share: optional libraries, and views taken from a denser scan."""

import importlib
from typing import Any

import numpy as np

from qnmixer.errors import ConfigError, DataError
from qnmixer.physics import FanBeamGeometry

_SAME = 1e-3
"""Part of a step between views that is no difference."""


def optional(module: str, extra: str) -> Any:
    """A library that only one set needs. Raises DataError, naming how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f'data={extra} is read by {module}, which is not installed: pip install "qnmixer[{extra}]"'
        ) from error


def views_of(geometry: FanBeamGeometry, first: float, step: float, count: int, extra: str) -> list[int]:
    """Which of the measured views are those of the scan, in its order. Raises ConfigError where one is not among them.

    Args:
        geometry: the scan.
        first: angle of the first measured view in radians.
        step: between measured views.
        count: measured views.
        extra: the set's option of `geometry`, for the message.
    """
    turn = 2 * np.pi / step
    place = (geometry.angles() - first) / step
    nearest = np.rint(place)
    index = np.where(np.abs(nearest) < count, nearest, np.mod(nearest, turn)).astype(int)
    if (wrong := np.flatnonzero((np.abs(place - nearest) > _SAME) | (index < 0) | (index >= count))).size:
        j = int(wrong[0])
        raise ConfigError(
            f"geometry: view {j}, at {np.degrees(geometry.angles()[j]):.4g}°, is none of the {count} measured ones: "
            f"take geometry={extra} with n_views a divisor of {count}, or first_angle and angle_span in whole steps of "
            f"{np.degrees(step):.3g}°"
        )
    return [int(it) for it in index]
