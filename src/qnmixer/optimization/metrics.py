"""PSNR and SSIM of single images, over the whole range and inside a HU window.

The data range is 1 (the slice's full scale, or the window). SSIM uses a 7 × 7 uniform window, as the paper's author
does. Some papers use a data range of 2, which inflates SSIM: compare with care.

LoDoPaB-CT and 2DeteCT have other rules: `own_range` gives their numbers. The data range is that of each reference. SSIM
is that of skimage, with the sample covariance and without a border of 3 pixels.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

SSIM_WINDOW = 7


def build_metrics(own_range: bool) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """PSNR and SSIM × 100 of each image, by name."""
    return {
        "psnr": partial(psnr, own_range=own_range),
        "ssim": lambda image, truth: 100 * ssim(image, truth, own_range=own_range),
    }


def psnr(image: Tensor, truth: Tensor, *, own_range: bool = False) -> Tensor:
    """PSNR in dB of each image, [B] from two [B, 1, H, W]; infinite for equal images."""
    if own_range:
        return 10 * torch.log10(_range(truth).square() / (image.double() - truth).square().mean((1, 2, 3))).float()
    return peak_signal_noise_ratio(image, truth, data_range=1.0, reduction="none", dim=(1, 2, 3))


def ssim(image: Tensor, truth: Tensor, *, own_range: bool = False) -> Tensor:
    """SSIM (at most 1) of each image, [B] from two [B, 1, H, W]. It is differentiable, and computed in float32."""
    if own_range:
        return _ssim_of_skimage(image, truth)
    with torch.autocast(image.device.type, enabled=False):
        value = structural_similarity_index_measure(
            image.float(),
            truth.float(),
            gaussian_kernel=False,
            kernel_size=SSIM_WINDOW,
            data_range=1.0,
            reduction="none",
        )
    assert isinstance(value, Tensor)
    return value.reshape(len(image))


def _range(truth: Tensor) -> Tensor:
    values = truth.flatten(1).double()
    return values.amax(1) - values.amin(1)


def _ssim_of_skimage(image: Tensor, truth: Tensor) -> Tensor:
    """`skimage.metrics.structural_similarity` with its defaults and the truth's range."""
    # float64, as in skimage: variances are small differences of large means.
    x, y = image.double(), truth.double()

    def mean(values: Tensor) -> Tensor:
        return avg_pool2d(values, SSIM_WINDOW, stride=1)  # windows that lie inside the image: no border

    sample = SSIM_WINDOW**2 / (SSIM_WINDOW**2 - 1)
    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = sample * (mean(x * x) - mean_x**2), sample * (mean(y * y) - mean_y**2)
    covariance = sample * (mean(x * y) - mean_x * mean_y)
    c1, c2 = ((k * _range(truth))[:, None, None, None] ** 2 for k in (0.01, 0.03))
    top = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    value = top / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return value.mean((1, 2, 3)).float()


def to_window(hu: Tensor, window: tuple[float, float]) -> Tensor:
    """Cut HU to [low, high] and scale them to [0, 1], as a radiologist's display does."""
    low, high = window
    return torch.clamp((hu - low) / (high - low), 0.0, 1.0)
