"""Task-based scores against their closed forms."""

import math

import pytest
import torch
from torch import Tensor

from qnmixer_studies.task.scores import (
    channel_outputs,
    detected,
    detected_beyond,
    dog_channels,
    edge_contrast_to_noise,
    edge_profile,
    half_modulation,
    noise_of,
    noise_power,
    radial_mean,
    shown_transfer,
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
    phases = torch.arange(8, dtype=torch.float64)[:, None, None] / 8
    wave = 3 * torch.cos(2 * math.pi * (4 * torch.arange(32, dtype=torch.float64) / 32 + phases)).expand(8, 32, 32)
    deviation, frequency = noise_of(noise_power(wave, PIXEL), PIXEL)
    assert math.isclose(deviation, 3 / math.sqrt(2), rel_tol=1e-9)
    assert math.isclose(frequency, 4 / (32 * PIXEL), rel_tol=1e-9)


@pytest.mark.parametrize("name", ["low", "ramp", "ramp with a window"])
def test_the_spectrum_of_coloured_noise_is_the_analytic_one(name: str) -> None:
    """Within 5 % in the rings that hold 95 % of the power: each region sees the noise through a window of its own."""

    def analytic(f: Tensor) -> Tensor:
        smooth = torch.exp(-((2 * math.pi * 2 * f) ** 2))  # a blur of σ = 2 mm
        return {"low": smooth, "ramp": f, "ramp with a window": f * torch.cos(math.pi * f * PIXEL).clamp_min(0) ** 2}[
            name
        ]

    f = torch.fft.fftfreq(256, PIXEL, dtype=torch.float64)
    amplitudes = analytic(torch.hypot(f[:, None], f)).sqrt() / PIXEL
    images = torch.fft.ifft2(torch.fft.fft2(white(0, 24, 256, 256)) * amplitudes).real
    _, found = radial_mean(noise_power(images.unfold(1, 32, 32).unfold(2, 32, 32), PIXEL), PIXEL)
    f = torch.fft.fftfreq(32, PIXEL, dtype=torch.float64)
    frequencies, expected = radial_mean(analytic(torch.hypot(f[:, None], f)), PIXEL)
    power, order = (expected * frequencies).sort(descending=True)
    n = int((power.cumsum(0) < 0.95 * power.sum()).sum()) + 1
    torch.testing.assert_close(found[order[:n]], expected[order[:n]], rtol=0.05, atol=0)


def blurred_disc(blur: float, x: float, y: float, radius: float) -> Tensor:
    """A disc with an edge blurred by a Gaussian, which a large one hardly bends: an error function of the distance."""
    axis = (torch.arange(128, dtype=torch.float64) - 63.5) * PIXEL
    distance = torch.hypot(axis - x, axis[:, None] - y) - radius
    return 20 + 50 * torch.erfc(distance / blur / math.sqrt(2)) / 2


def test_the_transfer_function_of_a_gaussian_blur_is_a_gaussian() -> None:
    """Also of an edge of negative contrast."""
    blur, radius, centres = 1.5, 25.0, [(0.3, -0.2), (4.1, 2.7), (-3.3, 1.9)]
    profiles = torch.stack([
        edge_profile(blurred_disc(blur, x, y, radius), x, y, radius, PIXEL) for x, y in centres
    ])  # fmt: skip
    frequencies, modulation = task_transfer(profiles, PIXEL)
    expected = torch.exp(-2 * (math.pi * blur * frequencies) ** 2)
    assert (modulation - expected).abs().max() < 0.02
    assert torch.allclose(task_transfer(profiles * torch.tensor([[-1.0], [1.0]]), PIXEL)[1], modulation)
    assert math.isclose(half_modulation(profiles, PIXEL), math.sqrt(math.log(2) / 2) / (math.pi * blur), rel_tol=0.02)


def test_the_shown_transfer_function_ends_where_noise_takes_over() -> None:
    """Up to its end the interval holds the truth. Behind it the modulus is that of noise, many times the truth."""
    blur, radius, ends = 1.5, 25.0, []
    for sigma in (1.0, 5.0, 20.0):
        images = (blurred_disc(blur, 0.3, -0.2, radius) + sigma * white(seed, 128, 128) for seed in range(6))
        profiles = torch.stack([edge_profile(image, 0.3, -0.2, radius, PIXEL) for image in images])
        _, modulation, half = shown_transfer(profiles, PIXEL)
        frequencies, whole = task_transfer(profiles, PIXEL)
        expected, end = torch.exp(-2 * (math.pi * blur * frequencies) ** 2), len(half)
        assert torch.equal(modulation, whole[:end])
        assert (modulation > half).all()
        assert ((modulation - expected[:end]).abs() < half + 0.02).double().mean() > 0.9
        assert whole[end:].mean() > 10 * expected[end:].mean()
        ends.append(end)
    assert 201 > ends[0] > ends[1] > ends[2] > 10
    without_noise = edge_profile(blurred_disc(0.3, 0.3, -0.2, 25.0), 0.3, -0.2, 25.0, PIXEL).expand(3, -1, -1)
    assert len(shown_transfer(without_noise, PIXEL)[0]) == 201  # as far as it is above zero


@pytest.mark.parametrize("blur", [1, 2, 3, 4, 5, 6, 12])
def test_half_modulation_is_within_three_percent_or_none(blur: float) -> None:
    """Of a disc that was blurred as a whole: a wide blur bends its edge."""
    n, fine, radius = 96, 4, 25.0
    axis, f = (torch.arange(n * fine) - (n * fine - 1) / 2) * 1.0 / fine, torch.fft.fftfreq(n * fine, 1.0 / fine)
    disc = (torch.hypot(axis - 0.3, axis[:, None] + 0.2) < radius).double()
    blurred = torch.fft.ifft2(torch.fft.fft2(disc) * torch.exp(-2 * (math.pi * blur * torch.hypot(f[:, None], f)) ** 2))
    half = half_modulation(edge_profile(blurred.real[1::fine, 1::fine], 0.425, -0.075, radius, 1.0)[None], 1.0)
    expected = math.sqrt(math.log(2) / 2) / (math.pi * blur)
    assert half.isnan() if blur > 6 else math.isclose(half, expected, rel_tol=0.03)


def test_an_edge_in_noise_has_little_contrast_to_noise() -> None:
    found = []
    for sigma in (5.0, 500.0):
        images = (blurred_disc(1.5, 0.3, -0.2, 25.0) + sigma * white(seed, 128, 128) for seed in range(4))
        found.append(edge_contrast_to_noise(torch.stack([edge_profile(of, 0.3, -0.2, 25.0, PIXEL) for of in images])))
    per_bin = 4 * 2 * math.pi * 25 * PIXEL / 4 / PIXEL**2  # pixels of four images
    assert math.isclose(found[0], 50 / 5 * math.sqrt(per_bin), rel_tol=0.2)
    assert found[1] < 5


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
    score, half = with_interval(lambda *of: detected(*of)[0], *(channel_outputs(of) for of in (absent, present)))
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
        squares.append(detected(outputs[0], outputs[1] + 0.7)[0].square())
    uncut = torch.stack(squares).mean()
    assert math.isclose(uncut, 3 * 0.7**2, rel_tol=0.15)


@pytest.mark.parametrize("correlation", [0.0, 0.1, 0.3])
def test_the_interval_of_d_prime_holds_for_places_that_are_correlated(correlation: float) -> None:
    """Six images of eight places; d' = 2."""
    held, n = 0, 300
    for seed in range(n):
        of_places, of_images = white(seed, 2, 6, 8, 3), white(seed + n, 2, 6, 1, 3)
        absent, present = math.sqrt(1 - correlation) * of_places + math.sqrt(correlation) * of_images
        score, half = detected(absent, present + 2 / math.sqrt(3))
        held += abs(score - 2) < half
    assert 0.93 <= held / n < 1


def test_pairs_of_equal_noise_show_the_difference_exactly() -> None:
    """Only the covariance is then uncertain, and half as certain as with two sets."""
    scores = []
    for seed in range(300):
        absent = white(seed, 6, 8, 3)
        scores.append(torch.stack(detected(absent, absent + 2 / math.sqrt(3))))
    values, halves = torch.stack(scores).unbind(1)
    assert math.isclose(values.mean(), 2, rel_tol=0.02)
    assert math.isclose(halves.mean(), 1.96 * values.std(), rel_tol=0.15)


def test_the_interval_of_a_paired_difference_holds_and_is_narrower_than_that_of_two() -> None:
    """Six images. Nine tenths of a rival's noise is that of the method: d' = 2 of both."""
    held, n, paired, alone = 0, 40, 0.0, 0.0
    for seed in range(n):
        noise, other = white(seed, 6, 8, 3), white(seed + n, 6, 8, 3)
        rival = 0.9 * noise + math.sqrt(1 - 0.9**2) * other
        pairs = [(absent, absent + 2 / math.sqrt(3)) for absent in (noise, rival)]
        difference, half = detected_beyond(*pairs)
        assert torch.isclose(difference, detected(*pairs[0])[0] - detected(*pairs[1])[0])
        held += abs(difference) < half
        paired, alone = paired + half, alone + math.hypot(*(detected(*pair)[1] for pair in pairs))
    assert held / n >= 0.93
    assert paired < 0.8 * alone


def test_what_is_equal_at_a_place_in_every_image_is_no_noise() -> None:
    absent, present = white(0, 20, 4, 3), white(1, 20, 4, 3) + 1
    places = 50 * white(2, 4, 3)
    assert torch.isclose(detected(absent + places, present + places)[0], detected(absent, present)[0])


def test_the_interval_of_a_mean_is_that_of_its_standard_error_and_of_few_values_wide_enough() -> None:
    values = white(3, 100)
    score, half = with_interval(torch.mean, values)
    assert score == values.mean()
    assert math.isclose(half, 1.98 * values.std() / 10, rel_tol=0.2)
    pairs = [with_interval(torch.mean, white(seed, 6)) for seed in range(150)]
    assert 0.93 <= sum(abs(score) < half for score, half in pairs) / 150 < 1
