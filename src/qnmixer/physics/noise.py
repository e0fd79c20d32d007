"""Noise on line integrals: none, the field's scale-free one, and a physical one. It is keyed, so it can be repeated.

A noise is called as `noise(y, keys)`: y [B, 1, V, D] float, and one key for each sample, a sequence of non-negative
whole numbers such as (seed, epoch, index). A sample's noise depends only on its row of y and its key: not on the batch,
the device, the rank or the worker. It is drawn on the CPU by numpy's Philox generator. Nothing is differentiated.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor
from torch.nn.functional import avg_pool2d

from qnmixer.errors import GeometryError, PluginError, first_line
from qnmixer.physics.bounds import require_bounds

Key = Sequence[int]
"""The key of a draw, for instance (seed, epoch, index); whole numbers from 0."""

Photons = Annotated[float, Gt(0), Le(1e15)]
"""Counts of an unattenuated ray. numpy draws no larger ones."""
Deviation = Annotated[float, Ge(0)]
"""A standard deviation."""
_FEWEST_COUNTS = 1.0
"""Counts that a starved bin is taken to have, so that its logarithm is finite."""
_LOCAL = 5
"""Neighbouring bins whose mean counts stand for the expected ones: a single starved bin says little."""
_NODES = torch.linspace(-5, 5, 33).tolist()
"""Standard deviations from the mean at which the logarithm of counts is taken, to find its variance."""
_WEIGHTS = torch.tensor(_NODES).square().div(-2).softmax(0).tolist()
"""Of the nodes: those of a normal distribution."""


class KeyedNoise(ABC):
    """Noise that is drawn for each sample separately, from the generator of its key.

    Derive your own noise from it and define `sample`, in NumPy. The fields of a dataclass have the bounds of their
    annotations: a value beyond them raises ValueError.

    Attributes:
        needs_one_scale: whether it makes sense only if all slices have the same scale of attenuation.
        for_measured: whether it is added to measured sinograms too, which have noise already.
    """

    needs_one_scale: ClassVar[bool] = False
    for_measured: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # only a dataclass calls this
            require_bounds(item.name, getattr(self, item.name), item.type)

    @abstractmethod
    def sample(self, p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One sinogram with noise.

        Args:
            p: line integrals [1, V, D], float64.
            rng: the only source of random numbers; its key is (seed, stream, sample).

        Returns an array of p's shape.
        """

    def variance(self, y: Tensor) -> Tensor:
        """The expected variance of each ray of noisy sinograms y [B, 1, V, D], in their unit squared and in y's shape.

        Here it is zero: your own noise need not define it. Total variation computes its weight from it.
        """
        return torch.zeros_like(y)

    def __call__(self, y: Tensor, keys: Sequence[Key]) -> Tensor:
        """Add noise to y, in float64 on the CPU. Raises PluginError if `sample` returns another shape."""
        if len(keys) != len(y):
            raise ValueError(f"{len(keys)} keys for a batch of {len(y)}: give one per sample")
        rows = y.detach().double().cpu().numpy()
        # SeedSequence hashes its key, so neighbouring keys give independent streams.
        generators = (np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key)))) for key in keys)
        try:
            noisy = [np.asarray(self.sample(row, rng)) for row, rng in zip(rows, generators, strict=True)]
        except (TypeError, AttributeError) as error:
            raise PluginError(
                f"{type(self).__name__}.sample fails ({first_line(error)}): it gets a NumPy array p [1, V, D] and a "
                "numpy.random.Generator, no torch tensors, and gives an array"
            ) from error
        for row, noisy_row in zip(rows, noisy, strict=True):
            if noisy_row.shape != row.shape:
                raise PluginError(
                    f"{type(self).__name__}.sample gives {[*noisy_row.shape]} for a sinogram {[*row.shape]}: "
                    "return an array of the same shape"
                )
        return torch.from_numpy(np.stack(noisy)).to(y)


