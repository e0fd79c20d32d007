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
    next_weight: Tensor  # the kernel for n features; for a branch without a kernel, patchify
    bent: np.ndarray  # [n − 2], the numbers of those that bend
    linear: np.ndarray  # [2, c]: (1, shift) for a linear feature, else (0, 0)

    def narrow(self, branch: BranchWeights) -> BranchWeights:
        """Weights for n features that give the result of the branch."""
        narrow = branch._replace(pixel=self.pixel, pixel_bias=self.pixel_bias)
        if branch.kernel is None:
            return narrow._replace(patchify=self.next_weight)
        return narrow._replace(kernel=self.next_weight)

    def widen(self, gradient: BranchWeights, branch: BranchWeights) -> BranchWeights:
        """The gradient of the weights of the branch, from that of its narrow weights."""
        if branch.kernel is not None:
            assert gradient.kernel is not None
            of_kernel = gradient.kernel.flatten(2)
            of_wide = torch.bmm(self.matrix.expand(len(of_kernel), -1, -1), of_kernel)
            wide = gradient._replace(kernel=of_wide.view_as(branch.kernel))
            of_linear = torch.bmm(of_kernel[:, -2:], branch.kernel.flatten(2).mT).sum(0)
        else:
            c, n = self.matrix.shape
            of_pixels = gradient.patchify.view(-1, n)
            wide = gradient._replace(patchify=(of_pixels @ self.matrix.t()).view_as(branch.patchify))
            of_linear = of_pixels[:, -2:].t().contiguous() @ branch.patchify.view(-1, c)
        # The matrix has w and b + shift · w in the row of a linear feature, and a 1 in the row of one that bends.
        (of_w, of_b), (one, shift) = of_linear.numpy(), self.linear
        with np.errstate(all="ignore"):  # gradients may be infinite
            of_pixel, of_pixel_bias = of_w * one + of_b * shift, of_b * one
        of_pixel[self.bent] = gradient.pixel[:-2, 0].numpy()
        of_pixel_bias[self.bent] = gradient.pixel_bias[:-2].numpy()
        return wide._replace(pixel=torch.from_numpy(of_pixel[:, None]), pixel_bias=torch.from_numpy(of_pixel_bias))


class _Known(NamedTuple):
    """The narrowing of a branch. It serves pixels with their least and largest value within these bounds."""

    low: tuple[float, float]
    high: tuple[float, float]
    narrowing: Narrowing | None


Known = dict[int, list[_Known]]
"""What is known of the branches of one inception, by their number, while its weights stay as they are."""


def narrowings(pixels: Tensor, branches: Sequence[BranchWeights], known: Known) -> list[Narrowing | None]:
    """How to narrow each branch for these pixels [n, 1], and for others in their range; None: not at all.

    The same features bend in most iterations of a pass. So a narrowing is found once, and `known` keeps it.
    """
    features = pixels.numel() * len(branches[0].pixel_bias)
    has_values = type(pixels) is Tensor and not torch.compiler.is_compiling()  # fake tensors have none
    full_precision = pixels.dtype in (torch.float32, torch.float64)
    if pixels.device.type == "cpu" and has_values and full_precision and features >= _FEWEST:
        low, high = (float(value) for value in pixels.aminmax())
        if math.isfinite(high - low):
            return [_find(low, high, branch, known.setdefault(k, [])) for k, branch in enumerate(branches)]
    return [None] * len(branches)


def _find(low: float, high: float, branch: BranchWeights, known: list[_Known]) -> Narrowing | None:
    for it in known:
        if it.low[0] < low < it.low[1] and it.high[0] < high < it.high[1]:
            return it.narrowing
    with np.errstate(all="ignore"):  # weights may be zero or infinite
        known.append(_narrowing(low, high, branch))
    return known[-1].narrowing


def _narrowing(low: float, high: float, branch: BranchWeights) -> _Known:
    # By NumPy: on so few numbers, torch's operators take longer.
    w, b = branch.pixel[:, 0].numpy(), branch.pixel_bias.numpy()
    ends = w * low + b, w * high + b
    linear, zero = np.minimum(*ends) > 0, np.maximum(*ends) <= 0
    bends = ~(linear | zero)  # also a feature that is NaN
    shift = low - ((high - low) or 1.0)  # far enough below all pixels: at x − shift = 0 the gradient would be lost
    # The same features bend as long as neither end of the pixels crosses a bend. And x − shift must stay well above 0.
    at = -b / w
    inside, outside, middle = at[bends], at[~bends], (low + high) / 2
    lows = np.fmax.reduce(outside[outside < middle], initial=(low + shift) / 2), np.fmin.reduce(inside, initial=np.inf)
    highs = np.fmax.reduce(inside, initial=-np.inf), np.fmin.reduce(outside[outside >= middle], initial=np.inf)

    (bent,) = bends.nonzero()
    c, n = len(w), len(bent) + 2
    narrowing = None
    if n <= _LARGEST_SHARE * c:
        pixel, pixel_bias, matrix = (np.zeros(shape, w.dtype) for shape in ((n, 1), n, (c, n)))
        pixel[:-2, 0], pixel_bias[:-2], matrix[bent, np.arange(n - 2)] = w[bent], b[bent], 1.0
        pixel[-2], pixel_bias[-2], pixel_bias[-1] = 1.0, -shift, 1.0
        matrix[linear, -2], matrix[linear, -1] = w[linear], (b + shift * w)[linear]
        of_linear = np.stack([linear, shift * linear]).astype(w.dtype)
        tensors = torch.from_numpy(pixel), torch.from_numpy(pixel_bias), torch.from_numpy(matrix)
        narrowing = Narrowing(*tensors, _next_weight(branch, tensors[2]), bent, of_linear)
    return _Known((float(lows[0]), float(lows[1])), (float(highs[0]), float(highs[1])), narrowing)


def _next_weight(branch: BranchWeights, matrix: Tensor) -> Tensor:
    """The weight of the branch that takes its features, for those of which the matrix makes them."""
    # Many small products: with one large product of so few columns, a CPU takes four times as long.
    if branch.kernel is not None:
        outputs, _, *size = branch.kernel.shape
        return torch.bmm(matrix.t().expand(outputs, -1, -1), branch.kernel.flatten(2)).unflatten(2, size)
    of_pixels = branch.patchify.unflatten(1, (-1, len(matrix))).permute(1, 2, 0)
    return torch.bmm(matrix.t().expand(len(of_pixels), -1, -1), of_pixels).flatten(0, 1).t()
