"""Incept-Mixer, the learned regulariser G of QN-Mixer: inception features, then an MLP-Mixer over their patches.

Patches lose edges. So G may end with convolutions at full resolution, which also get the mixer's features (ours).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qnmixer.errors import ConfigError
from qnmixer.models.inception import InceptionPatches
from qnmixer.models.shared_weights import DerivingModule


class _ReluInPlace(torch.autograd.Function):
    """max(0, x), written over x. Backward writes its gradient over the gradient of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.relu_())
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (result,), (gradient,) = ctx.saved_tensors, gradients
        return torch.ops.aten.threshold_backward.grad_input(gradient, result, 0, grad_input=gradient)


def relu_in_place(x: Tensor) -> Tensor:
    """max(0, x) in place, with a backward in place: at full resolution each copy counts.

    x must have no other use. Only one convolution may use the result, because backward overwrites its gradient.
    """
    return _ReluInPlace.apply(x)


class Patches(nn.Conv2d):
    """Patches of the image itself, without an inception: [B, 1, H, W] → [B, H/P, W/P, C]."""

    def __init__(self, channels: int, patch_size: int) -> None:
        super().__init__(1, channels, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Patch features of x."""
        return super().forward(x).permute(0, 2, 3, 1)


class AxisMLP(nn.Module):
    """Linear, GELU, Linear along one axis of a map [B, h, w, C]. All positions share the weights."""

    def __init__(self, size: int, ratio: float, axis: int) -> None:
        super().__init__()
        hidden = max(1, round(size * ratio))
        self.axis = axis
        self.layers = nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size))

    def forward(self, x: Tensor) -> Tensor:
        """x with its `axis` mixed."""
        first, activation, last = self.layers
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        hidden = activation(along(self.axis, x, first.weight, first.bias))
        return along(self.axis, hidden, last.weight, last.bias)


def along(axis: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W v + b for each vector v along an axis (1, 2 or 3) of x [B, h, w, C].

    The backward pass of a convolution is one operator, that of a matrix product three or four. A GPU waits for the host
    to start operators, so it convolves. On a CPU with several threads convolutions take up to twice as long. Under
    autocast each of many products would copy the weight, so there convolutions are used too.
    """
    by_convolution = x.is_cuda or torch.is_autocast_enabled(x.device.type)
    return (convolved if by_convolution else multiplied)(axis, x, weight, bias)


def convolved(axis: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`along`, by a 1 × 1 convolution."""
    return F.conv2d(x.movedim(axis, 1), weight[:, :, None, None], bias).movedim(1, axis)


def multiplied(axis: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`along`, by products of matrices."""
    if axis == 3:
        return F.linear(x, weight, bias)
    assert bias is not None
    # The axis becomes the rows of matrices, so nothing is transposed in memory.
    columns = x.flatten(2) if axis == 1 else x.flatten(0, 1)
    product = torch.baddbmm(bias[:, None], weight.expand(len(columns), -1, -1), columns)
    return product.view(*x.shape[:axis], -1, *x.shape[axis + 1 :])


class MixerLayer(nn.Module):
    """x + WidthMLP(HeightMLP(LN x)), one residual over both, then x + ChannelMLP(LN x) (figure); [B, h, w, C]."""

    def __init__(self, grid: int, channels: int, ratio: float) -> None:
        super().__init__()
        self.spatial_norm = nn.LayerNorm(channels)
        self.height_mlp = AxisMLP(grid, ratio, axis=1)
        self.width_mlp = AxisMLP(grid, ratio, axis=2)
        self.channel_norm = nn.LayerNorm(channels)
        self.channel_mlp = AxisMLP(channels, ratio, axis=3)

    def forward(self, x: Tensor) -> Tensor:
        """One layer of mixing."""
        x = x + self.width_mlp(self.height_mlp(self.spatial_norm(x)))
        return x + self.channel_mlp(self.channel_norm(x))


class PatchExpansion(DerivingModule):
    """[B, h, w, C] → [B, 1, P·h, P·w]: Linear to P²·C/4, pixel shuffle, 1×1 to one channel (Swin-style, field).

    Linear and 1×1 are both linear, so they are applied as their product. No features of several channels exist at full
    resolution. The 1×1 starts at zero, so G starts as 0 and x_t as descent on the data term alone (ours: the largest
    single gain found).
    """

    def __init__(self, channels: int, patch_size: int) -> None:
        super().__init__()
        width = max(1, channels // 4)
        self.patch_size = patch_size
        self.expand = nn.Parameter(torch.empty(patch_size**2, width, channels))
        self.project = nn.Parameter(torch.zeros(width))
        nn.init.normal_(self.expand, std=channels**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The image [B, 1, P·h, P·w] from the features of its patches."""
        (weight,) = self.used([self.derive("weight", _product, self.expand, self.project)])
        return F.pixel_shuffle(along(3, x, weight, None).permute(0, 3, 1, 2), self.patch_size)


def _product(expand: Tensor, project: Tensor) -> tuple[Tensor]:
    """The weight of `PatchExpansion`, [P², C]."""
    return ((project[:, None] * expand).sum(1),)


class FeatureExpansion(nn.Module):
    """[B, h, w, C] → [B, features, P·h, P·w], an input of `DetailConvolutions`; starts at zero (ours)."""

    def __init__(self, channels: int, patch_size: int, features: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.expand = nn.Linear(channels, patch_size**2 * features)
        nn.init.zeros_(self.expand.weight)
        nn.init.zeros_(self.expand.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Features of each pixel's neighbourhood, [B, features, P·h, P·w]."""
        wide = along(3, x, self.expand.weight, self.expand.bias)
        return F.pixel_shuffle(wide.permute(0, 3, 1, 2), self.patch_size)


class DetailConvolutions(nn.Module):
    """Three 5×5 convolutions at full resolution with ReLU between them, 1 → d → d → 1 channels, as LEARN's (ours).

    The mixer's d features are added to the output of the first. The last starts at zero, so G starts at zero.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 5, padding=2)
        self.second = nn.Conv2d(channels, channels, 5, padding=2)
        self.last = nn.Conv2d(channels, 1, 5, padding=2)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)  # type: ignore[arg-type]  # it has one

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """G(x) [B, 1, H, W] from x and the mixer's features of it [B, d, H, W]."""
        # Channels last halves the time on a CPU. For one channel it is only another view, but `.to` would copy it.
        x = x.reshape(len(x), *x.shape[2:], 1).permute(0, 3, 1, 2)
        features = relu_in_place(self.first(x).add_(context))
        return self.last(relu_in_place(self.second(features)))


class InceptMixer(nn.Module):
    """G: [B, 1, H, W] → [B, 1, H, W] through inception, P×P patches, mixer layers and patch expansion (figure).

    Args:
        image_size: H = W.
        channels: C.
        patch_size: P.
        n_layers, mlp_ratio: depth of the mixer, and hidden width of its MLPs as a multiple of the mixed axis.
        inception: False: the patches are cut from the image itself (ablation).
        features: the number of features that it returns for `DetailConvolutions`; 0: it returns G(x).

    Raises:
        ConfigError: channels is not a multiple of 4.
    """

    def __init__(
        self,
        image_size: int,
        channels: int,
        patch_size: int,
        n_layers: int,
        mlp_ratio: float,
        inception: bool,
        features: int,
    ) -> None:
        super().__init__()
        if channels < 4 or channels % 4:  # else the branches would have fewer features together
            raise ConfigError(f"channels={channels} is not a multiple of 4: the inception has four branches")
        self.embedding = InceptionPatches(channels, patch_size) if inception else Patches(channels, patch_size)
        self.mixer = nn.Sequential(
            *(MixerLayer(image_size // patch_size, channels, mlp_ratio) for _ in range(n_layers))
        )
        self.expansion = (
            FeatureExpansion(channels, patch_size, features) if features else PatchExpansion(channels, patch_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        """G(x) [B, 1, H, W], or features [B, features, H, W]."""
        return self.expansion(self.mixer(self.embedding(x)))
