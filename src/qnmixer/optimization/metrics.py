"""PSNR and SSIM of single images, over the whole range and inside a HU window.

Data range 1 throughout (the slice's full scale, or the window). SSIM uses a 7 × 7 uniform window (the paper's
author). Some of the field uses a data range of 2, which inflates SSIM: compare with care.
"""

import torch
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

SSIM_WINDOW = 7


def psnr(image: Tensor, truth: Tensor) -> Tensor:
    """PSNR in dB of each image, [B] from two [B, 1, H, W]; infinite for equal images."""
    return peak_signal_noise_ratio(image, truth, data_range=1.0, reduction="none", dim=(1, 2, 3))


def ssim(image: Tensor, truth: Tensor) -> Tensor:
    """SSIM (at most 1) of each image, [B] from two [B, 1, H, W]. It is differentiable, and computed in float32."""
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


def to_window(hu: Tensor, window: tuple[float, float]) -> Tensor:
    """Cut HU to [low, high] and scale them to [0, 1], as a radiologist's display does."""
    low, high = window
    return torch.clamp((hu - low) / (high - low), 0.0, 1.0)
