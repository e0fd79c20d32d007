"""Task-based scores against their closed forms."""

import math

import torch
from torch import Tensor

from qnmixer.extras.task.scores import (
    channel_outputs,
    detectability,
    dog_channels,
    edge_profile,
    half_modulation,
    noise_of,
    noise_power,
    radial_mean,
    task_transfer,
    with_interval,
)

PIXEL = 0.8


def white(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_spectrum_of_white_noise_is_flat_and_integrates_to_its_variance() -> None:
    regions = 30 + 7 * white(0, 400, 2, 32, 32)
    power = noise_power(regions, PIXEL)
    assert torch.isclose(power.sum() / (32 * PIXEL) ** 2, regions.var((-2, -1), correction=0).mean())
    frequencies, means = radial_mean(power, PIXEL)
    assert torch.allclose(means, torch.full_like(means, 49 * PIXEL**2), rtol=0.05)
    assert math.isclose(frequencies[0], 1 / (32 * PIXEL))
    assert math.isclose(frequencies[-1], 15 / (32 * PIXEL))


def test_noise_of_one_frequency_has_that_mean_frequency_and_deviation() -> None:
    wave = 3 * torch.cos(2 * math.pi * 4 * torch.arange(32, dtype=torch.float64) / 32).expand(1, 32, 32)
    deviation, frequency = noise_of(noise_power(wave, PIXEL), PIXEL)
    assert math.isclose(deviation, 3 / math.sqrt(2), rel_tol=1e-9)
    assert math.isclose(frequency, 4 / (32 * PIXEL), rel_tol=1e-9)


def blurred_disc(blur: float, x: float, y: float, radius: float) -> Tensor:
    """A disc with an edge blurred by a Gaussian, which a large one hardly bends: an error function of the distance."""
    axis = (torch.arange(128, dtype=torch.float64) - 63.5) * PIXEL
    distance = torch.hypot(axis - x, axis[:, None] - y) - radius
    return 20 + 50 * torch.erfc(distance / blur / math.sqrt(2)) / 2


def test_the_transfer_function_of_a_gaussian_blur_is_a_gaussian() -> None:
    blur, radius, centres = 1.5, 25.0, [(0.3, -0.2), (4.1, 2.7), (-3.3, 1.9)]
    profiles = torch.stack([
        edge_profile(blurred_disc(blur, x, y, radius), x, y, radius, PIXEL) for x, y in centres
    ])  # fmt: skip
    frequencies, modulation = task_transfer(profiles, PIXEL)
    expected = torch.exp(-2 * (math.pi * blur * frequencies) ** 2)
    assert (modulation - expected).abs().max() < 0.02
    assert math.isclose(half_modulation(profiles, PIXEL), math.sqrt(math.log(2) / 2) / (math.pi * blur), rel_tol=0.02)


def test_an_edge_of_negative_contrast_has_the_same_transfer_function() -> None:
    image = blurred_disc(1.5, 0.3, -0.2, 25.0)
    two = [edge_profile(of, 0.3, -0.2, 25.0, PIXEL)[None] for of in (image, -image)]
    assert torch.allclose(task_transfer(two[0], PIXEL)[1], task_transfer(two[1], PIXEL)[1])


def test_channels_are_around_the_middle_and_blind_to_a_constant() -> None:
    channels = dog_channels(32)
    assert torch.allclose(channels, channels.flip(1, 2), atol=1e-12)
    assert torch.allclose(channels, channels.mT, atol=1e-12)
    assert torch.allclose(channels.sum((1, 2)), torch.zeros(3, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(channels[:, 15, 15], channels.amax((1, 2)), rtol=1e-9)


def test_a_signal_in_the_span_of_the_channels_is_detected_as_well_as_white_noise_permits() -> None:
    """d'² = ‖s‖²/σ² for s in that span; for any s that of its projection."""
    channels, sigma = dog_channels(16), 0.5
    signal = torch.einsum("c,chw->hw", torch.tensor([9.0, 6.0, 3.0], dtype=torch.float64), channels)
    beside = white(5, 16, 16)
    flat = channels.flatten(1)
    beside -= (torch.linalg.pinv(flat) @ (flat @ beside.flatten())).view(16, 16)
    absent, present = sigma * white(1, 600, 4, 16, 16), sigma * white(2, 600, 4, 16, 16) + signal + beside
    score, half = with_interval(detectability, *(channel_outputs(of) for of in (absent, present)))
    expected = signal.norm() / sigma
    assert 1 < expected < 5
    assert torch.isclose(score, expected, rtol=0.05)
    assert abs(score - expected) < 1.5 * half
    assert half < 0.1 * expected


def test_few_images_do_not_make_d_prime_larger() -> None:
    """Without the correction the mean square of these would be above 2."""
    squares = []
    for seed in range(400):
        outputs = white(seed, 2, 5, 2, 3)
        squares.append(detectability(outputs[0], outputs[1] + 0.7).square())
    uncut = torch.stack(squares).mean()
    assert math.isclose(uncut, 3 * 0.7**2, rel_tol=0.15)


def test_what_is_equal_at_a_place_in_every_image_is_no_noise() -> None:
    absent, present = white(0, 20, 4, 3), white(1, 20, 4, 3) + 1
    places = 50 * white(2, 4, 3)
    assert torch.isclose(detectability(absent + places, present + places), detectability(absent, present))


def test_the_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    values = white(3, 100)
    score, half = with_interval(torch.mean, values)
    assert score == values.mean()
    assert math.isclose(half, 1.96 * values.std() / 10, rel_tol=0.2)
