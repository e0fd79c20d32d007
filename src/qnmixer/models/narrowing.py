"""Fewer features for a branch of the inception, with the same result.

A feature max(0, w x + b) of a pixel x bends at x = −b/w only. If all pixels lie on one side of the bend, the feature is
linear in x, or it is 0. All linear features of a branch follow from two: x − shift, which is positive, and 1. So a
branch needs the features that bend, and these two. Of 24 features about 7 bend at the start of training, and the
convolutions, which take most of a step, then cost about half. Training of the demo and of the shipped weights has
hardly changed how many bend.

The values of weights and pixels decide which features bend. A GPU would have to wait until the host knows them, so this
is for CPUs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_FEWEST = 2**16
"""With fewer pixels × features, it takes longer to find what bends than it saves."""
_LARGEST_SHARE = 0.75
"""A branch of which more features would remain is left as it is."""


class BranchWeights(NamedTuple):
    """The weights of a branch of c features, or their gradients."""

    pixel: Tensor  # [c, 1]
    pixel_bias: Tensor  # [c]
    kernel: Tensor | None  # [C/4, c, k, k]
    kernel_bias: Tensor | None  # [C/4]
    patchify: Tensor  # [C, P² · C/4]; without a kernel [C, P² · c]


class Narrowing(NamedTuple):
    """How the c features of a branch follow from n features: those that bend, x − shift, and 1."""

    pixel: Tensor  # [n, 1], of the n features
    pixel_bias: Tensor  # [n]
    matrix: Tensor  # [c, n]
    of_linear: Tensor  # [2, c]: (1, shift) for a linear feature, else (0, 0)

    def narrow(self, branch: BranchWeights) -> BranchWeights:
        """Weights for n features that give the result of the branch."""
        narrow, matrix = branch._replace(pixel=self.pixel, pixel_bias=self.pixel_bias), self.matrix.t()
        # Many small products: with one large product of so few columns, a CPU takes four times as long.
        if branch.kernel is not None:
            outputs, _, *size = branch.kernel.shape
            kernel = torch.bmm(matrix.expand(outputs, -1, -1), branch.kernel.flatten(2))
            return narrow._replace(kernel=kernel.unflatten(2, size))
        of_pixels = branch.patchify.unflatten(1, (-1, matrix.shape[1])).permute(1, 2, 0)
        patchify = torch.bmm(matrix.expand(len(of_pixels), -1, -1), of_pixels)
        return narrow._replace(patchify=patchify.flatten(0, 1).t())

    def widen(self, gradient: BranchWeights, branch: BranchWeights) -> BranchWeights:
        """The gradient of the weights of the branch, from that of its narrow weights."""
        c, n = self.matrix.shape
        if branch.kernel is not None:
            assert gradient.kernel is not None
            of_kernel = gradient.kernel.permute(0, 2, 3, 1) @ self.matrix.t()
            wide = gradient._replace(kernel=of_kernel.permute(0, 3, 1, 2))
            linear = gradient.kernel[:, -2:].flatten(2)
            of_linear = torch.bmm(linear, branch.kernel.flatten(2).mT).sum(0)
        else:
            of_pixels = gradient.patchify.view(-1, n)
            wide = gradient._replace(patchify=(of_pixels @ self.matrix.t()).view_as(branch.patchify))
            of_linear = of_pixels[:, -2:].t().contiguous() @ branch.patchify.view(-1, c)
        # The matrix has w and b + shift · w in the row of a linear feature, and a 1 in the row of one that bends.
        bent, (of_w, of_b) = self.matrix[:, :-2], of_linear
        one, shift = self.of_linear
        of_pixel = torch.addmv(of_w * one + of_b * shift, bent, gradient.pixel[:-2, 0]).unsqueeze(1)
        of_pixel_bias = torch.addmv(of_b * one, bent, gradient.pixel_bias[:-2])
        return wide._replace(pixel=of_pixel, pixel_bias=of_pixel_bias)


def narrowings(pixels: Tensor, branches: Sequence[BranchWeights]) -> list[Narrowing | None]:
    """How to narrow each branch for these pixels [n, 1], and for others in their range; None: not at all."""
    features = pixels.numel() * len(branches[0].pixel_bias)
    has_values = type(pixels) is Tensor and not torch.compiler.is_compiling()  # fake tensors have none
    full_precision = pixels.dtype in (torch.float32, torch.float64)
    if pixels.device.type == "cpu" and has_values and full_precision and features >= _FEWEST:
        low, high = (float(value) for value in pixels.aminmax())
        if math.isfinite(high - low):
            with np.errstate(all="ignore"):  # weights may be infinite
                return [_narrowing(low, high, branch) for branch in branches]
    return [None] * len(branches)


def _narrowing(low: float, high: float, branch: BranchWeights) -> Narrowing | None:
    # By NumPy: on so few numbers, torch's operators take longer.
    w, b = branch.pixel[:, 0].numpy(), branch.pixel_bias.numpy()
    ends = w * low + b, w * high + b
    linear, zero = np.minimum(*ends) > 0, np.maximum(*ends) <= 0
    (bent,) = (~(linear | zero)).nonzero()  # a feature that is NaN counts as one that bends
    c, n = len(w), len(bent) + 2
    if n > _LARGEST_SHARE * c:
        return None
    shift = low - ((high - low) or 1.0)  # far enough below all pixels: at x − shift = 0 the gradient would be lost
    pixel, pixel_bias, matrix, of_linear = (np.zeros(shape, w.dtype) for shape in ((n, 1), n, (c, n), (2, c)))
    pixel[:-2, 0], pixel_bias[:-2], matrix[bent, np.arange(n - 2)] = w[bent], b[bent], 1.0
    pixel[-2], pixel_bias[-2], pixel_bias[-1] = 1.0, -shift, 1.0
    matrix[linear, -2], matrix[linear, -1] = w[linear], (b + shift * w)[linear]
    of_linear[0], of_linear[1] = linear, shift * linear
    return Narrowing(*map(torch.from_numpy, (pixel, pixel_bias, matrix, of_linear)))
