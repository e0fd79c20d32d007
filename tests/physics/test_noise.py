"""Noise: its statistics, its keys, and that starved bins stay finite."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.errors import GeometryError, PluginError
from qnmixer.physics import (
    FieldNoise,
    InsertedNoise,
    KeyedNoise,
    MixedNoise,
    NoNoise,
    PhysicalNoise,
)

PHYSICAL = PhysicalNoise(photons=1e4, electronic_sigma=5.0)
ALL: Sequence[KeyedNoise] = (FieldNoise(), PHYSICAL, MixedNoise(photons=1e4, electronic_sigma=5.0, physical_share=0.5))


def sinogram(batch: int = 1, value: float = 100.0) -> torch.Tensor:
    """A constant sinogram but for one ray of twice the value, which sets p_max."""
    y = torch.full((batch, 1, 64, 256), value)
    y[:, :, 0, 0] = 2 * value
    return y


@pytest.mark.parametrize("noise", ALL, ids=lambda noise: type(noise).__name__)
def test_noise_depends_on_sample_and_key_only(noise: KeyedNoise) -> None:
    y = sinogram(3) * torch.tensor([1.0, 0.5, 0.7]).view(3, 1, 1, 1)
    keys, before = [(1, 0, 5), (1, 0, 6), (1, 1, 5)], torch.get_rng_state()
    together = noise(y, keys)
    assert torch.equal(torch.get_rng_state(), before)
    for i in range(3):
        assert torch.equal(together[i : i + 1], noise(y[i : i + 1], keys[i : i + 1]))
    same = noise(y[:1].expand(3, -1, -1, -1), keys)
    assert not torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])
    assert (together.dtype, together.shape) == (y.dtype, y.shape)
    assert torch.equal(noise(y.flip(0), keys[::-1]), together.flip(0))


def test_statistics_of_the_field_noise() -> None:
    """At p = p_max/2: variance of the log part p_max² e^{1/2}/I₀ (delta method), plus σ²."""
    y = sinogram()
    for photons, sigma in ((1e6, 0.05), (1e4, 0.0), (1e6, 0.5)):
        error = (FieldNoise(photons, sigma)(y, [(7,)]) - y)[0, 0].flatten()[1:]
        expected = (200.0**2 * 2.718281828**0.5 / photons + sigma**2) ** 0.5
        assert float(error.std()) == pytest.approx(expected, rel=0.03)
        assert abs(float(error.mean())) < 4 * expected / len(error) ** 0.5 + 0.02


def test_field_noise_is_free_of_scale_but_for_its_gaussian() -> None:
    noise = FieldNoise(1e5, 0.0)
    assert torch.allclose(noise(10 * sinogram(), [(1,)]), 10 * noise(sinogram(), [(1,)]), rtol=1e-6)


def test_mixed_noise_gives_each_sample_one_of_the_two() -> None:
    """As its key says; of 200 samples the share of the physical one is as asked for."""
    noise = MixedNoise(photons=1e3, physical_share=0.3, field_sigma=0.0)
    y = torch.full((200, 1, 4, 16), 100.0)
    strong = (noise(y, [(k,) for k in range(200)]) - y).flatten(1).std(1) > 1
    assert 0.2 < float(strong.float().mean()) < 0.4


@pytest.mark.parametrize("noise", [
    FieldNoise(1e5, 0.3), PhysicalNoise(1e5, 0.0192, 20.0), PhysicalNoise(1e4, 0.0192, 0.0, 2000.0), NoNoise(),
], ids=str)  # fmt: skip
def test_the_variance_is_told_from_a_noisy_sinogram(noise: KeyedNoise) -> None:
    y = sinogram(2) * torch.tensor([1.0, 0.4]).view(2, 1, 1, 1)
    noisy = noise(y, [(7,), (8,)])
    found = (noisy - y).flatten(1).var(1)
    torch.testing.assert_close(noise.variance(noisy).mean((1, 2, 3)), found, rtol=0.05, atol=0)


def test_the_variance_of_mixed_noise_is_that_of_both_by_their_shares() -> None:
    y = sinogram()
    mixed = MixedNoise(photons=1e4, physical_share=0.25, field_photons=1e5)
    expected = 0.25 * PhysicalNoise(1e4).variance(y) + 0.75 * FieldNoise(1e5).variance(y)
    torch.testing.assert_close(mixed.variance(y), expected)


def test_starved_bins_stay_finite_and_air_gets_the_gaussian_only() -> None:
    air = torch.zeros(1, 1, 64, 256)
    assert float(FieldNoise()(air, [(1,)]).std()) == pytest.approx(0.05, rel=0.03)
    y = sinogram(value=1e5)
    for noise in (FieldNoise(photons=0.5), PhysicalNoise(photons=100.0, electronic_sigma=50.0)):
        assert torch.isfinite(noise(y, [(1,)])).all()


def test_a_key_too_few_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 keys for a batch of 2"):
        FieldNoise()(sinogram(2), [(1,)])


def test_the_variance_is_right_where_photons_are_few() -> None:
    """Behind 6 to 9 attenuation lengths (12 to 250 counts) the logarithm bends, and starved bins are cut."""
    for attenuation in (6.0, 7.0, 8.0, 8.4, 9.0):
        noise = PhysicalNoise(1e5, 0.0192, 10.0)
        y = torch.full((1, 1, 100, 512), attenuation / 0.0192)
        noisy = noise(y, [(1,)])
        assert float(noise.variance(y).mean()) == pytest.approx(float(noisy.var()), rel=0.05)
        assert float(noise.variance(noisy).mean()) == pytest.approx(float(noisy.var()), rel=0.2)


@pytest.mark.parametrize("crosstalk", [0.0, 0.05])
def test_a_profile_dims_bins_and_crosstalk_correlates_neighbours(crosstalk: float) -> None:
    """Without crosstalk, the variance of p' is (1/N + σₑ²/N²)/μ² with N counts."""
    profile = torch.linspace(0.3, 1, 256).tolist()
    noise = PhysicalNoise(1e4, electronic_sigma=20.0, profile=profile, crosstalk=crosstalk)
    y = torch.full((1, 1, 4000, 256), 50.0)
    error = (noise(y, [(3,)]) - y)[0, 0, :, 1:-1]
    counts = 1e4 * torch.tensor(profile)[1:-1] * 2.718281828 ** (-0.0192 * 50)
    kept = (1 - 2 * crosstalk) ** 2 + 2 * crosstalk**2
    expected = (kept / counts + 20.0**2 / counts**2) / 0.0192**2
    assert float((error.var(0) / expected).mean()) == pytest.approx(1, rel=0.01)
    assert float((error.var(0) / expected).std()) < 0.04
    assert float((noise.variance(y)[0, 0, 0, 1:-1] / expected).mean()) == pytest.approx(1, rel=0.01)
    along = (error[:, 1:] * error[:, :-1]).mean(0) * counts[1:] * 0.0192**2
    assert float(along.mean()) == pytest.approx(2 * crosstalk * (1 - 2 * crosstalk), abs=0.005)


