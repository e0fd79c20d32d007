"""Incept-Mixer, the learned regulariser G of QN-Mixer: inception features, then an MLP-Mixer over their patches.

Patches lose edges. So G may end with convolutions at full resolution, which also get the mixer's features (ours).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class InceptMixer(nn.Module):
    """G: [B, 1, H, W] → [B, 1, H, W] through inception, P×P patches, mixer layers and patch expansion (figure).

    Args:
        image_size: H = W.
        channels: C, a multiple of 4.
        patch_size: P.
        n_layers, mlp_ratio: depth of the mixer, and hidden width of its MLPs as a multiple of the mixed axis.
        inception: False: the patches are cut from the image itself (ablation).
        features: the number of features that it returns for `DetailConvolutions`; 0: it returns G(x).
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
        self.embedding = (Inception if inception else Patches)(channels, patch_size)
        self.mixer = nn.Sequential(
            *(MixerLayer(image_size // patch_size, channels, mlp_ratio) for _ in range(n_layers))
        )
        self.expansion = (
            FeatureExpansion(channels, patch_size, features) if features else PatchExpansion(channels, patch_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        """G(x) [B, 1, H, W], or features [B, features, H, W]."""
        return self.expansion(self.mixer(self.embedding(x)))


class Inception(nn.Module):
    """Inception and patchify: [B, 1, H, W] → [B, H/P, W/P, C] (figure).

    Four branches of C/4 channels: [1×1], [1×1 → 3×3], [1×1 → 5×5], [3×3 pool → 1×1]. Each convolution is followed by
    ReLU (ours: without it the network loses 1.4 dB). The pool takes the maximum (inferred: the figure says "pool").

    The figure joins the branches to C channels and cuts them into patches by one P×P convolution of stride P. Here each
    branch is cut by itself, and the results are added. This is the same map, because a convolution of joined channels
    is the sum of the convolutions of its parts. It needs no tensor of C channels at full resolution.
    """

    def __init__(self, channels: int, patch_size: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(channels, patch_size, size) for size in (None, 3, 5, None))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Patch features of x."""
        conv1, conv3, conv5, pool = self.branches
        return self.bias + conv1(x) + conv3(x) + conv5(x) + pool(F.max_pool2d(x, 3, stride=1, padding=1))


class Branch(nn.Module):
    """One branch of c = C/4 features: [1×1], perhaps [k×k], each with ReLU, then patches: → [B, H/P, W/P, C].

    As convolutions: patchify(relu(spatial(relu(pixel(x))))), where patchify is P×P with stride P. Here 1×1 and P×P are
    products of matrices. A 1×1 branch looks at single pixels, so it is cut first: its features need one layout only.
    """

    def __init__(self, channels: int, patch_size: int, size: int | None) -> None:
        super().__init__()
        width = channels // 4
        self.patch_size = patch_size
        self.activation = nn.ReLU(inplace=True)
        self.pixel = nn.Linear(1, width)  # a 1×1 convolution of one channel
        self.spatial = None if size is None else nn.Conv2d(width, width, size, padding=size // 2)
        self.patchify = nn.Linear(patch_size**2 * width, channels, bias=False)
        with torch.no_grad():
            self.patchify.weight.mul_(0.5)  # torch's range for one convolution of all four branches: 4 times the inputs

    def forward(self, x: Tensor) -> Tensor:
        """Patch features of x [B, 1, H, W]."""
        if self.spatial is None:
            patches = self.activation(self.pixel(cut(x, self.patch_size)))
        else:
            features = self.activation(self.pixel(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
            patches = self.activation(cut(self.spatial(features), self.patch_size))
        return self.patchify(patches.flatten(3))


def cut(x: Tensor, patch_size: int) -> Tensor:
    """[B, c, H, W] → patches [B, H/P, W/P, P², c], row by row."""
    cells = x.permute(0, 2, 3, 1).unflatten(2, (-1, patch_size)).unflatten(1, (-1, patch_size))
    return cells.transpose(2, 3).flatten(3, 4)


class Patches(nn.Conv2d):
    """Patches of the image itself, without an inception: [B, 1, H, W] → [B, H/P, W/P, C]."""

    def __init__(self, channels: int, patch_size: int) -> None:
        super().__init__(1, channels, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Patch features of x."""
        return super().forward(x).permute(0, 2, 3, 1)


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
        x = x + self.width_mlp(self.height_mlp(self.spatial_norm(x)))  # after both axes each patch has seen all others
        return x + self.channel_mlp(self.channel_norm(x))


class AxisMLP(nn.Module):
    """Linear, GELU, Linear along one axis of a map [B, h, w, C]. All positions share the weights."""

    def __init__(self, size: int, ratio: float, axis: int) -> None:
        super().__init__()
        hidden = max(1, round(size * ratio))  # small grids and ratios keep a neuron
        self.axis = axis
        self.layers = nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size))

    def forward(self, x: Tensor) -> Tensor:
        """x with its `axis` mixed."""
        return self.layers(x.movedim(self.axis, -1)).movedim(-1, self.axis)


class PatchExpansion(nn.Module):
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
        nn.init.normal_(self.expand, std=channels**-0.5)  # not zero as well: with two zeros neither gets a gradient

    def forward(self, x: Tensor) -> Tensor:
        """The image [B, 1, P·h, P·w] from the features of its patches."""
        weight = torch.einsum("pwc,w->pc", self.expand, self.project)  # for each of the P² pixels of a patch, C weights
        return F.pixel_shuffle(F.linear(x, weight).permute(0, 3, 1, 2), self.patch_size)


class FeatureExpansion(nn.Module):
    """[B, h, w, C] → [B, features, P·h, P·w], an input of `DetailConvolutions`; starts at zero (ours)."""

    def __init__(self, channels: int, patch_size: int, features: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.expand = zeroed(nn.Linear(channels, patch_size**2 * features))

    def forward(self, x: Tensor) -> Tensor:
        """Features of each pixel's neighbourhood, [B, features, P·h, P·w]."""
        return F.pixel_shuffle(self.expand(x).permute(0, 3, 1, 2), self.patch_size)


class DetailConvolutions(nn.Module):
    """Three 5×5 convolutions at full resolution with ReLU between them, to d, d and 1 channels, as LEARN's (ours).

    Their inputs are x and perhaps other images of its size. The mixer's d features are added to the output of the
    first. The last starts at zero, so G starts at zero.
    """

    def __init__(self, channels: int, n_inputs: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(n_inputs, channels, 5, padding=2)
        self.second = nn.Conv2d(channels, channels, 5, padding=2)
        self.last = zeroed(nn.Conv2d(channels, 1, 5, padding=2))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """G(x) [B, 1, H, W] from x and perhaps more images [B, n_inputs, H, W], and the mixer's features of x."""
        # Channels last, which halves the time on a CPU. `.to(memory_format=…)` leaves an image of one channel as it is.
        x = torch.stack(x.unbind(1), -1).permute(0, 3, 1, 2)
        # In place: their inputs are needed by nothing else, and stand at full resolution.
        return self.last(torch.relu_(self.second(torch.relu_(self.first(x).add_(context)))))


def zeroed(layer: nn.Module) -> nn.Module:
    """The layer with weights of zero."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
