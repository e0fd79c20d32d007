"""RegFormer (Xia et al., IEEE Transactions on Radiation and Plasma Medical Sciences 2024): CNN and Swin by turns."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Ge, Le, MultipleOf
from torch import Tensor, nn
from torch.nn import functional as F

from qnmixer.errors import ConfigError
from qnmixer.models.data_term import data_gradient, rectified
from qnmixer.models.incept_mixer import zeroed
from qnmixer.models.unrolled import Channels, Iterations, Projector, UnrolledNetwork

_N_HEADS = 3  # of the attention (authors' code)
_DEPTH = 2  # Swin layers of a block: one with windows in place, one with windows shifted
_MLP_RATIO = 4


class RegFormerState(NamedTuple):
    """The image, and the features for the next iteration (none before the first)."""

    x: Tensor  # [B, 1, H, W]
    features: Tensor | None  # [B, C/2, H, W]


class RegFormer(UnrolledNetwork[RegFormerState]):
    """x₀ = FBP(y); x_{t+1} = relu(x_t − λ_t FBP(A x_t − y) + R_t(x_t, z_t)), and z_{t+1} from the features of R_t.

    For even t, R_t is local: three 5×5 convolutions. For odd t it is non-local: two layers of a Swin transformer at
    full resolution. λ_t starts at 0. All is as in the authors' public code, except for three things. The last
    convolution of each R_t starts at zero, so the network starts as FBP. FBP of A x_t − y is by the exact transpose
    (`filtered_adjoint`). There is no stochastic depth (0.1 in the second Swin layer): its random numbers would differ
    between strategies.

    Args:
        projector: A and FBP of the scan.
        n_iterations: T (field: 12, a public re-implementation; the authors' code leaves it open).
        channels: C, features of both kinds of block, a multiple of 6: half of them go to the next iteration, and three
            heads share them (authors' code: 96).
        window_size: side of the windows in pixels, which divide the image (authors' code: 8).
    """

    title = "RegFormer"

    @classmethod
    def divisors(cls, arguments: Mapping[str, Any]) -> dict[str, int]:
        """The window size."""
        return {"window_size": arguments["window_size"]}

    def __init__(
        self,
        projector: Projector,
        n_iterations: Iterations = 12,
        channels: Annotated[Channels, MultipleOf(2 * _N_HEADS)] = 96,
        window_size: Annotated[int, Ge(2), Le(8192)] = 8,
    ) -> None:
        if channels % (2 * _N_HEADS):
            raise ConfigError(f"channels={channels} should be a multiple of {2 * _N_HEADS}")
        super().__init__(n_iterations)
        image_size = projector.geometry.image_size
        self.projector = projector
        self.regularizers = nn.ModuleList()
        for t in range(n_iterations):
            ends = {"is_first": t == 0, "is_last": t == n_iterations - 1}
            if t % 2 == 0:
                self.regularizers.append(LocalBlock(channels, **ends))
            else:
                self.regularizers.append(NonlocalBlock(image_size, channels, window_size, **ends))
        self.step_sizes = nn.ParameterList(torch.zeros(1) for _ in range(n_iterations))

    def start(self, y: Tensor) -> RegFormerState:
        """x₀ = FBP(y), and no features."""
        return RegFormerState(self.projector.fbp(y), None)

    def step(self, t: int, y: Tensor, state: RegFormerState) -> RegFormerState:
        """A step against the data gradient and along R_t, both taken at x_t."""
        regularization, features = self.regularizers[t](state.x, state.features)
        descent = self.step_sizes[t] * data_gradient(self.projector, "fbp", state.x, y)
        return RegFormerState(
            rectified(state.x - descent + regularization, is_last=t == self.n_iterations - 1), features
        )

    def hidden_weights(self) -> list[nn.Parameter]:
        """All kernels and matrices, but for the biases of positions and the layers to an image, which start at zero."""
        return [
            p
            for block in self.regularizers
            for name, p in block.named_parameters()
            if p.ndim > 1 and not (name == "project.weight" or name.endswith("position_bias"))
        ]


class LocalBlock(nn.Module):
    """R_t of three 5×5 convolutions: x and the features of the previous iteration → an image, and new features.

    Half of the C features come from x, and half from the previous iteration. In the first block all come from x. The
    last block returns no features.
    """

    def __init__(self, channels: int, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, channels if is_first else channels // 2, 5, padding=2)
        self.mix = nn.Conv2d(channels, channels, 5, padding=2)
        self.project = zeroed(nn.Conv2d(channels, 1, 5, padding=2))
        self.hand_on = None if is_last else nn.Conv2d(channels, channels // 2, 3, padding=1)

    def forward(self, x: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """R_t(x), [B, 1, H, W], and features [B, C/2, H, W]."""
        mixed = torch.relu(self.mix(_joined(torch.relu(self.embed(x)), features)))
        return self.project(mixed), None if self.hand_on is None else self.hand_on(mixed)


class NonlocalBlock(nn.Module):
    """R_t of Swin layers, with every pixel as a token. Input and output are as in `LocalBlock`.

    Start as in the authors' code: linear weights from N(0, 0.02²), scales of the norms 0.01, so that R_t starts small.
    """

    def __init__(self, image_size: int, channels: int, window_size: int, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, channels if is_first else channels // 2, 3, padding=1)
        shifts = [window_size // 2 * (layer % 2) for layer in range(_DEPTH)]
        self.layers = nn.Sequential(*(SwinLayer(image_size, channels, window_size, s) for s in shifts))
        self.norm = nn.LayerNorm(channels)
        self.project = zeroed(nn.Conv2d(channels, 1, 3, padding=1))
        self.hand_on = None if is_last else nn.Conv2d(channels, channels // 2, 3, padding=1)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                nn.init.constant_(module.weight, 0.01)

    def forward(self, x: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """R_t(x), [B, 1, H, W], and features [B, C/2, H, W]."""
        tokens = _joined(self.embed(x), features).permute(0, 2, 3, 1)
        mixed = self.norm(self.layers(tokens)).permute(0, 3, 1, 2)
        return self.project(mixed), None if self.hand_on is None else self.hand_on(mixed)


class SwinLayer(nn.Module):
    """x + Attention(LN x), then x + MLP(LN x), on a map [B, H, W, C] (Liu et al. 2021, "Swin Transformer")."""

    def __init__(self, image_size: int, channels: int, window_size: int, shift: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(channels)
        self.attention = WindowAttention(image_size, channels, _N_HEADS, window_size, shift)
        self.mlp_norm = nn.LayerNorm(channels)
        hidden = _MLP_RATIO * channels
        self.mlp = nn.Sequential(nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels))

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class WindowAttention(nn.Module):
    """Attention among the pixels of each window of a map [B, H, W, C], with a learned bias for each relative position.

    With a shift the map is rolled first, so that windows lie across the borders of the others. Pixels that only the
    roll made neighbours do not attend to each other.
    """

    offsets: Tensor
    regions: Tensor

    def __init__(self, image_size: int, channels: int, n_heads: int, window_size: int, shift: int) -> None:
        super().__init__()
        self.n_heads, self.window_size = n_heads, window_size
        self.shift = shift if image_size > window_size else 0
        self.to_qkv = nn.Linear(channels, 3 * channels)
        self.project = nn.Linear(channels, channels)
        self.position_bias = nn.Parameter(torch.empty((2 * window_size - 1) ** 2, n_heads))
        nn.init.normal_(self.position_bias, std=0.02)
        self.register_buffer("offsets", _relative_positions(window_size), persistent=False)
        self.register_buffer("regions", self._regions(image_size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attention over a map [B, H, W, C]."""
        _, H, W, C = x.shape
        windows = self._cut(x.roll((-self.shift, -self.shift), dims=(1, 2)))  # [B, windows, pixels, C]
        qkv = self.to_qkv(windows).unflatten(-1, (3, self.n_heads, C // self.n_heads))
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5)  # each [B, windows, heads, pixels, C/heads]
        bias = self.position_bias[self.offsets].permute(2, 0, 1)  # [heads, pixels, pixels]
        if self.shift:
            apart = self.regions[:, :, None] != self.regions[:, None, :]
            bias = torch.where(apart[:, None], -torch.inf, bias)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        windows = self.project(mixed.transpose(2, 3).flatten(-2))
        return self._join(windows, H, W).roll((self.shift, self.shift), dims=(1, 2))

    def _cut(self, x: Tensor) -> Tensor:
        """[B, H, W, C] → [B, windows, pixels of a window, C]."""
        rows = x.unflatten(1, (-1, self.window_size)).unflatten(3, (-1, self.window_size))
        return rows.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def _join(self, windows: Tensor, height: int, width: int) -> Tensor:
        """The inverse of `_cut`: [B, windows, pixels of a window, C] → [B, H, W, C]."""
        size = self.window_size
        grid = windows.unflatten(2, (size, size)).unflatten(1, (height // size, width // size))
        return grid.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def _regions(self, image_size: int) -> Tensor:
        """For each window and pixel, the part of the rolled map that it belongs to: [windows, pixels]."""
        place = torch.arange(image_size)
        part = (place >= image_size - self.window_size).int() + (place >= image_size - self.shift).int()
        return self._cut((3 * part[:, None] + part)[None, :, :, None])[0, :, :, 0].to(torch.uint8)


def _relative_positions(window_size: int) -> Tensor:
    """The number of the relative position of each two pixels of a window, [pixels, pixels]."""
    place = torch.arange(window_size)
    row, column = place.repeat_interleave(window_size), place.repeat(window_size)
    down, right = (axis[:, None] - axis + window_size - 1 for axis in (row, column))
    return down * (2 * window_size - 1) + right


def _joined(embedded: Tensor, handed_on: Tensor | None) -> Tensor:
    return embedded if handed_on is None else torch.cat([embedded, handed_on], dim=1)
