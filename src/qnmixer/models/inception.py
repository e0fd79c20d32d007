"""The inception of Incept-Mixer, cut into patches, with a backward pass by hand.

At full resolution, features of single pixels fill the memory. They are cheap, so backward computes them again. They are
stored patch by patch, so that patchify is a product of matrices.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qnmixer.models.narrowing import BranchWeights, narrowing_of, value_range
from qnmixer.models.shared_weights import DerivingModule


class InceptionPatches(DerivingModule):
    """Inception and patchify: [B, 1, H, W] → [B, H/P, W/P, C] (figure).

    Four branches of C/4 channels: [1×1], [1×1 → 3×3], [1×1 → 5×5], [3×3 pool → 1×1]. Each convolution is followed by
    ReLU (ours: without it the network loses 1.4 dB). The pool takes the maximum (inferred: the figure says "pool").

    The figure joins the branches to C channels and cuts them into patches by one P×P convolution of stride P. Here each
    branch is cut by itself, and the results are added. This is the same map, because a convolution of joined channels
    is the sum of the convolutions of its parts. It needs no tensor of C channels at full resolution.
    """

    def __init__(self, channels: int, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.pool = Maximum3x3()
        self.branches = nn.ModuleList(Branch(channels, patch_size, size) for size in (None, 3, 5, None))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Patch features of x."""
        branches = [branch.weights() for branch in self.branches]  # type: ignore[operator]  # a Branch
        weights = [weight for branch in self._narrow(x.detach(), branches) for weight in branch]
        return _Inception.apply(x, self.pool(x), self.bias, self.patch_size, *weights)

    def _narrow(self, x: Tensor, branches: list[BranchWeights]) -> list[BranchWeights]:
        """Weights for fewer features, if these are enough for the pixels of x."""
        # When torch compiles, x has no values. Autocast rounds pixels, so they may lie outside the range of x.
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
            return branches
        ends = value_range(x, len(branches[0].pixel_bias))  # the maxima are in the range of x
        if ends is None:
            return branches
        narrow = {}
        for k, branch in enumerate(branches):
            if (found := narrowing_of(branch, *ends, self.cache().setdefault(k, []))) is not None:
                narrow[k] = self.derive(found, found.narrow, *branch.of_features())
        weights = iter(self.used(list(narrow.values())))
        for k in narrow:
            branches[k] = branches[k].with_features(*islice(weights, 3))
        return branches


class Maximum3x3(nn.Module):
    """The largest of each pixel's 3 × 3 neighbourhood, [B, 1, H, W]: along rows, then along columns.

    torch pools one channel on one core only. With lines as channels it uses all cores, and a fifth of the time.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The image of maxima."""
        along_rows = F.max_pool1d(x.squeeze(1), 3, stride=1, padding=1)
        return F.max_pool1d(along_rows.mT, 3, stride=1, padding=1).mT.unsqueeze(1)


class Branch(nn.Module):
    """One branch of c = C/4 features: 1×1 convolution, perhaps a k×k convolution, patchify.

    It only holds the weights, for `InceptionPatches`. Patchify takes the pixels of a patch row by row.
    """

    def __init__(self, channels: int, patch_size: int, size: int | None) -> None:
        super().__init__()
        width = channels // 4
        self.pixel = nn.Linear(1, width)
        self.spatial = None if size is None else nn.Conv2d(width, width, size)
        self.patchify = nn.Linear(patch_size**2 * width, channels, bias=False)
        with torch.no_grad():
            self.patchify.weight.mul_(0.5)  # torch's range for one convolution of all four branches: 4 times the inputs

    def weights(self) -> BranchWeights:
        """All of them."""
        kernel, bias = (None, None) if self.spatial is None else (self.spatial.weight, self.spatial.bias)
        return BranchWeights(self.pixel.weight, self.pixel.bias, kernel, bias, self.patchify.weight)


