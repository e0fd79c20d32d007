"""The latent codec: E takes an image-sized gradient to the latent r, D takes a latent step s back to an image."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_WIDTH = 16  # feature channels between the convolutions of the strided codec


class OrthonormalCodec(nn.Module):
    """Pixel unshuffle, then a convolution. D starts as the transpose of E, so D(E(·)) starts as a projection.

    `channels` is at most factor². With this value E loses nothing at the start: D(E(g)) = g. The first training steps
    then move the image along its true gradient. A kernel of 3 also sees the neighbouring cells; these weights start at
    zero. Inferred: the paper does not draw it. It trained best of the codecs that were tried.
    `encode`: [B, 1, H, W] → [B, channels, H/factor, W/factor]; `decode` goes back.
    """

    def __init__(self, factor: int, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.factor = factor
        basis = nn.init.orthogonal_(torch.empty(channels, factor**2))
        middle = kernel_size // 2
        self.encoder = nn.Conv2d(factor**2, channels, kernel_size, padding=middle, bias=False)
        self.decoder = nn.Conv2d(channels, factor**2, kernel_size, padding=middle, bias=False)
        with torch.no_grad():
            for convolution, matrix in ((self.encoder, basis), (self.decoder, basis.T)):
                convolution.weight.zero_()
                convolution.weight[:, :, middle, middle] = matrix

    def encode(self, g: Tensor) -> Tensor:
        """E(g)."""
        return self.encoder(F.pixel_unshuffle(g, self.factor))

    def decode(self, s: Tensor) -> Tensor:
        """D(s)."""
        return F.pixel_shuffle(self.decoder(s), self.factor)


class StridedCodec(nn.Module):
    """Stride-2 convolutions down and stride-2 transposed convolutions up, as in the paper's text.

    The latent can be smaller than the image, as the paper asks. Its figures weakly suggest at most two transposed
    convolutions in a row (factor 4). It trained to lower quality than `OrthonormalCodec`. E and D are linear. D starts
    as Eᵀ, with ‖E‖ ≤ 1 (ours). The first steps then descend; with random weights they diverge.
    Shapes are as in `OrthonormalCodec`. The factor is a power of two.
    """

    def __init__(self, factor: int, channels: int) -> None:
        super().__init__()
        depth = int(math.log2(factor))
        sizes = [1, *[_WIDTH] * (depth - 1), channels]
        down = [nn.Conv2d(a, b, 4, stride=2, padding=1, bias=False) for a, b in pairwise(sizes)]
        up = [nn.ConvTranspose2d(b, a, 4, stride=2, padding=1, bias=False) for a, b in pairwise(sizes)]
        with torch.no_grad():
            for convolution, transposed in zip(down, up, strict=True):
                nn.init.orthogonal_(convolution.weight, gain=0.5)  # four kernels overlap at each pixel
                transposed.weight.copy_(convolution.weight)
        self.encoder = nn.Sequential(*down)
        self.decoder = nn.Sequential(*reversed(up))

    def encode(self, g: Tensor) -> Tensor:
        """E(g)."""
        return self.encoder(g)

    def decode(self, s: Tensor) -> Tensor:
        """D(s)."""
        return self.decoder(s)
