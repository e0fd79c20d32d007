"""QN-Mixer as one would write it from the paper's figures in an afternoon. `bench_step.py` compares ours with it.

It computes the same function as `QNMixer` without our additions (`FIGURE`), as a test shows, with no thought of speed
or memory: sparse matrices as torch makes them, branches joined at full resolution, features of every pixel expanded. In
one thing it is better than the figures: they draw H as a matrix, which nobody could store for a latent as large as the
image; it gets the two-loop recursion over all pairs that any textbook has.
"""

from dataclasses import asdict

import torch
from torch import Tensor, nn

from qnmixer.models import QNMixer
from qnmixer.models.codec import OrthonormalCodec
from qnmixer.models.incept_mixer import InceptMixer
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.fbp import backprojection_matrix, matched_gain, ramp_response, ray_weights
from qnmixer.physics.rays import system_matrix
from qnmixer.physics.scan import Numbering, ScanMatrix

FIGURE = (
    "model.detail_channels=0 model.data_steps=1 model.nonnegative=false model.learned_trust=false model.codec_kernel=1 "
    "model.shared_step_size=true"
)
"""Overrides that make of the default the network that the figures draw, but for the size of its latent."""


class EveryView(FanBeamGeometry):
    """The scan without its symmetry."""

    has_quarter_turn_symmetry = False


class PlainOperator:
    """A, Aᵀ and FBP by torch's sparse matrices: float32 values, int64 indices, one row for each ray."""

    def __init__(self, geometry: FanBeamGeometry, device: torch.device) -> None:
        self.geometry = geometry
        every_view = EveryView(**asdict(geometry))
        self.A, self.At = _both(system_matrix(every_view), every_view, device)
        self.B, self.Bt = _both(backprojection_matrix(every_view), every_view, device)
        self.response = torch.from_numpy(ramp_response(geometry, "ramp")).float().to(device)
        self.weights = torch.from_numpy(ray_weights(geometry)).float().to(device)
        self.gain = matched_gain(geometry)

    def forward(self, x: Tensor) -> Tensor:
        """A x, [B, 1, V, D] from [B, 1, H, W]."""
        y = SparseProduct.apply(x.flatten(1).t(), self.A, self.At)
        return y.t().view(len(x), 1, self.geometry.n_views, self.geometry.n_detectors)

    def fbp(self, y: Tensor) -> Tensor:
        """Filtered back-projection, [B, 1, H, W] from [B, 1, V, D]."""
        return self._image(SparseProduct.apply(self._ramp(y * self.weights), self.Bt, self.B))

    def filtered_adjoint(self, y: Tensor) -> Tensor:
        """Aᵀ after the ramp, [B, 1, H, W] from [B, 1, V, D]."""
        return self._image(SparseProduct.apply(self._ramp(y * self.gain), self.At, self.A))

    def _ramp(self, y: Tensor) -> Tensor:
        n = 2 * (len(self.response) - 1)
        return torch.fft.irfft(torch.fft.rfft(y, n) * self.response, n)[..., : y.shape[-1]].flatten(1).t()

    def _image(self, x: Tensor) -> Tensor:
        return x.t().view(-1, 1, self.geometry.image_size, self.geometry.image_size)


def _both(matrix: ScanMatrix, geometry: FanBeamGeometry, device: torch.device) -> tuple[Tensor, Tensor]:
    """M [V · D, H · W] and Mᵀ, rows by (view, bin), pixels in row-major order."""
    layout = Numbering(geometry)
    numbers = torch.sparse_csr_tensor(
        matrix.starts, matrix.pixels, matrix.values, (layout.n_rays, layout.n_pixels), check_invariants=False
    )
    rows, columns = numbers.to_sparse_coo().indices()
    rays, pixels = (torch.from_numpy(n.ravel()) for n in (layout.ray_numbers(), layout.pixel_numbers()))
    of_row, of_column = torch.zeros(layout.n_rays, dtype=torch.int64), torch.zeros(layout.n_pixels, dtype=torch.int64)
    of_row[rays], of_column[pixels] = torch.arange(len(rays)), torch.arange(len(pixels))
    entries = torch.stack([of_row[rows], of_column[columns]])
    plain = torch.sparse_coo_tensor(entries, matrix.values, (len(rays), len(pixels)), check_invariants=False)
    return plain.to_sparse_csr().to(device), plain.t().to_sparse_csr().to(device)


class SparseProduct(torch.autograd.Function):
    """M x, and Mᵀ for backward: torch's own transposes on the fly, which is slower yet."""

    @staticmethod
    def forward(ctx, x: Tensor, matrix: Tensor, transposed: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.transposed = transposed
        return matrix @ x.contiguous()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def,override]
        return ctx.transposed @ gradient.contiguous(), None, None