class _Layout(NamedTuple):
    """Images as rows [n, c], one for each pixel, in row order or in patch order."""

    batch: int
    height: int
    width: int
    patch_size: int

    @property
    def grid(self) -> torch.Size:
        """B, h and w of the patches."""
        return torch.Size([self.batch, self.height // self.patch_size, self.width // self.patch_size])

    def cut(self, image: Tensor) -> Tensor:
        """An image [B, c, H, W] in patch order: a view [B, h, w, P, P, c]."""
        _, h, w = self.grid
        return image.permute(0, 2, 3, 1).unflatten(2, (w, -1)).unflatten(1, (h, -1)).transpose(2, 3)

    def join(self, rows: Tensor) -> Tensor:
        """Rows in patch order, put into row order: a view [B, h, P, w, P, c]."""
        return rows.view(*self.grid, self.patch_size, self.patch_size, -1).transpose(2, 3)

    def image(self, rows: Tensor) -> Tensor:
        """Rows in row order as an image [B, c, H, W], with channels last in memory."""
        return rows.view(self.batch, self.height, self.width, -1).permute(0, 3, 1, 2)


class _Inception(torch.autograd.Function):
    """Patch features [B, H/P, W/P, C] from x and its maxima, [B, 1, H, W] each.

    A branch with a k×k convolution takes the pixels in row order, the others in patch order. Under autocast the
    products are in half precision, but their sum is not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, maxima: Tensor, bias: Tensor, patch_size: int, *weights: Tensor | None) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        layout = _Layout(len(x), x.shape[2], x.shape[3], patch_size)
        with torch.autocast(device, enabled=False):
            image, maxima = (image.detach().to(dtype) for image in (x, maxima))
            inputs = layout.cut(image).reshape(-1, 1), image.reshape(-1, 1), layout.cut(maxima).reshape(-1, 1)
            cast = [None if weight is None else weight.to(dtype) for weight in weights]
            patches, convolved = bias, []
            for pixels, branch in zip(_inputs(inputs), _branches(cast), strict=True):
                features = _features(pixels, branch)
                if branch.kernel is not None:
                    image = F.conv2d(layout.image(features), branch.kernel, branch.kernel_bias, padding="same")
                    features = _relu(layout.cut(image))
                    convolved.append(features)
                patches = _add_product(patches, features.view(layout.grid.numel(), -1), branch.patchify.t())
            ctx.layout, ctx.dtype = layout, x.dtype
            ctx.save_for_backward(*inputs, *convolved, *cast)
            return patches.view(*layout.grid, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layout, saved = ctx.layout, ctx.saved_tensors
        inputs, convolved, weights = saved[:3], iter(saved[3:5]), saved[5:]
        gradient = gradients[0].flatten(0, 2)
        of_patches = gradient.to(inputs[0].dtype)
        of_inputs: list[Tensor] = []
        of_weights: list[Tensor | None] = []
        for pixels, branch in zip(_inputs(inputs), _branches(weights), strict=True):
            of_features, of_kernel, of_kernel_bias = of_patches @ branch.patchify, None, None
            if branch.kernel is None:
                features = in_patches = _features(pixels, branch)
                of_features = of_features.view_as(features)
            else:
                in_patches = next(convolved)
                of_features = _relu_backward(layout.join(of_features), layout.join(in_patches))
                features = _features(pixels, branch)
                of_features, of_kernel, of_kernel_bias = _convolution_backward(
                    layout.image(of_features), layout.image(features), branch.kernel
                )
                of_features = of_features.permute(0, 2, 3, 1).reshape(features.shape)
            of_features = _relu_backward(of_features, features)
            of_patchify = of_patches.t() @ in_patches.view(len(of_patches), -1)
            of_weights += of_features.t() @ pixels, of_features.sum(0), of_kernel, of_kernel_bias, of_patchify
            if not ctx.needs_input_grad[0]:  # not in iteration 0: x₀ = FBP(y) is a constant
                continue
            if branch.kernel is None:
                of_inputs.append(layout.join(of_features @ branch.pixel).reshape(-1, 1).to(ctx.dtype))
            else:  # these branches use x too
                of_inputs[0] = _add_product(of_inputs[0], of_features, branch.pixel)
        of_images = [layout.image(rows) for rows in of_inputs] or [None, None]
        return *of_images, gradient.sum(0), None, *(None if of is None else of.to(ctx.dtype) for of in of_weights)


def _inputs(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Input pixels of each branch. inputs: x in patch order, x in row order, maxima in patch order."""
    in_patches, rows, maxima = inputs
    return in_patches, rows, rows, maxima


def _branches(weights: Sequence[Tensor | None]) -> list[BranchWeights]:
    """The weights of each branch."""
    n = len(BranchWeights._fields)
    return [BranchWeights._make(weights[k : k + n]) for k in range(0, len(weights), n)]


def _features(pixels: Tensor, branch: BranchWeights) -> Tensor:
    """Features [n, c] of single pixels [n, 1]."""
    if pixels.is_cuda:  # one kernel, ReLU too
        return torch._addmm_activation(branch.pixel_bias, pixels, branch.pixel.t())
    # On a CPU a product with a matrix of one column takes twice as long.
    return torch.addcmul(branch.pixel_bias, pixels, branch.pixel.t()).relu_()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total + a b, in the precision of the total."""
    return torch.addmm(total, a, b) if a.dtype == total.dtype else total + a @ b


def _relu(x: Tensor) -> Tensor:
    """ReLU of [..., c] as contiguous rows [n, c], in one pass."""
    if torch.compiler.is_compiling():  # torch.compile makes one pass of it anyway, and loses the strides of out=
        return x.relu().reshape(-1, x.shape[-1])
    return torch.clamp_min(x, 0, out=x.new_empty(x.shape)).flatten(0, -2)


def _relu_backward(gradient: Tensor, result: Tensor) -> Tensor:
    """The gradient of ReLU's input as rows [n, c], from gradient and result [..., c] of its output."""
    if torch.compiler.is_compiling():
        return torch.ops.aten.threshold_backward(gradient, result, 0).reshape(-1, result.shape[-1])
    rows = gradient if gradient.is_contiguous() else gradient.new_empty(gradient.shape)
    return torch.ops.aten.threshold_backward.grad_input(gradient, result, 0, grad_input=rows).flatten(0, -2)


def _convolution_backward(gradient: Tensor, x: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, the kernel and the bias of a convolution that does not change H and W."""
    padding = [size // 2 for size in kernel.shape[2:]]
    one, none = [1, 1], [0, 0]
    return torch.ops.aten.convolution_backward(
        gradient, x, kernel, [len(kernel)], one, padding, one, False, none, 1, [True, True, True]
    )
