"""The standard deviation of values, and the 95 % interval of their mean."""

import math
from collections.abc import Sequence
from statistics import stdev

import numpy as np


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation. None for a single value; NaN for values that are not finite, which `stdev` refuses."""
    if len(values) < 2:
        return None
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


def half_width(values: Sequence[float]) -> float | None:
    """Half-width of the 95 % interval of a mean: t·s/√n with n − 1 degrees of freedom. None for a single value."""
    n, found = len(values), deviation(values)
    return None if found is None else student_quantile(n - 1) * found / math.sqrt(n)


def student_quantile(freedom: int) -> float:
    """The t for which |T| ≤ t has a probability of 95 % in Student's distribution.

    With t = √ν tan θ the density becomes cos^(ν−1) θ, which is summed here: right to 4 digits. (SciPy has it, but is no
    dependency.)
    """
    edges = np.linspace(0.0, np.pi / 2, 20_001)
    middles = (edges[1:] + edges[:-1]) / 2
    below = np.cumsum(np.cos(middles) ** (freedom - 1))
    theta = np.interp(0.95, np.concatenate([[0.0], below / below[-1]]), edges)
    return float(math.sqrt(freedom) * np.tan(theta))
