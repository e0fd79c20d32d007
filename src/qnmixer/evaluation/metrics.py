"""Metrics of single images, as the config's `metrics` name them: PSNR, SSIM, RMSE, and those of the user.

The data range is 1 (the slice's full scale, or the window). SSIM uses a 7 × 7 uniform window, as the paper's author
does. It is torchmetrics', which mirrors the border; scikit-image's leaves it out, which changes small images, and those
with streaks at their border, by one or two of 100. Some papers use a data range of 2, which inflates SSIM: compare with
care.

LoDoPaB-CT and 2DeteCT have other rules: `own_range` gives their numbers. The data range is that of each reference. SSIM
is that of skimage, with the sample covariance and without a border of 3 pixels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from torchmetrics import Metric
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from qnmixer.data.batch import Batch, to_hu
from qnmixer.errors import PluginError, UserError, first_line
from qnmixer.settings.parts import MetricConfig

SSIM_WINDOW = 7


@dataclass(frozen=True)
class ImageMetric:
    """A metric of each image of a batch."""

    label: str  # its key and target, for messages
    # A number from image and truth, [1, 1, H, W]. Each image is measured alone: a metric of torchmetrics gives one
    # number for all that it gets.
    function: Callable[[Tensor, Tensor], Any]
    in_hu: bool = False  # whether the function gets HU. Else its images are in [0, 1]

    def __call__(self, image: Tensor, batch: Batch) -> Tensor:
        """[B], from images [B, 1, H, W] and their batch. Raises PluginError if the function gives no number."""
        if isinstance(self.function, nn.Module):
            self.function.to(image.device)
        x, truth = (to_hu(batch, images) if self.in_hu else images for images in (image, batch["image"]))
        return torch.stack([self.of_one(*pair) for pair in zip(x.split(1), truth.split(1), strict=True)])

    def of_one(self, image: Tensor, truth: Tensor) -> Tensor:
        """The number of one image, [1, 1, H, W]."""
        if isinstance(self.function, Metric):
            self.function.reset()  # it would gather all images since its start
        value = torch.as_tensor(self.function(image, truth), device=image.device)
        if value.numel() != 1:
            raise PluginError(f"{self.label} gives a tensor {[*value.shape]} for one image: it must give a number")
        return value.reshape(())


def build_metrics(metrics: Mapping[str, MetricConfig], own_range: bool) -> dict[str, ImageMetric]:
    """Build metrics by name. Raises PluginError for a target that does not fit.

    `own_range`: whether the data range of each image is that of its truth. Passed to targets that have this argument.
    """
    supplied, image_metrics = {"own_range": own_range}, {}
    for name, config in metrics.items():
        function = config.build(supplied=supplied) if config.is_class else config.bound(supplied)
        if isinstance(function, nn.Module):
            function.requires_grad_(False).eval()
        image_metrics[name] = ImageMetric(config.as_typed, function, config.in_hu)
    return image_metrics


def try_metrics(metrics: Mapping[str, ImageMetric], size: int) -> None:
    """Compute each metric of an image [1, 1, size, size], so that a wrong one is found before training.

    Raises PluginError.
    """
    for metric in metrics.values():
        try_loss(metric.label, metric.of_one, size, n_images=1)


def try_loss(label: str, loss: Callable[[Tensor, Tensor], Tensor], size: int, n_images: int = 2) -> None:
    """Compute the loss of some images. Whatever it raises becomes a PluginError of one line."""
    image = torch.linspace(0, 1, n_images * size**2, device="cpu").reshape(n_images, 1, size, size)
    try:
        loss(image, image.sqrt())
    except UserError:
        raise
    except Exception as error:
        raise PluginError(
            f"{label} fails for images {[*image.shape]} ({first_line(error)}): it must take image and truth, both "
            "[B, 1, H, W], and give [B]"
        ) from error


def one_for_each(label: str, value: Any, image: Tensor) -> Tensor:
    """The value of a loss, which must be [B]. Raises PluginError, which begins by `label`, if it is not."""
    if not isinstance(value, Tensor) or value.shape != image.shape[:1]:
        kind = f"a tensor {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
        raise PluginError(f"{label} gives {kind} for a batch of {len(image)}: it must give [B], one number an image")
    return value


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


def ssim_percent(image: Tensor, truth: Tensor, *, own_range: bool = False) -> Tensor:
    """SSIM × 100 of each image, [B] from two [B, 1, H, W]."""
    return 100 * ssim(image, truth, own_range=own_range)


def rmse(image: Tensor, truth: Tensor) -> Tensor:
    """Root of the mean square error of each image, [B] from two [B, 1, H, W]."""
    return (image - truth).square().mean((1, 2, 3)).sqrt()


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
