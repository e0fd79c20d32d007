"""Noise power spectrum, task transfer function and detectability, from regions of images, in float64.

Definitions: ICRU Report 87 (2012) for noise and resolution; Barrett and Myers, Foundations of Image Science (2004), for
observers.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qnmixer.evaluation.statistics import student_quantile

EDGE_REACH = 0.7  # reach of an edge's profile inside and outside, in radii of its disc; nothing else may be there
_LEAST_PERIODS = 0.55
"""Periods in the reach of a profile: an edge that falls to one half at fewer is wider than its disc can show."""
_BINS_PER_PIXEL = 4  # edges at many angles to the grid sample finer than pixels
_RESAMPLES = 200


def noise_power(regions: Tensor, pixel_size: float) -> Tensor:
    """The mean noise power spectrum [N, N], in HU² mm², of uniform regions [..., N, N] in HU; pixel_size in mm.

    Each region loses its mean, so the spectrum has nothing at frequency 0. The order is that of `torch.fft.fftfreq`,
    the integral is the variance. It is the Fourier transform of the autocovariance (ICRU 87), up to lags of N/2. Each
    lag is divided by the number of its pairs: the square of the Fourier transform would divide it by N², and so leak
    from each frequency into its neighbours.
    """
    n = regions.shape[-1]
    deviations = regions - regions.mean((-2, -1), keepdim=True)
    lags = torch.fft.fftfreq(n, 1 / n).long()
    products = torch.fft.ifft2(torch.fft.fft2(deviations, (2 * n, 2 * n)).abs().square().flatten(0, -3).mean(0)).real
    n_pairs = n - lags.abs()
    covariance = products[lags][:, lags] / (n_pairs[:, None] * n_pairs)
    return torch.fft.fft2(covariance).real * pixel_size**2


def noise_of(power: Tensor, pixel_size: float) -> Tensor:
    """Standard deviation in HU, and mean frequency in 1/mm, of a noise power spectrum [N, N]: [2]."""
    deviation = power.sum().sqrt() / (len(power) * pixel_size)
    return torch.stack([deviation, (power * _radii(len(power), pixel_size)).sum() / power.sum()])


def radial_mean(power: Tensor, pixel_size: float) -> tuple[Tensor, Tensor]:
    """Frequencies in 1/mm, and the means of a spectrum [N, N] over rings of these; both [N/2 − 1], without zero."""
    step = 1 / (len(power) * pixel_size)
    rings = (_radii(len(power), pixel_size) / step).round().long().flatten()
    means = torch.bincount(rings, power.flatten()) / torch.bincount(rings)
    rings_inside = slice(1, len(power) // 2)
    return torch.arange(len(means))[rings_inside] * step, means[rings_inside]


def _radii(size: int, pixel_size: float) -> Tensor:
    axis = torch.fft.fftfreq(size, pixel_size, dtype=torch.float64)
    return torch.hypot(axis[:, None], axis)


def edge_profile(image: Tensor, x: float, y: float, radius: float, pixel_size: float) -> Tensor:
    """Sums of pixels and their numbers, by distance to the edge of a disc: [2, bins].

    The disc of an image [H, W] is at (x, y), to the right and down from the middle; all in mm. Bins are a quarter of a
    pixel, from `EDGE_REACH` radii inside the edge to as many outside.
    """
    rows, columns = ((torch.arange(n, dtype=torch.float64) - (n - 1) / 2) * pixel_size for n in image.shape)
    distance = torch.hypot(columns - x, rows[:, None] - y) - radius
    n_bins = 2 * math.ceil(EDGE_REACH * radius / pixel_size * _BINS_PER_PIXEL)
    bins = (distance / pixel_size * _BINS_PER_PIXEL + n_bins / 2).floor().long()
    near = (bins >= 0) & (bins < n_bins)
    values = image[near].double()
    sums = torch.stack([values, torch.ones_like(values)])
    return torch.zeros(2, n_bins, dtype=torch.float64).index_add(1, bins[near], sums)


def task_transfer(profiles: Tensor, pixel_size: float) -> tuple[Tensor, Tensor]:
    """Frequencies up to 1/pixel in 1/mm, and the task transfer function there, of profiles [n, 2, bins]; both [201].

    By the circular edge (Richard et al., Medical Physics 39, 2012; equations not looked up): the modulus of the Fourier
    transform of the profile's derivative, 1 at frequency 0.
    """
    places, values = _mean_profile(profiles, pixel_size)
    middles = (places[1:] + places[:-1]) / 2
    # An arc is longer outside the edge than inside: a disc that is blurred spreads as the root of their ratio.
    reach = profiles.shape[-1] * pixel_size / _BINS_PER_PIXEL / 2
    spread = values.diff() * (1 + middles / (reach / EDGE_REACH)).sqrt()
    frequencies = torch.linspace(0, 1 / pixel_size, 201, dtype=torch.float64)
    modulation = (torch.exp(-2j * math.pi * frequencies[:, None] * middles) @ spread.to(torch.complex128)).abs()
    modulation /= torch.sinc(frequencies * pixel_size / _BINS_PER_PIXEL).square()  # of bins, and of their differences
    return frequencies, modulation / modulation[0]


def shown_transfer(profiles: Tensor, pixel_size: float) -> tuple[Tensor, Tensor, Tensor]:
    """Frequencies in 1/mm, the task transfer function there, and half of its 95 % interval; all [k], with k up to 201.

    It ends before the first frequency at which the interval reaches zero. From there the modulus of noise alone, which
    is positive, would be taken for modulation.
    """
    frequencies, _ = task_transfer(profiles, pixel_size)
    modulation, half = with_interval(lambda drawn: task_transfer(drawn, pixel_size)[1], profiles)
    lost = (half >= modulation).nonzero()
    end = int(lost[0]) if len(lost) else len(frequencies)
    return frequencies[:end], modulation[:end], half[:end]


def half_modulation(profiles: Tensor, pixel_size: float) -> Tensor:
    """The frequency in 1/mm at which the task transfer function falls to one half; the last one if it does not.

    NaN below 0.55 periods in the reach of the profile: the edge is then wider than the disc can show.
    """
    frequencies, modulation = task_transfer(profiles, pixel_size)
    below = (modulation < 0.5).nonzero()
    if not len(below):
        return frequencies[-1]
    k = int(below[0])
    share = (modulation[k - 1] - 0.5) / (modulation[k - 1] - modulation[k])
    frequency = frequencies[k - 1] + share * (frequencies[k] - frequencies[k - 1])
    reach = profiles.shape[-1] * pixel_size / _BINS_PER_PIXEL / 2
    return torch.where(frequency * reach < _LEAST_PERIODS, torch.nan, frequency)


def edge_contrast_to_noise(profiles: Tensor) -> Tensor:
    """The contrast of an edge divided by its noise: the standard error of a bin of the mean of profiles [n, 2, bins].

    The contrast is between the inner and the outer quarter of the mean profile.
    """
    sums, numbers = profiles.unbind(1)
    mean = sums.sum(0) / numbers.sum(0)
    quarter = len(mean) // 4
    contrast = mean[-quarter:].nanmean() - mean[:quarter].nanmean()
    scatter = (sums - numbers * mean).square() / numbers.clamp_min(1)  # of one pixel
    variance = scatter.sum(0) / (len(profiles) - 1) / numbers.sum(0)
    return contrast.abs() / variance.nanmean().sqrt()


def _mean_profile(profiles: Tensor, pixel_size: float) -> tuple[Tensor, Tensor]:
    """Distances outwards from the edge in mm, and mean values there, of profiles [n, 2, bins], without empty bins."""
    sums, numbers = profiles.sum(0)
    filled = numbers > 0
    places = (torch.arange(len(sums), dtype=torch.float64) + 0.5 - len(sums) / 2) * pixel_size / _BINS_PER_PIXEL
    return places[filled], (sums / numbers)[filled]


def dog_channels(size: int) -> Tensor:
    """Three difference-of-Gaussians channels, as images around the middle of a region: [3, size, size].

    The sparse set of Abbey and Barrett, JOSA A 18 (2001): exp(−(f/2σ)²/2) − exp(−(f/σ)²/2), with σ of 0.015, 0.03 and
    0.06 cycles per pixel.
    """
    axis, radius = torch.fft.fftfreq(size, dtype=torch.float64), _radii(size, 1.0)
    shift = torch.exp(-1j * math.pi * (size - 1) * (axis[:, None] + axis))  # to between the middle pixels
    bands = (torch.exp(-((radius / 2 / s) ** 2) / 2) - torch.exp(-((radius / s) ** 2) / 2) for s in (0.015, 0.03, 0.06))
    return torch.stack([torch.fft.ifft2(band * shift).real for band in bands])


def channel_outputs(regions: Tensor) -> Tensor:
    """What each channel makes of regions [..., N, N]: [..., 3]."""
    return torch.einsum("...hw,chw->...c", regions.double(), dog_channels(regions.shape[-1]))


def detected(absent: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """d' of the channelised Hotelling observer, by channel outputs [n, places, C] without the insert and with it.

    d'² = Δᵀ K⁻¹ Δ, with Δ the difference of mean outputs and K their covariance at a place, pooled over places and both
    classes. From few images the square is too large: what the scatter of Δ and K adds is subtracted. A square below
    zero counts as 0. Image i of both classes may have the same body and noise.

    The second is half of its 95 % interval, for normal outputs. The images are the units: their places are correlated.
    The scatter of Δ is that of the images' differences. K has fewer degrees of freedom where the places of an image, or
    the images of a pair, are alike: their correlations are measured along K⁻¹ Δ.
    """
    n, places, n_channels = absent.shape
    differences = (present - absent).mean(1)
    difference, scatter = differences.mean(0), differences.T.cov()
    deviations = torch.stack([absent - absent.mean(0), present - present.mean(0)])
    flat = deviations.flatten(0, 2)
    freedom = 2.0 * places * (n - 1)
    inverse = torch.linalg.pinv(flat.T @ flat / freedom, hermitian=True)  # flat images have no inverse
    square = difference @ inverse @ difference
    template = inverse @ difference / square.clamp_min(1e-12).sqrt()
    without, inserted = outputs = deviations @ template  # [2, n, places]
    power = outputs.square().sum() + 1e-12
    between = (places * outputs.mean(2).square().sum() * places / power - 1) / max(1, places - 1)
    within_pair = 2 * (without * inserted).sum() / power
    freedom /= float((1 + within_pair**2) * (1 + (places - 1) * between.clamp(0, 1) ** 2))
    bias = (inverse * scatter).sum() / n
    unbiased = ((square - bias) * max(0.0, freedom - n_channels - 1) / freedom).clamp_min(0).sqrt()
    of_difference = template @ scatter @ template / n
    of_difference += bias.square() / (2 * n_channels) / (unbiased.square() + of_difference + 1e-12)  # across Δ
    variance = student_quantile(n - 1) ** 2 * of_difference + 1.96**2 * unbiased.square() / (2 * freedom)
    return unbiased, variance.sqrt()


def detected_beyond(of_method: Sequence[Tensor], of_rival: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """d' of a method minus that of a rival, and half of its 95 % interval, by the jackknife over images.

    Each has its channel outputs [n, places, C] without the insert and with it. Image i of both methods is of the same
    body and noise: what is hard to see in both cancels, so that the interval is narrower than from those of either d'.
    """

    def value(kept: Tensor) -> Tensor:
        minuend, subtrahend = (detected(*(part[kept] for part in outputs))[0] for outputs in (of_method, of_rival))
        return minuend - subtrahend

    n = len(of_method[0])
    everything = torch.arange(n)
    without_one = torch.stack([value(everything[everything != i]) for i in range(n)])
    error = (without_one.var(correction=0) * (n - 1)).sqrt()
    return value(everything), student_quantile(n - 1) * error


def with_interval(score: Callable[..., Tensor], *samples: Tensor) -> tuple[Tensor, Tensor]:
    """A score of samples [n, …] of images, and half of its 95 % interval, by the bootstrap over images.

    The standard error is that of the bootstrap times √(n/(n − 1)), because n images resemble themselves too much, and
    the interval has Student's quantile of n − 1 degrees of freedom.
    """
    generator = torch.Generator().manual_seed(0)
    resamples = []
    for _ in range(_RESAMPLES):
        numbers = (torch.randint(len(sample), (len(sample),), generator=generator) for sample in samples)
        resamples.append(score(*(sample[n] for sample, n in zip(samples, numbers, strict=True))))
    fewest = min(len(sample) for sample in samples)
    inflated = student_quantile(fewest - 1) * math.sqrt(fewest / (fewest - 1))
    return score(*samples), inflated * torch.stack(resamples).std(0)
