"""Fit the counts I₀, their profile over the bins, and the electronic noise σ to measured variances.

Counts of a bin are N = Poisson(I₀ w e^{−a}) + N(0, σ²), with w its share of the brightest bin's counts. So the
transmission N/(I₀ w) has the variance e^{−a}/(I₀ w) + σ²/(I₀ w)². FBP is linear, so the variance in a slice has two
such terms too.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.polynomial.legendre import legvander

from qnmixer.errors import DataError

Interval = tuple[float, float]
_INTERVAL = 2.5, 97.5  # percentiles
_ROUNDS, _STEP, _DRAWS = 40, 1e-6, 20_000
"""Rounds of a fit at most, a last step in its standard errors, and draws for an interval."""
_DEGREES = 2, 4, 6, 8, 10  # of the polynomials of log w over the fan that are tried
_CORNERS, _CORNER_DEGREES = (-0.6, 0.6, 49), (1, 2)
"""Places of a corner in the profile, and degrees of the polynomials beside it, that are tried."""
_GAP = 0.3  # between places: a part of the fan in which a profile is not known
_DIMMEST = 20.0  # of −log w: a profile that cannot be fitted does not overflow
_CLEAR = 5.0  # standard errors of 1/I₀ below which I₀ and σ are not told apart
_BEYOND = 4.0  # standard deviations of χ², or of σ² below zero, that are no chance


@dataclass(frozen=True)
class Variances:
    """Measured variances, and the two terms of each: variance = counting/(I₀ w) + electronic·σ²/(I₀ w)²."""

    measured: np.ndarray  # [n], of transmissions or of pixels
    counting: np.ndarray  # [n], the first term for I₀ = w = 1
    electronic: np.ndarray  # [n], the second term for I₀ = σ = w = 1
    error: float | np.ndarray  # relative standard deviation of each measured variance, or [n]
    places: np.ndarray | None = None  # [n], where on the fan each was measured, from −1 to 1; None: w is 1
    air: np.ndarray | None = None  # [D], the counts of an air scan; None: not known
    n_bins: int = 1  # D
    shared: np.ndarray | None = None  # [n], covariances of neighbouring bins; None: they have none
    remarks: tuple[str, ...] = ()  # what was found out and taken out, for the reader
    doubts: tuple[str, ...] = ()  # what was found and makes I₀ and σ wrong, for the reader


@dataclass(frozen=True)
class Dose:
    """I₀ and σ of `noise=physical`, with intervals of 95 %, or None where the fit does not say how wrong it is."""

    photons: float  # I₀ of the brightest bin, in counts
    electronic_sigma: float  # σ, in counts
    photons_interval: Interval | None  # None: `remarks` say what does not fit
    sigma_interval: Interval | None  # None also if σ was given
    profile: np.ndarray | None = None  # w [D]; None: 1
    crosstalk: float = 0.0  # the share of its counts that a bin gives to each neighbour
    remarks: tuple[str, ...] = ()  # lines for the reader
    fitted: np.ndarray = field(default_factory=lambda: np.empty(0))  # [n], the fitted variances


def fit_dose(variances: Variances, electronic_sigma: float | None = None) -> Dose:
    """Fit by weighted least squares; only I₀ and its profile if σ is given.

    The profile is 1, or that of the air scan, each times a smooth one; the Bayesian information criterion chooses.
    There is no interval where the misfit is beyond its own error, or where the rays do not show σ apart from I₀: then σ
    is taken to be 0, and I₀ is at least the value.

    Raises DataError for variances that no noise gives.
    """
    if not (variances.measured > 0).all():
        raise DataError("the input has no noise: give repeated scans, or slices as the scanner reconstructed them")
    fit, profile = _best(variances, electronic_sigma)
    (alpha, beta), covariance = fit.values[:2], fit.covariance[:2, :2] * max(1.0, fit.misfit)
    errors = np.sqrt(np.diag(covariance))
    doubts = [*variances.doubts]
    if fit.misfit > 1 + _BEYOND * np.sqrt(2 / fit.freedom):
        doubts.append(
            f"The variances fit no I₀ and σ: their misfit is {np.sqrt(fit.misfit):.1f} times its own error. Bins, "
            "views or slices may have different doses, or the scans were filtered."
        )
    if electronic_sigma is None and beta < -_BEYOND * errors[1]:
        doubts.append(
            "Dark rays have less noise than their counts give: a dark offset was not subtracted, or the scans were "
            "filtered."
        )
    if electronic_sigma is None and not alpha > _CLEAR * errors[0]:
        doubts.append(
            "The rays are too much alike, too few or too noisy to show σ apart from I₀. σ is taken to be 0, so I₀ "
            "is at least this: give electronic_sigma=, or scans of an object with thin and thick parts."
        )
        beta, variances = -1.0, replace(variances, places=None)  # a profile would take what σ leaves
    if (
        profile is not None
        and variances.places is not None
        and variances.air is None
        and np.diff(np.sort(variances.places)).max() > _GAP
    ):
        doubts.append("A part of the fan has no usable ray: its bins may be brighter than those that are known.")
    intervals: list[Interval] = []
    if not doubts:
        drawn = np.random.default_rng(0).multivariate_normal([alpha, beta], covariance, _DRAWS)
        drawn = drawn[drawn[:, 0] > 0]
        sigmas = np.sqrt(drawn[:, 1].clip(0)) / drawn[:, 0]
        limits = np.percentile([1 / drawn[:, 0], sigmas], _INTERVAL, axis=1)
        intervals = [(float(low), float(high)) for low, high in limits.T]
    if beta < 0:
        fit, profile = _best(variances, 0.0)
    photons, crosstalk = 1 / float(fit.values[0]), 0.0
    if variances.shared is not None:
        share = float(np.clip(variances.shared.sum() / fit.counting.sum(), 0, 0.24))
        crosstalk = (1 - np.sqrt(1 - 4 * share)) / 4  # of 2c (1 − 2c) = share
    return Dose(
        photons=photons,
        electronic_sigma=float(np.sqrt(max(fit.values[1], 0.0))) * photons,
        photons_interval=intervals[0] if intervals else None,
        sigma_interval=intervals[1] if intervals and electronic_sigma is None else None,
        profile=profile,
        crosstalk=crosstalk,
        remarks=(*variances.remarks, *doubts),
        fitted=fit.fitted,
    )


@dataclass(frozen=True)
class _Fit:
    values: np.ndarray  # 1/I₀ of the brightest bin, σ²/I₀², and the coefficients of the profile
    covariance: np.ndarray
    misfit: float  # χ² by degree of freedom
    freedom: int
    fitted: np.ndarray  # [n]
    counting: np.ndarray  # [n], the terms of counts in `fitted`

    @property
    def criterion(self) -> float:
        """The Bayesian information criterion: lower is better."""
        return self.misfit * self.freedom + len(self.values) * float(np.log(len(self.fitted)))


_Fits = list[tuple[_Fit, np.ndarray | None]]  # of rising degree, with their profiles [D]; None: 1 everywhere


def _best(variances: Variances, sigma: float | None) -> tuple[_Fit, np.ndarray | None]:
    """The best fit of all profiles, and its profile [D]; None if that is 1 everywhere."""
    n, places = len(variances.measured), variances.places
    if places is None:
        return _fit(variances, np.zeros(n), np.empty((n, 0)), sigma), None
    families = [_smooth(variances, places, np.zeros(variances.n_bins), sigma)]
    if variances.air is not None and np.ptp(variances.air) > 0:
        families.append(_smooth(variances, places, np.log(variances.air / variances.air.max()), sigma))
    elif min(families[0], key=lambda pair: pair[0].criterion) is not families[0][0]:  # a corner is not flat either
        families += filter(None, (_cornered(variances, places, corner, sigma) for corner in np.linspace(*_CORNERS)))
    # The air's profile, or the place of a corner, counts as a parameter.
    criteria = [[fit.criterion + np.log(n) * (k > 0) for fit, _ in fits] for k, fits in enumerate(families)]
    fits = families[min(range(len(families)), key=lambda k: min(criteria[k]))]
    k = min(range(len(fits)), key=lambda k: fits[k][0].criterion)
    # The criterion takes a degree that noise hides for none. So a curve gets one degree more than it takes.
    is_curve = k > 0 or len(fits[0][0].values) > 2
    fit, profile = fits[min(k + 1, len(fits) - 1) if is_curve else 0]
    # Other profiles that fit as well have other I₀ and σ: their differences, by weight of evidence, are errors too.
    values = np.array([other.values[:2] for fits in families for other, _ in fits]) - fit.values[:2]
    weights = np.exp((min(map(min, criteria)) - np.concatenate(criteria)) / 2)
    covariance = fit.covariance.copy()
    covariance[:2, :2] += (values.T * weights) @ values / weights.sum()
    return replace(fit, covariance=covariance), profile


def _smooth(variances: Variances, places: np.ndarray, offset: np.ndarray, sigma: float | None) -> _Fits:
    """Fits of log w = `offset` [D] + polynomials of rising degree, with their profiles."""
    bins = np.linspace(-1, 1, variances.n_bins)
    brightest = int(offset.argmax())
    fits: _Fits = []
    for degree in [0, *(degree for degree in _DEGREES if degree + 3 < len(places) / 2)]:
        at_bins, at_places = (legvander(of, degree)[:, 1:] for of in (bins, places))
        # About the brightest bin: its 1/I₀ is then a fitted value. A parabola finds that bin: the top of a
        # polynomial of a higher degree would be where noise is high, and I₀ too large.
        for _ in range(2 if degree == 2 else 1):
            shape = np.interp(places, bins, offset - offset[brightest])
            fit = _fit(variances, shape, at_places - at_bins[brightest], sigma)
            profile = offset + at_bins @ fit.values[2:]
            brightest = int(profile.argmax()) if degree == 2 else brightest
        flat = not degree and not offset.any()
        fits.append((fit, None if flat else np.exp(profile - profile[brightest]).clip(max=1)))
    return fits


def _cornered(variances: Variances, places: np.ndarray, corner: float, sigma: float | None) -> _Fits:
    """Fits of log w = a |place − corner| + a polynomial, as behind a wedge, that are brightest at the corner."""
    bins = np.linspace(-1, 1, variances.n_bins)
    brightest = int(np.abs(bins - corner).argmin())
    start: np.ndarray | None = None
    fits: _Fits = []
    for degree in _CORNER_DEGREES:
        at_bins, at_places = (
            np.column_stack([np.abs(of - corner), legvander(of, degree)[:, 1:]]) for of in (bins, places)
        )
        fit = _fit(variances, np.zeros(len(places)), at_places - at_bins[brightest], sigma, start)
        profile = np.exp((at_bins - at_bins[brightest]) @ fit.values[2:])
        start = fit.values  # a higher degree may not converge from afar
        if abs(int(profile.argmax()) - brightest) <= 1:  # else its 1/I₀ is not that of the brightest bin
            fits.append((fit, profile.clip(max=1)))
    return fits


def _fit(
    variances: Variances, shape: np.ndarray, basis: np.ndarray, sigma: float | None, start: np.ndarray | None = None
) -> _Fit:
    """Gauss–Newton. `shape`: log w [n] before the fit, `basis`: [n, k], what is added; `start`: the first values."""
    measured, error = variances.measured, variances.error
    free = np.array([True, sigma is None] + [True] * basis.shape[1])
    values = np.zeros(len(free))
    values[0] = np.exp(np.mean(np.log(measured / variances.counting) + shape))
    if start is not None:
        values[: len(start)] = start
    for _ in range(_ROUNDS):
        if sigma is not None:
            values[1] = (sigma * values[0]) ** 2
        dimmed = np.exp((-shape - basis @ values[2:]).clip(-_DIMMEST, _DIMMEST))
        counting, electronic = variances.counting * dimmed, variances.electronic * dimmed**2
        model = np.maximum(values[0] * counting + values[1] * electronic, 0.1 * values[0] * counting)
        of_alpha = counting if sigma is None else counting + 2 * sigma**2 * values[0] * electronic
        slopes = np.column_stack([of_alpha, electronic, -basis * (model + values[1] * electronic)[:, None]])
        slopes = slopes[:, free] / (model * error)[:, None]
        residual = (measured / model - 1) / error
        scales = np.sqrt(np.sum(slopes**2, axis=0))
        rows = np.vstack([slopes / scales, np.zeros((len(scales),) * 2)])  # no fewer than values, if rays are few
        left, singular, right = np.linalg.svd(rows, full_matrices=False)
        singular = np.maximum(singular, 1e-6)  # equal rays: their errors become large, and not infinite
        step = np.zeros(len(free))
        step[free] = right.T @ (left[: len(residual)].T @ residual / singular) / scales
        step[2:] = step[2:].clip(-1, 1)
        step[0] = step[0].clip(-values[0] / 2, values[0])
        values = values + step
        if np.abs(step[free] * scales).max() < _STEP:
            break
    covariance = np.zeros((len(free), len(free)))
    covariance[np.ix_(free, free)] = (right.T / singular**2) @ right / np.outer(scales, scales)
    freedom = max(1, len(measured) - int(free.sum()))
    return _Fit(values, covariance, float(residual @ residual) / freedom, freedom, model, values[0] * counting)