class PlainInception(nn.Module):
    """Four branches, joined: [B, 1, H, W] → [B, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        width = channels // 4
        self.branch1 = nn.Sequential(nn.Conv2d(1, width, 1), nn.ReLU())
        self.branch2 = nn.Sequential(
            nn.Conv2d(1, width, 1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
        )
        self.branch3 = nn.Sequential(
            nn.Conv2d(1, width, 1), nn.ReLU(), nn.Conv2d(width, width, 5, padding=2), nn.ReLU()
        )
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), nn.Conv2d(1, width, 1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], dim=1)


class PlainMixerLayer(nn.Module):
    """x + WidthMLP(HeightMLP(LN x)), then x + ChannelMLP(LN x)."""

    def __init__(self, grid: int, channels: int) -> None:
        super().__init__()

        def mlp(size: int) -> nn.Module:
            return nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.height, self.width, self.channel = mlp(grid), mlp(grid), mlp(channels)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.height(self.norm1(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        mixed = self.width(mixed.permute(0, 1, 3, 2)).permute(0, 1, 3, 2)
        x = x + mixed
        return x + self.channel(self.norm2(x))


class PlainInceptMixer(nn.Module):
    """G: inception, patches, two mixer layers, expansion to features of every pixel, 1 × 1 to one channel."""

    def __init__(self, image_size: int, channels: int, patch_size: int) -> None:
        super().__init__()
        self.inception = PlainInception(channels)
        self.patchify = nn.Conv2d(channels, channels, patch_size, stride=patch_size)
        self.layers = nn.Sequential(*(PlainMixerLayer(image_size // patch_size, channels) for _ in range(2)))
        self.expand = nn.Linear(channels, patch_size**2 * (channels // 4), bias=False)
        self.shuffle = nn.PixelShuffle(patch_size)
        self.project = nn.Conv2d(channels // 4, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patchify(self.inception(x)).permute(0, 2, 3, 1)
        x = self.expand(self.layers(x)).permute(0, 3, 1, 2)
        return self.project(self.shuffle(x))

    @torch.no_grad()
    def take_weights(self, other: InceptMixer) -> None:
        """Become the same function as one of ours."""
        of_patchify = []
        for mine, theirs in zip(
            [self.inception.branch1, self.inception.branch2, self.inception.branch3, self.inception.branch4],
            other.embedding.branches,
            strict=True,
        ):
            pixel, *spatial = (m for m in mine.modules() if isinstance(m, nn.Conv2d))
            pixel.weight.copy_(theirs.pixel.weight[..., None, None])
            pixel.bias.copy_(theirs.pixel.bias)
            for convolution in spatial:
                convolution.load_state_dict(theirs.spatial.state_dict())
            channels, _, size, _ = self.patchify.weight.shape
            of_patchify.append(theirs.patchify.weight.view(channels, size, size, -1).permute(0, 3, 1, 2))
        self.patchify.weight.copy_(torch.cat(of_patchify, dim=1))
        self.patchify.bias.copy_(other.embedding.bias)
        for mine_layer, their_layer in zip(self.layers, other.mixer, strict=True):
            for a, b in zip(mine_layer.parameters(), _in_order(their_layer), strict=True):
                a.copy_(b)
        pixels, width, channels = other.expansion.expand.shape
        self.expand.weight.copy_(other.expansion.expand.transpose(0, 1).reshape(width * pixels, channels))
        self.project.weight.copy_(other.expansion.project[None, :, None, None])


def _in_order(layer: nn.Module) -> list[Tensor]:
    modules = (layer.spatial_norm, layer.channel_norm, layer.height_mlp, layer.width_mlp, layer.channel_mlp)
    return [p for module in modules for p in module.parameters()]


class PlainQNMixer(nn.Module):
    """The loop of the figure; y [B, 1, V, D] → x_T [B, 1, H, W]."""

    def __init__(self, ours: QNMixer, operator: PlainOperator) -> None:
        super().__init__()
        (G,) = ours.regularizers
        assert isinstance(G, InceptMixer)
        assert isinstance(ours.codec, OrthonormalCodec)
        channels, patch_size = len(G.embedding.bias), G.embedding.patch_size
        self.operator, self.T = operator, ours.n_iterations
        self.G = PlainInceptMixer(operator.geometry.image_size, channels, patch_size)
        self.G.take_weights(G)
        self.step_size = nn.Parameter(ours.step_sizes[0].detach().clone())
        self.unshuffle, self.shuffle = nn.PixelUnshuffle(ours.latent_factor), nn.PixelShuffle(ours.latent_factor)
        self.encoder, self.decoder = (
            nn.Conv2d(b.in_channels, b.out_channels, 1, bias=False) for b in (ours.codec.encoder, ours.codec.decoder)
        )
        self.encoder.load_state_dict(ours.codec.encoder.state_dict())
        self.decoder.load_state_dict(ours.codec.decoder.state_dict())

    def gradient_code(self, x: Tensor, y: Tensor) -> Tensor:
        """r = E(λ A†(A x − y) + G(x))."""
        gradient = self.step_size * self.operator.filtered_adjoint(self.operator.forward(x) - y) + self.G(x)
        return self.encoder(self.unshuffle(gradient))

    def forward(self, y: Tensor) -> Tensor:
        x = self.operator.fbp(y)
        r = self.gradient_code(x, y)
        pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        for t in range(self.T):
            s = -two_loops(pairs, r)
            x = x + self.shuffle(self.decoder(s))
            if t < self.T - 1:
                r_next = self.gradient_code(x, y)
                z = r_next - r
                pairs.append((s, z, 1 / inner(z, s)))
                r = r_next
        return x


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of each sample, [B, 1, 1, 1]."""
    return (a * b).sum((1, 2, 3), keepdim=True)


def two_loops(pairs: list[tuple[Tensor, Tensor, Tensor]], r: Tensor) -> Tensor:
    """H r (Nocedal and Wright, algorithm 7.4, with H₀ = I and all pairs)."""
    alphas = []
    for s, z, rho in reversed(pairs):
        alpha = rho * inner(s, r)
        r = r - alpha * z
        alphas.append(alpha)
    for (s, z, rho), alpha in zip(pairs, reversed(alphas), strict=True):
        r = r + (alpha - rho * inner(z, r)) * s
    return r
