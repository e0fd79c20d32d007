"""FBPConvNet (Jin, McCann, Froustey & Unser, IEEE Transactions on Image Processing 2017): a residual U-Net on FBP."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from qnmixer.models.incept_mixer import zeroed
from qnmixer.models.unrolled import Projector, UnrolledNetwork

_GROUPS = 8
"""Of channels in a norm."""


class FBPConvNet(UnrolledNetwork[Tensor]):
    """x₀ = FBP(y), x₁ = x₀ + U-Net(x₀): one iteration, which does not use y.

    The U-Net is that of the authors' public code except for the norm. The first level has three convolutions.
    Transposed 3×3 convolutions of stride 2, with norm and ReLU, lead up. Weights start from N(0, 0.01²). The authors
    use batch norm and train with one image at a time. Its statistics depend on the batch of a device, so each strategy
    and micro-batch size would train another network. Here the norm is over eight groups of channels of one image.

    Args:
        projector: FBP of the scan.
        channels: C, features at full resolution, doubled at each level down (paper: 64).
        depth: levels down, at each of which the image is halved (paper: 4).
    """

    title = "FBPConvNet"

    @classmethod
    def divisors(cls, arguments: Mapping[str, Any]) -> dict[str, int]:
        """2 to the power of the number of levels: each level halves the image."""
        return {"depth": 2 ** arguments["depth"]}

    def __init__(
        self,
        projector: Projector,
        channels: Annotated[int, Ge(4), Le(1024)] = 64,
        depth: Annotated[int, Ge(1), Le(10)] = 4,
    ) -> None:
        super().__init__(n_iterations=1)
        self.projector = projector
        self.unet = UNet(1, channels, depth, _GROUPS, _enlarge, n_first=3)
        for kernel in self.unet.hidden_weights():
            nn.init.normal_(kernel, std=0.01)

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        """x₀ + U-Net(x₀)."""
        return state + self.unet(state)

    def blocks(self) -> list[nn.Module]:
        """The levels."""
        return self.unet.levels()

    def hidden_weights(self) -> list[nn.Parameter]:
        """All kernels, but for the last."""
        return self.unet.hidden_weights()


def _enlarge(width: int) -> nn.Sequential:
    convolution = nn.ConvTranspose2d(2 * width, width, 3, stride=2, padding=1, output_padding=1, bias=False)
    return nn.Sequential(convolution, *_norm_and_relu(convolution, _GROUPS))


class UNet(nn.Module):
    """A U-Net, [B, n, H, W] → [B, n, H, W]: features of equal size are joined, and max-pooling leads down.

    The last convolution starts at zero, so that the change of an image starts at zero (ours).

    Args:
        n_images: n.
        channels: features at full resolution, doubled at each level down.
        depth: levels down.
        groups: most groups of channels in a norm.
        enlarge: the layer from 2m features to m, at twice the size, by m.
        n_first: convolutions of the first level; every other level has two.
    """

    def __init__(
        self, n_images: int, channels: int, depth: int, groups: int, enlarge: Callable[[int], nn.Module], n_first: int
    ) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth + 1)]
        first_level = _level(groups, n_images, *[channels] * n_first)
        self.down = nn.ModuleList([first_level, *(_level(groups, above, m, m) for above, m in pairwise(widths))])
        self.enlarge = nn.ModuleList(enlarge(m) for m in reversed(widths[:-1]))
        self.up = nn.ModuleList(_level(groups, 2 * m, m, m) for m in reversed(widths[:-1]))
        self.last = zeroed(nn.Conv2d(channels, n_images, 1))

    def levels(self) -> list[nn.Module]:
        """The convolutions between two changes of resolution."""
        return [*self.down, *self.up]

    def hidden_weights(self) -> list[nn.Parameter]:
        """All kernels, but for the last."""
        return [p for name, p in self.named_parameters() if p.ndim > 1 and not name.startswith("last")]

    def forward(self, x: Tensor) -> Tensor:
        """The change of x."""
        features = [self.down[0](x)]
        for level in list(self.down)[1:]:
            features.append(level(nn.functional.max_pool2d(features[-1], 2)))
        merged = features.pop()
        for enlarge, level in zip(self.enlarge, self.up, strict=True):
            merged = level(torch.cat([features.pop(), enlarge(merged)], dim=1))
        return self.last(merged)


def _level(groups: int, *widths: int) -> nn.Sequential:
    """3×3 convolutions from each width to the next, zero-padded, each with norm and ReLU."""
    convolutions = (nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairwise(widths))
    return nn.Sequential(
        *(layer for convolution in convolutions for layer in (convolution, *_norm_and_relu(convolution, groups)))
    )


def _norm_and_relu(convolution: nn.Conv2d | nn.ConvTranspose2d, groups: int) -> tuple[nn.Module, nn.Module]:
    """Its features normalised in groups, at most so many, and cut at 0."""
    width = convolution.out_channels
    # GroupNorm takes only divisors of the width.
    return nn.GroupNorm(math.gcd(groups, width), width), nn.ReLU(inplace=True)
