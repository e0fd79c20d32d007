from typing import Any

import pytest
import torch

from qnmixer.evaluation.metrics import psnr, ssim
from qnmixer.module.parts import build_loss
from qnmixer.settings.run import section


def images(n: int = 3, size: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(n, 1, size, size, generator=generator)
    noise = torch.randn(n, 1, size, size, generator=generator) * torch.tensor([0.01, 0.1, 0.3])[:n, None, None, None]
    return truth + noise, truth


def test_ssim_is_that_of_a_uniform_window_of_7_for_each_image_alone() -> None:
    """The numbers follow from the definition of Wang et al. with mirrored borders, in float64."""
    image, truth = images()
    assert ssim(image, truth).tolist() == pytest.approx([0.99943916, 0.94598908, 0.66225807], abs=1e-5)
    assert ssim(truth, truth).tolist() == pytest.approx([1, 1, 1])
    assert ssim(image[1:2], truth[1:2]).tolist() == pytest.approx([0.94598908], abs=1e-5)


def ssim_mix(weight: float) -> Any:
    return build_loss(section("loss", "ssim_mix", ssim_weight=weight))


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_ssim_mix_is_what_it_says(weight: float) -> None:
    image, truth = images()
    expected = (1 - weight) * (image - truth).abs().mean((1, 2, 3)) + weight * (1 - ssim(image, truth))
    torch.testing.assert_close(ssim_mix(weight)(image, truth), expected)


def test_ssim_is_the_same_under_autocast() -> None:
    torch.manual_seed(0)
    truth = torch.rand(1, 1, 32, 32)
    image = truth + 0.05 * torch.randn_like(truth)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = ssim(image, truth)
    assert torch.equal(value, ssim(image, truth))


@pytest.mark.parametrize(("offset", "scale"), [(0.2, 0.3), (0.0, 0.05)])
def test_with_the_range_of_each_reference_both_are_those_of_skimage(offset: float, scale: float) -> None:
    metrics = pytest.importorskip("skimage.metrics")
    image, truth = ((offset + scale * x).numpy() for x in images())
    spreads = [float(y.max() - y.min()) for y in truth]
    expected = [
        (
            metrics.peak_signal_noise_ratio(y[0], x[0], data_range=spread),
            metrics.structural_similarity(y[0], x[0], data_range=spread),
        )
        for x, y, spread in zip(image, truth, spreads, strict=True)
    ]
    x, y = torch.from_numpy(image), torch.from_numpy(truth)
    found = zip(psnr(x, y, own_range=True).tolist(), ssim(x, y, own_range=True).tolist(), strict=True)
    assert [*found] == [pytest.approx(it, abs=1e-5) for it in expected]
    assert abs(ssim(x, y, own_range=True) - ssim(x, y)).max() > 1e-3
