"""Fit the counts I₀ and the electronic noise σ to measured variances.

Counts are N = Poisson(I₀ e^{−a}) + N(0, σ²), so the transmission N/I₀ has the variance e^{−a}/I₀ + σ²/I₀². FBP is
linear, so the variance in a slice has two such terms too.
"""

from dataclasses import dataclass

import numpy as np

from qnmixer.errors import DataError

_STANDARD_ERRORS = 1.96
"""On each side of an interval of 95 %."""
_ROUNDS = 50
_UNCERTAIN = 0.25
"""Relative standard error of I₀ above which the two terms are not fitted together."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Variances:
    """Measured variances, and the two terms of each: variance = counting/I₀ + electronic·σ²/I₀².

    Attributes:
        measured: [n], of transmissions or of pixels.
        counting, electronic: [n], the terms for I₀ = σ = 1.
        error: relative standard deviation of each measured variance.
    """

    measured: np.ndarray
    counting: np.ndarray
    electronic: np.ndarray
    error: float


@dataclass(frozen=True)
class Dose:
    """I₀ and σ of `noise=physical`, with intervals of 95 %.

    `sigma_interval` is None if σ was not fitted: it was given, or the rays are too much alike.
    """

    photons: float
    electronic_sigma: float
    photons_interval: Interval
    sigma_interval: Interval | None


def fit_dose(variances: Variances, electronic_sigma: float | None = None) -> Dose:
    """Fit both by weighted least squares; only I₀ if σ is given.

    If the rays do not show σ apart from I₀, it is taken to be 0. Misfit beyond chance makes the intervals wider.

    Raises DataError for variances that no noise gives.
    """
    measured, n_fitted = variances.measured, 2 if electronic_sigma is None else 1
    if not (measured > 0).all():
        raise DataError("the input has no noise: give repeated scans, or slices as the scanner reconstructed them")
    photons, squared = float(np.exp(-np.mean(np.log(measured / variances.counting)))), (electronic_sigma or 0.0) ** 2
    for _ in range(_ROUNDS):
        counting, electronic = variances.counting / photons, variances.electronic / photons**2
        model = counting + squared * electronic
        slopes = np.stack([-1 - squared * electronic / model, electronic / model], axis=1)[:, :n_fitted]
        step, _, rank, _ = np.linalg.lstsq(slopes, measured / model - 1, rcond=1e-9)
        photons *= float(np.exp(np.clip(step[0], -1, 1)))
        squared = max(0.0, squared + float(step[1])) if n_fitted == 2 else squared
    if rank < n_fitted or len(model) <= n_fitted:
        return fit_dose(variances, 0.0) if n_fitted == 2 else _alone(photons, squared, variances.error)
    misfit = np.sqrt(np.sum((measured / model - 1) ** 2) / (len(model) - n_fitted))
    errors = max(variances.error, misfit) * np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)))
    if n_fitted == 1:
        return _alone(photons, squared, errors[0])
    alone = fit_dose(variances, 0.0)
    if errors[0] > _UNCERTAIN:
        return alone
    low, high = (float(np.sqrt(max(0.0, squared + side * errors[1]))) for side in (-_STANDARD_ERRORS, _STANDARD_ERRORS))
    photons = photons if squared else alone.photons
    return Dose(photons, float(np.sqrt(squared)), _around(photons, errors[0]), (low, high))


def _alone(photons: float, squared: float, error: float) -> Dose:
    return Dose(photons, float(np.sqrt(squared)), _around(photons, error), None)


def _around(photons: float, error: float) -> Interval:
    """The interval of I₀ by its relative standard error."""
    reach = float(np.exp(_STANDARD_ERRORS * error))
    return photons / reach, photons * reach
