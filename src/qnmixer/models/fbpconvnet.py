"""FBPConvNet (Jin, McCann, Froustey & Unser, IEEE Transactions on Image Processing 2017): a residual U-Net on FBP."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from qnmixer.models.unrolled import UnrolledNetwork

if TYPE_CHECKING:
    from qnmixer.physics import FanBeamProjector


class FBPConvNet(UnrolledNetwork[Tensor]):
    """x₀ = FBP(y), x₁ = x₀ + U-Net(x₀): one iteration, which does not use y.

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
        projector: "FanBeamProjector",
        channels: Annotated[int, Ge(4), Le(1024)] = 64,
        depth: Annotated[int, Ge(1), Le(10)] = 4,
    ) -> None:
        super().__init__(n_iterations=1)
        self.projector = projector
        self.unet = _unet(channels, depth)

    def start(self, y: Tensor) -> Tensor:
        """x₀ = FBP(y)."""
        return self.projector.fbp(y)

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        """x₀ + U-Net(x₀)."""
        return state + self.unet(state)

    def blocks(self) -> list[nn.Module]:
        """The levels."""
        return self.unet.levels()

    def hidden_weights(self) -> list[nn.Parameter]:
        """All kernels, but for the last."""
        return self.unet.hidden_weights()


class UNet(nn.Module):
    """A U-Net of given parts: features of equal size are joined, and max-pooling leads down.

    The last convolution starts at zero, so that the change of an image starts at zero (ours).

    Args:
        down: the levels down, each at half the size of the one before.
        enlarge: from the size of a level to that of the level above, last level first.
        up: the levels up, each after its part of `enlarge`, on twice as many features.
        last: 1×1.
    """

    def __init__(self, down: list[nn.Module], enlarge: list[nn.Module], up: list[nn.Module], last: nn.Conv2d) -> None:
        super().__init__()
        self.down, self.enlarge, self.up = nn.ModuleList(down), nn.ModuleList(enlarge), nn.ModuleList(up)
        self.last = last
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)  # type: ignore[arg-type]  # it has one

    def levels(self) -> list[nn.Module]:
        """The convolutions between two changes of resolution."""
        return [*self.down, *self.up]

    def hidden_weights(self) -> list[nn.Parameter]:
        """All kernels, but for the last."""
        return [p for name, p in self.named_parameters() if p.ndim > 1 and not name.startswith("last")]

    def forward(self, x: Tensor) -> Tensor:
        """The change of x, from features [B, n, H, W]."""
        features = [self.down[0](x)]
        for level in list(self.down)[1:]:
            features.append(level(nn.functional.max_pool2d(features[-1], 2)))
        merged = features.pop()
        for enlarge, level in zip(self.enlarge, self.up, strict=True):
            merged = level(torch.cat([features.pop(), enlarge(merged)], dim=1))
        return self.last(merged)


def _unet(channels: int, depth: int) -> UNet:
    """[B, 1, H, W] → [B, 1, H, W], as in the authors' public code except for the norm.

    The first level has three convolutions, every other level two: 3×3, zero-padded, each with norm and ReLU.
    Transposed 3×3 convolutions of stride 2, with norm and ReLU, lead up. Weights start from N(0, 0.01²). The authors
    use batch norm and train with one image at a time. Its statistics depend on the batch of a device, so each strategy
    and micro-batch size would train another network. Here the norm is over eight groups of channels of one image.
    """
    widths = [channels * 2**level for level in range(depth + 1)]
    down: list[nn.Module] = [_level(1, channels, channels, channels)]
    down += [_level(above, width, width) for above, width in pairwise(widths)]
    enlarge: list[nn.Module] = [_enlarge(2 * width, width) for width in reversed(widths[:-1])]
    up: list[nn.Module] = [_level(2 * width, width, width) for width in reversed(widths[:-1])]
    last = nn.Conv2d(channels, 1, 1)
    for part in (*down, *enlarge, *up):
        for parameter in part.parameters():
            if parameter.ndim == 4:
                nn.init.normal_(parameter, std=0.01)
    return UNet(down, enlarge, up, last)


def _level(*widths: int) -> nn.Sequential:
    """Convolutions from each width to the next."""
    convolutions = (nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairwise(widths))
    return nn.Sequential(*(layer for convolution in convolutions for layer in (convolution, *_norm(convolution))))


def _enlarge(n_in: int, n_out: int) -> nn.Sequential:
    convolution = nn.ConvTranspose2d(n_in, n_out, 3, stride=2, padding=1, output_padding=1, bias=False)
    return nn.Sequential(convolution, *_norm(convolution))


def _norm(convolution: nn.Conv2d | nn.ConvTranspose2d) -> tuple[nn.Module, nn.Module]:
    width = convolution.out_channels
    return nn.GroupNorm(math.gcd(8, width), width), nn.ReLU(inplace=True)
