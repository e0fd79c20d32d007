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
    """How the c features of a branch follow from k + 2 features: the k that bend, x − shift, and 1."""

    pixel: Tensor  # [k + 2, 1], of the k + 2 features
    pixel_bias: Tensor  # [k + 2]
    matrix: Tensor  # [c, k + 2]
    of_linear: Tensor  # [c, 2]: (1, shift) for a linear feature, else (0, 0)

    def narrow(self, branch: BranchWeights) -> BranchWeights:
        """Weights for k + 2 features that give the result of the branch."""
        weights = _features_last(branch, len(self.matrix)) @ self.matrix
        return _with_features_last(branch, weights)._replace(pixel=self.pixel, pixel_bias=self.pixel_bias)

    def widen(self, gradient: BranchWeights, branch: BranchWeights) -> BranchWeights:
        """The gradient of the weights of the branch, from that of its narrow weights."""
        c, n = self.matrix.shape
        of_weights = _features_last(gradient, n)
        of_matrix = _features_last(branch, c).reshape(-1, c).t() @ of_weights.reshape(-1, n)
        # The matrix has w and b + shift · w in the row of a linear feature, and a 1 in the row of one that bends.
        bent, of_w, of_b = self.matrix[:, :-2], of_matrix[:, -2:] * self.of_linear, of_matrix[:, -1]
        of_pixel = torch.addmm(of_w.sum(1, keepdim=True), bent, gradient.pixel[:-2])
        of_pixel_bias = torch.addmv(of_b * self.of_linear[:, 0], bent, gradient.pixel_bias[:-2])
        wide = _with_features_last(gradient, of_weights @ self.matrix.t())
        return wide._replace(pixel=of_pixel, pixel_bias=of_pixel_bias)


def narrowings(pixels: Tensor, branches: Sequence[BranchWeights]) -> list[Narrowing | None]:
    """How to narrow each branch for these pixels [n, 1], and for others in their range; None: not at all."""
    features = pixels.numel() * len(branches[0].pixel_bias)
    has_values = type(pixels) is Tensor and not torch.compiler.is_compiling()  # fake tensors have none
    full_precision = pixels.dtype in (torch.float32, torch.float64)
    if pixels.device.type == "cpu" and has_values and full_precision and features >= _FEWEST:
        low, high = (float(value) for value in pixels.aminmax())
        if math.isfinite(high - low):
            return [_narrowing(low, high, branch) for branch in branches]
    return [None] * len(branches)


def _narrowing(low: float, high: float, branch: BranchWeights) -> Narrowing | None:
    # In Python's numbers: so few take less time than operators on them.
    weights, biases = branch.pixel.flatten().tolist(), branch.pixel_bias.tolist()
    linear, bent = [], []
    for k, (w, b) in enumerate(zip(weights, biases, strict=True)):
        ends = w * low + b, w * high + b
        if min(ends) > 0:
            linear.append(k)
        elif not max(ends) <= 0:  # it bends, or it is NaN
            bent.append(k)
    c, n = len(biases), len(bent) + 2
    if n > _LARGEST_SHARE * c:
        return None
    shift = low - ((high - low) or 1.0)  # far enough below all pixels: at x − shift = 0 the gradient would be lost
    matrix, of_linear = [[0.0] * n for _ in range(c)], [[0.0, 0.0] for _ in range(c)]
    for column, k in enumerate(bent):
        matrix[k][column] = 1.0
    for k in linear:
        matrix[k][-2:] = weights[k], biases[k] + shift * weights[k]
        of_linear[k] = [1.0, shift]
    tensor = branch.pixel.new_tensor
    pixel, pixel_bias = [[weights[k]] for k in bent] + [[1.0], [0.0]], [biases[k] for k in bent] + [-shift, 1.0]
    return Narrowing(tensor(pixel), tensor(pixel_bias), tensor(matrix), tensor(of_linear))


def _features_last(branch: BranchWeights, c: int) -> Tensor:
    """The weights that take the c features of a branch: [C/4, k, k, c], or [C, P², c] without a kernel."""
    if branch.kernel is None:
        return branch.patchify.view(len(branch.patchify), -1, c)
    return branch.kernel.permute(0, 2, 3, 1)


def _with_features_last(branch: BranchWeights, weights: Tensor) -> BranchWeights:
    """The branch with other weights, which are as `_features_last` gives them."""
    if branch.kernel is None:
        return branch._replace(patchify=weights.flatten(1))
    return branch._replace(kernel=weights.permute(0, 3, 1, 2))