def test_a_profile_of_other_bins_or_without_a_brightest_bin_is_refused() -> None:
    with pytest.raises(GeometryError, match=r"noise.profile has 2 bins, and the sinogram 256"):
        PhysicalNoise(profile=[0.5, 1])(sinogram(), [(1,)])
    for profile in ([0.5, 0.7], [float("nan"), 1.0], [1.0, float("nan")], [0.0, 1.0]):
        with pytest.raises(ValueError, match="the largest is 1"):
            PhysicalNoise(profile=profile)


@pytest.mark.parametrize("noise_class", [FieldNoise, PhysicalNoise, InsertedNoise, MixedNoise])
def test_every_number_of_a_noise_has_bounds_of_its_own(noise_class: type) -> None:
    """Below each bound, above it, and what is no number: no class takes it, as no command line does."""
    numbers = [item.name for item in fields(noise_class) if isinstance(item.default, float)]
    assert len(numbers) >= 2
    for name in numbers:
        for value in (-1e9, math.nan, math.inf):
            with pytest.raises(ValueError, match=f"^{name}={value} must be .*(above|at least) "):
                noise_class(**{name: value})


@pytest.mark.parametrize("dose", [0.0, -0.5, 2.0])
def test_a_dose_is_above_0_and_at_most_1(dose: float) -> None:
    with pytest.raises(ValueError, match=f"^dose={dose} must be above 0 and at most 1$"):
        InsertedNoise(dose=dose)


def test_a_quarter_of_the_dose_is_inserted_as_it_would_be_measured() -> None:
    """Mean within 5 standard errors, variance within 2 % in each bin, up to 5 attenuation lengths; and the spectrum."""
    axis = torch.linspace(-1, 1, 32)
    y = (5 / 0.0192 * (1 - axis.square()).sqrt()).expand(10, 1, 10_000, 32)
    keys = [[(seed, k) for k in range(10)] for seed in (1, 2, 3)]
    full = {"photons": 4e5, "electronic_sigma": 20.0, "crosstalk": 0.03, "profile": (1 - 0.7 * axis.square()).tolist()}
    inserted = InsertedNoise(**full, dose=0.25)(PhysicalNoise(**full)(y, keys[0]), keys[1])
    measured = PhysicalNoise(**full | {"photons": 1e5})(y, keys[2])
    found, expected = ((of - y).double().transpose(0, 3).flatten(1) for of in (inserted, measured))  # [bins, all]
    error = expected.std(1)
    assert ((found - expected).mean(1).abs() < 5 * error * (2 / found.shape[1]) ** 0.5).all()
    torch.testing.assert_close(found.var(1), expected.var(1), rtol=0.02, atol=0)
    spectra = [torch.fft.rfft(of / error[:, None], dim=0).abs().square().mean(1) for of in (found, expected)]
    torch.testing.assert_close(*spectra, rtol=0.02, atol=0)


def test_the_whole_dose_lacks_nothing() -> None:
    y = PHYSICAL(sinogram(), [(1,)])
    torch.testing.assert_close(InsertedNoise(1e4, electronic_sigma=5.0, dose=1.0)(y, [(2,)]), y)


@pytest.mark.parametrize("sample", [torch.poisson, lambda p: p.clamp_min(0)])
def test_a_noise_of_torch_is_told_that_it_gets_numpy(sample: Callable[[Any], Any]) -> None:
    class Own(KeyedNoise):
        def sample(self, p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
            return sample(p)

    with pytest.raises(PluginError, match=r"sample fails \(.*\): it gets a NumPy array p \[1, V, D\]"):
        Own()(torch.ones(1, 1, 4, 4), [(1, 1, 1)])
