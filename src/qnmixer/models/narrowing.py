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
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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

    def of_features(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weights that make the features, and the weight that takes them."""
        return self.pixel, self.pixel_bias, self.patchify if self.kernel is None else self.kernel

    def with_features(self, pixel: Tensor, pixel_bias: Tensor, next_weight: Tensor) -> "BranchWeights":
        """The branch with other features."""
        other = self._replace(pixel=pixel, pixel_bias=pixel_bias)
        return other._replace(patchify=next_weight) if self.kernel is None else other._replace(kernel=next_weight)


@dataclass(frozen=True, eq=False)
class Narrowing:
    """How the c features of a branch follow from n features: those that bend, x − shift, and 1.

    Two of them are never equal, so that each can be a key.
    """

    pixel: Tensor  # [n, 1], of the n features
    pixel_bias: Tensor  # [n]
    matrix: Tensor  # [c, n]
    bent: np.ndarray  # [n − 2], the numbers of those that bend
    linear: np.ndarray  # [2, c]: (1, shift) for a linear feature, else (0, 0)

    def narrow(self, pixel: Tensor, pixel_bias: Tensor, wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Narrow forms of `BranchWeights.of_features`. With them the result and its gradients stay the same."""
        return _Narrow.apply(self, pixel, pixel_bias, wide)


class _Narrow(torch.autograd.Function):
    """The weights of n features from those of c: of the pixels [c, 1], their bias [c], and the next weight.

    The next weight takes the features: it is the kernel [C/4, c, k, k], or patchify [C, P² · c].
    """

    @staticmethod
    def forward(ctx: Any, narrowing: Narrowing, pixel: Tensor, pixel_bias: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        ctx.narrowing = narrowing
        ctx.save_for_backward(wide)
        matrix = narrowing.matrix
        # Many small products: with one large product of so few columns, a CPU takes four times as long.
        if wide.dim() == 4:
            narrow = torch.bmm(matrix.t().expand(len(wide), -1, -1), wide.flatten(2)).unflatten(2, wide.shape[2:])
        else:
            of_pixels = wide.unflatten(1, (-1, len(matrix))).permute(1, 2, 0)
            narrow = torch.bmm(matrix.t().expand(len(of_pixels), -1, -1), of_pixels).flatten(0, 1).t()
        # Detached: a result gets this node as its `grad_fn`, and the narrowing must not hold the node.
        return narrowing.pixel.detach(), narrowing.pixel_bias.detach(), narrow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (of_bent, of_bent_bias, of_narrow), (wide,), narrowing = gradients, ctx.saved_tensors, ctx.narrowing
        matrix = narrowing.matrix
        c, n = matrix.shape
        if wide.dim() == 4:
            of_narrow = of_narrow.flatten(2)
            of_wide = torch.bmm(matrix.expand(len(of_narrow), -1, -1), of_narrow)
            of_linear = torch.bmm(of_narrow[:, -2:], wide.flatten(2).mT).sum(0)
        else:
            of_narrow = of_narrow.reshape(-1, n)
            of_wide = of_narrow @ matrix.t()
            of_linear = of_narrow[:, -2:].t().contiguous() @ wide.view(-1, c)
        # The matrix has w and b + shift · w in the row of a linear feature, and a 1 in the row of one that bends.
        (of_w, of_b), (one, shift) = of_linear.numpy(), narrowing.linear
        with np.errstate(all="ignore"):  # gradients may be infinite
            of_pixel, of_pixel_bias = of_w * one + of_b * shift, of_b * one
        of_pixel[narrowing.bent] = of_bent[:-2, 0].numpy()
        of_pixel_bias[narrowing.bent] = of_bent_bias[:-2].numpy()
        return None, torch.from_numpy(of_pixel[:, None]), torch.from_numpy(of_pixel_bias), of_wide.view_as(wide)


class Known(NamedTuple):
    """The narrowing of a branch; None: leave it as it is.

    It serves pixels with their least and largest value within these bounds.
    """

    low: tuple[float, float]
    high: tuple[float, float]
    narrowing: Narrowing | None


def value_range(pixels: Tensor, features: int) -> tuple[float, float] | None:
    """The least and the largest of some pixels, if they are to decide how many of their features are computed."""
    has_values = type(pixels) is Tensor  # fake tensors have none
    full_precision = pixels.dtype in (torch.float32, torch.float64)
    if pixels.device.type == "cpu" and has_values and full_precision and pixels.numel() * features >= _FEWEST:
        low, high = (float(value) for value in pixels.aminmax())
        if math.isfinite(high - low):
            return low, high
    return None


def narrowing_of(branch: BranchWeights, low: float, high: float, known: list[Known]) -> Narrowing | None:
    """How to narrow a branch for pixels between low and high; None: not at all.

    The same features bend in most iterations of a pass. So a narrowing is found once, and `known` keeps it while the
    weights stay as they are.
    """
    for it in known:
        if it.low[0] < low < it.low[1] and it.high[0] < high < it.high[1]:
            return it.narrowing
    with np.errstate(all="ignore"):  # weights may be zero or infinite
        known.append(_find(branch, low, high))
    return known[-1].narrowing


def _find(branch: BranchWeights, low: float, high: float) -> Known:
    # By NumPy: on so few numbers, torch's operators take longer.
    w, b = branch.pixel.detach()[:, 0].numpy(), branch.pixel_bias.detach().numpy()
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
        narrowing = Narrowing(*tensors, bent, of_linear)
    return Known((float(lows[0]), float(lows[1])), (float(highs[0]), float(highs[1])), narrowing)