@dataclass(frozen=True)
class NoNoise(KeyedNoise):
    """Leaves the line integrals as they are."""

    def sample(self, p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The sinogram itself."""
        return p

    def __call__(self, y: Tensor, keys: Sequence[Key]) -> Tensor:
        """Return y itself."""
        return y


@dataclass(frozen=True)
class FieldNoise(KeyedNoise):
    """The field's noise: p' = −log(Poisson(I₀ e^{−p/p_max})/I₀)·p_max, then + N(0, σ²).

    p_max is the sample's largest line integral. So the Poisson part does not depend on the unit of y. It is no model of
    dose. A bin without counts is taken to have one. A sample of air only (p_max ≤ 0) gets the Gaussian part only.

    Args:
        photons: I₀, counts of an unattenuated ray (the paper's author: 1e6; others: 5e6 or 1e5).
        sigma: standard deviation of the Gaussian part, in the unit of y.
    """

    photons: Photons = 1e6
    sigma: Deviation = 0.05

    def sample(self, p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One sinogram with noise."""
        largest = p.max()
        if largest > 0:
            counts = rng.poisson(self.photons * np.exp(-p / largest))
            p = -np.log(np.maximum(counts, _FEWEST_COUNTS) / self.photons) * largest
        return p + self.sigma * rng.standard_normal(p.shape)

    def variance(self, y: Tensor) -> Tensor:
        """p_max²/N + σ², with N = I₀ e^{−y/p_max} counts."""
        # To first order, −log of N counts has the variance 1/N.
        largest = y.amax((1, 2, 3), keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)
        return largest.square() * torch.exp(y / largest) / self.photons + self.sigma**2


@dataclass(frozen=True)
class PhysicalNoise(KeyedNoise):
    """Counting noise of a real dose: N = K Poisson(I₀ w e^{−μp}) + N(0, σₑ²), p' = −log(N/(I₀ w))/μ.

    μ turns value × mm into attenuation, see `attenuation_per_value`. Counts below c are set to c, so a starved bin
    has the value log(I₀ w/c)/μ. K is crosstalk: each bin gives a share of its counts to each of its two neighbours.

    Args:
        photons: I₀, counts of an unattenuated ray in the brightest bin.
        water_attenuation: of water in 1/mm; the default is that at about 70 keV.
        electronic_sigma: σₑ, standard deviation of the electronic noise in counts.
        hu_max: HU of x = 1; 0 where x = 1 is water.
        fewest_counts: c, for a bin with fewer counts, so that its logarithm is finite.
        profile: w [D], the counts of each bin by a bow-tie filter, as a share of the brightest; None: all are equal.
        crosstalk: the share of its counts that a bin gives to each neighbour by K.

    Raises ValueError for a value out of bounds and a profile whose largest value is not 1, and GeometryError for
    sinograms of other bins.
    """

    needs_one_scale: ClassVar[bool] = True

    photons: Photons = 1e5
    water_attenuation: Annotated[float, Gt(0)] = 0.0192
    electronic_sigma: Deviation = 0.0
    hu_max: Annotated[float, Gt(-1000)] = 0.0
    fewest_counts: Annotated[float, Gt(0)] = _FEWEST_COUNTS
    profile: Sequence[Annotated[float, Gt(0), Le(1)]] | None = None
    crosstalk: Annotated[float, Ge(0), Le(0.25)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profile is not None:
            profile = tuple(map(float, self.profile))
            object.__setattr__(self, "profile", profile)
            if not all(0 < share <= 1.001 for share in profile) or max(profile, default=0) < 0.999:
                raise ValueError("profile needs values above 0, of which the largest is 1: photons is that of this bin")

    def sample(self, p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One sinogram with noise."""
        mu, unattenuated = self._mu, self._unattenuated(p.shape[-1])
        counts = self._shared(rng.poisson(unattenuated * np.exp(-mu * p)).astype(np.float64))
        counts += self.electronic_sigma * rng.standard_normal(p.shape)
        return -np.log(np.maximum(counts, self.fewest_counts) / unattenuated) / mu

    def variance(self, y: Tensor) -> Tensor:
        """The variance of −log(max(N, c))/μ for normal N, with the mean counts of neighbouring bins of y.

        Where counts are many this is (N + σₑ²)/(μ N)². Behind six attenuation lengths the logarithm bends, and starved
        bins are cut at c.
        """
        unattenuated = torch.as_tensor(self._unattenuated(y.shape[-1])).to(y)
        counts = unattenuated * torch.exp(-self._mu * y)
        counts = avg_pool2d(counts, (1, _LOCAL), 1, (0, _LOCAL // 2), count_include_pad=False)
        kept = (1 - 2 * self.crosstalk) ** 2 + 2 * self.crosstalk**2  # of the variance: crosstalk smooths
        deviation = (kept * counts + self.electronic_sigma**2).sqrt()
        mean, square = torch.zeros_like(y), torch.zeros_like(y)
        for node, weight in zip(_NODES, _WEIGHTS, strict=True):
            # About the logarithm of the mean, so that the difference below keeps its digits.
            logarithm = ((counts + node * deviation).clamp_min(self.fewest_counts) / counts).log()
            mean += weight * logarithm
            square += weight * logarithm.square()
        return (square - mean.square()) / self._mu**2

    @property
    def _mu(self) -> float:
        return attenuation_per_value(self.water_attenuation, self.hu_max)

    def _unattenuated(self, n_bins: int) -> np.ndarray:
        """I₀ w, [D], or [1] without a profile."""
        profile = np.asarray((1.0,) if self.profile is None else self.profile)
        if self.profile is not None and len(profile) != n_bins:
            raise GeometryError(f"noise.profile has {len(profile)} bins, and the sinogram {n_bins}")
        return self.photons * profile

    def _shared(self, counts: np.ndarray) -> np.ndarray:
        """K counts, [1, V, D]. The first and the last bin have themselves as their missing neighbour."""
        if not self.crosstalk:
            return counts
        wide = np.pad(counts, ((0, 0), (0, 0), (1, 1)), mode="edge")
        return counts + self.crosstalk * (wide[..., :-2] + wide[..., 2:] - 2 * counts)


@dataclass(frozen=True)
class InsertedNoise(PhysicalNoise):
    """The noise that a measured sinogram lacks to a lower dose. The other arguments are those of the measured scan.

    From the measured counts N, which have the noise of I₀ already: N' = d N + K(Poisson(q) − q) + √(1 − d²) N(0, σₑ²)
    with q = d (1 − d) K⁻¹ N, and p' = −log(N'/(d I₀ w))/μ. So mean, quantum variance and electronic variance are those
    of a scan with d I₀. In attenuation this adds (1 − d)/d of the quantum variance.

    Yu et al., J. Comput. Assist. Tomogr. 36 (2012) 477–487 insert noise like this (equation not looked up). Zeng et
    al., IEEE Trans. Nucl. Sci. 62 (2015) 2226–2233, draw all noise anew from d N (p. 2227, equation 1 and steps 3 to
    6), which counts the noise of the measured scan twice.

    Args:
        dose: d, the lower dose as a share of the measured one.
    """

    for_measured: ClassVar[bool] = True

    dose: Annotated[float, Gt(0), Le(1)] = 0.25

    def sample(self, p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One sinogram [1, V, D] at the lower dose, from a measured one."""
        mu, unattenuated = self._mu, self._unattenuated(p.shape[-1])
        counts = unattenuated * np.exp(-mu * p)
        before_crosstalk = np.maximum(2 * counts - self._shared(counts), 0)  # K⁻¹ counts, to first order
        quantum = self.dose * (1 - self.dose) * before_crosstalk
        lower = self.dose * counts + self._shared(rng.poisson(quantum) - quantum)
        lower += self.electronic_sigma * np.sqrt(1 - self.dose**2) * rng.standard_normal(p.shape)
        return -np.log(np.maximum(lower, self.fewest_counts) / (self.dose * unattenuated)) / mu

    def variance(self, y: Tensor) -> Tensor:
        """As of `PhysicalNoise`, at the lower dose."""
        values = {item.name: getattr(self, item.name) for item in fields(PhysicalNoise)}
        return PhysicalNoise(**values | {"photons": self.dose * self.photons}).variance(y)


@dataclass(frozen=True)
class MixedNoise(PhysicalNoise):
    """The field's noise for some samples, photon counts for the others, so that one network learns both.

    Args:
        physical_share: share of samples with photon counts, as their keys decide; the others have field noise.
        field_photons, field_sigma: of the field's noise, see `FieldNoise`.
    """

    physical_share: Annotated[float, Ge(0), Le(1)] = 0.3
    field_photons: Photons = 1e6
    field_sigma: Deviation = 0.05

    def sample(self, p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One sinogram with noise."""
        if rng.random() < self.physical_share:
            return super().sample(p, rng)
        return self._field().sample(p, rng)

    def variance(self, y: Tensor) -> Tensor:
        """The mean of both variances, weighted by their shares: a sinogram does not show which noise it has."""
        share = self.physical_share
        return share * super().variance(y) + (1 - share) * self._field().variance(y)

    def _field(self) -> FieldNoise:
        return FieldNoise(self.field_photons, self.field_sigma)


def attenuation_per_value(water_attenuation: float, hu_max: float) -> float:
    """Linear attenuation (1/mm) of x = 1: x = (HU + 1000)/(hu_max + 1000) and μ = μ_water (HU + 1000)/1000."""
    return water_attenuation * (hu_max + 1000.0) / 1000.0
