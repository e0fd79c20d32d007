"""A, Aᵀ and FBP of a scan as one differentiable module.

The system matrix A has the exact intersection lengths of rays and pixels (Siddon 1985), in float64.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from qnmixer.errors import GeometryError
from qnmixer.machine import memory
from qnmixer.physics.fbp import (
    FBP_WINDOWS,
    backprojection_matrix,
    matched_gain,
    ramp_response,
    ray_weights,
    with_even_sides,
)
from qnmixer.physics.geometry import FanBeamGeometry
from qnmixer.physics.scan import Numbering, ScanMatrix
from qnmixer.physics.sparse import (
    Arrays,
    Csr,
    Triples,
    apply_linear,
    cached,
    full_product,
    in_threads,
    to_csr,
    transpose_csr,
)

# The projector


class FanBeamProjector(nn.Module):
    """A of a scan, with transpose and filtered back-projection, all linear and differentiable twice.

    Images x are [B, 1, H, W], sinograms y are [B, 1, V, D], line integrals in value × mm. Everything is computed in
    float32, whatever the autocast or the input's dtype; in float64 if the module (`.double()`) and the input are.
    Nothing of it is in `state_dict`: the matrices follow from the geometry.

    If the number of views of a full turn is a multiple of four, and the image has an even number of rows, the matrices
    hold a quarter of the views. The image, turned by 0, 90, 180 and 270 degrees, is then four columns. This takes a
    quarter of the memory, and is at least twice as fast. A parallel beam over π with an even number of views and no
    detector offset gains the same.

    Args:
        geometry: the scan.
        fbp_filter: window on the ramp: ramp, shepp-logan, cosine, hamming or hann.

    Raises:
        GeometryError: if an input's shape does not fit the geometry, the matrices not into memory, or there is no such
            filter.
    """

    _ray_weights: Tensor  # cosine and redundancy [V, D]
    _response: Tensor  # of the ramp of FBP, [n/2 + 1]
    _ramp: Tensor  # of A†, [D, D]

    def __init__(self, geometry: FanBeamGeometry, fbp_filter: str = "ramp") -> None:
        super().__init__()
        if fbp_filter not in FBP_WINDOWS:
            raise GeometryError(f"fbp_filter={fbp_filter!r} is not known: choose {', '.join(FBP_WINDOWS)}")
        _require_memory(geometry)
        self.geometry = geometry
        self.fbp_filter = fbp_filter
        self._rays = system_matrix(geometry)
        even = with_even_sides(geometry)  # FBP needs both sides of the detector, A and Aᵀ only what it measures
        self._backprojection = backprojection_matrix(even)
        lacking = even.n_detectors - geometry.n_detectors  # bins before and after each row
        self._lacking = (lacking, 0) if geometry.detector_offset > 0 else (0, lacking)
        # The ramp of A†, as a symmetric matrix: iterations use it most often, and an FFT takes three operators.
        bins = np.arange(geometry.n_detectors)
        kernel = np.fft.irfft(matched_gain(geometry) * ramp_response(geometry, fbp_filter))
        for name, array in {
            "_ray_weights": ray_weights(geometry),
            "_response": ramp_response(even, fbp_filter, on_arc=geometry.beam == "fan_curved"),
            "_ramp": kernel[np.abs(bins[:, None] - bins)],
        }.items():
            self.register_buffer(name, torch.from_numpy(array).float(), persistent=False)
        self._norms: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        """A x: line integrals [B, 1, V, D] (value × mm) of the image x [B, 1, H, W]."""
        return self._apply_linear(x, "image", self._rays, self._rays.transpose)

    def adjoint(self, y: Tensor) -> Tensor:
        """Aᵀ y: image [B, 1, H, W] of the sinogram y [B, 1, V, D]."""
        return self._apply_linear(y, "sinogram", self._rays.transpose, self._rays)

    def fbp(self, y: Tensor) -> Tensor:
        """Filtered back-projection [B, 1, H, W] of the sinogram y [B, 1, V, D], with unit gain: fbp(A x) ≈ x.

        Partial turns are weighted by redundancy. Below 180° plus the fan angle, the image is incomplete. A detector
        narrower than the object truncates the rows: the result is finite, but biased, most at its rim.
        """
        return self._apply_linear(y, "sinogram", self._fbp, self._fbp_transpose)

    def operator_norm(self) -> float:
        """‖A‖₂ in mm, by power iteration on AᵀA from a fixed start; computed once."""
        return math.sqrt(self._largest_eigenvalue("norm", self.adjoint))

    def filtered_adjoint(self, y: Tensor) -> Tensor:
        """A† y = Aᵀ F y: image [B, 1, H, W] of y [B, 1, V, D], with F the ramp of `fbp` and the gain of `fbp`.

        Elsewhere A† is often the pseudo-inverse; here it is this filtered adjoint.

        Iterations must use this instead of `fbp`. `fbp` interpolates at pixel centres, so it is not the transpose of
        A. With bins finer than pixels, FBP∘A has eigenvalues with negative real parts: no step along it is safe, and
        a few dozen steps explode. A†A = Aᵀ F A is symmetric and positive on every grid.
        """
        return self._apply_linear(y, "sinogram", self._filtered_adjoint, self._filtered_adjoint_transpose)

    def filtered_residual(self, x: Tensor, y: Tensor) -> Tensor:
        """A†(A x − y), [B, 1, H, W]: the gradient of the data term, as `filtered_adjoint` scales it."""
        self._check_shape(y, "sinogram")  # else a wrong one could be broadcast
        projected = self._apply_linear(x, "image", self._rays, self._rays.transpose)
        return self.filtered_adjoint(projected - y)

    @torch.no_grad()
    def least_squares(self, y: Tensor, n_steps: int) -> Tensor:
        """An image [B, 1, H, W] whose A x is near y [B, 1, V, D]: some steps of conjugate gradients from 0 (CGLS).

        It does not depend on a network or on FBP, and is as good for a few degrees as for a full turn.
        """
        # The residual y − A x is updated, not that of Aᵀ A x = Aᵀ y, which rounds worse.
        gradient = direction = self.adjoint(y)
        x, residual = torch.zeros_like(gradient), y
        square = _square(gradient)
        for _ in range(n_steps):
            projection = self(direction)
            step = square / _square(projection)
            x, residual = x + step * direction, residual - step * projection
            gradient, previous_square = self.adjoint(residual), square
            square = _square(gradient)
            direction = gradient + square / previous_square * direction
        return x

    def safe_step_size(self) -> float:
        """1 over the largest eigenvalue of A†A, by power iteration from a fixed start; computed once.

        Power iteration slightly underestimates the eigenvalue. Descent x − λ A†(A x − y) is safe for λ up to twice
        this value, so that does no harm.
        """
        return 1 / self._largest_eigenvalue(f"norm with {self.fbp_filter}", self.filtered_adjoint)

    def scale_filtered_adjoint(self, step: float) -> None:
        """Multiply A† by a factor, by which `safe_step_size` becomes this number."""
        name = f"norm with {self.fbp_filter}"
        self._ramp *= self.safe_step_size() / step
        self._norms = {**self._norms, name: 1 / step}

    def become(self, other: "FanBeamProjector") -> None:
        """Be the projector of another scan from now on. Both have the same matrices then."""
        for name in ("geometry", "fbp_filter", "_lacking", "_norms", "_buffers", "_modules"):
            vars(self)[name] = vars(other)[name]

    def _largest_eigenvalue(self, name: str, back: Callable[[Tensor], Tensor]) -> float:
        """Of `back` after A; kept here, and on the disk with the matrices."""
        if name not in self._norms:
            (eigenvalue,) = cached(
                name, self.geometry, lambda: [np.array([self._power_iteration(lambda x: back(self(x)))])]
            )
            self._norms[name] = float(eigenvalue[0])
        return self._norms[name]

    @torch.no_grad()
    def _power_iteration(self, apply: Callable[[Tensor], Tensor]) -> float:
        """Largest eigenvalue of a map of images, to a relative change of about 1e-5 per step."""
        size = self.geometry.image_size
        x = torch.randn(1, 1, size, size, generator=torch.Generator().manual_seed(0)).to(self._rays.values.device)
        radius = 0.0
        for _ in range(200):
            x = apply(x / x.norm())
            previous_radius, radius = radius, float(x.norm())
            if abs(radius - previous_radius) <= 1e-5 * radius:
                break
        return radius

    def _apply_linear(
        self, x: Tensor, kind: str, apply: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Check the input, convert to the dtype of the matrices, apply, and convert back to float32 or float64."""
        self._check_shape(x, kind)
        if self._rays.values.dtype not in (torch.float32, torch.float64):
            half = str(self._rays.values.dtype).removeprefix("torch.")
            raise GeometryError(
                f"there are no sparse products in {half}: call .float(), and use torch.autocast for half"
            )
        dtype = self._rays.values.dtype  # under autocast x may be half, which sparse products lack
        result = apply_linear(x.to(dtype), apply, transpose)
        return result if x.dtype == dtype else result.float()

    def _check_shape(self, x: Tensor, kind: str) -> None:
        """Raise GeometryError for what is no tensor, and for one that is no image or sinogram of this scan."""
        if not isinstance(x, Tensor):
            raise GeometryError(f"{kind} is a {type(x).__name__}: give a torch.Tensor")
        size, views, bins = self.geometry.image_size, self.geometry.n_views, self.geometry.n_detectors
        expected = (1, size, size) if kind == "image" else (1, views, bins)
        if x.ndim != 4 or tuple(x.shape[1:]) != expected:
            raise GeometryError(
                f"{kind} of shape {list(x.shape)} does not fit the geometry, which needs [batch, "
                f"{', '.join(map(str, expected))}]: check image_size, n_views and n_detectors"
            )
        if not x.numel():
            raise GeometryError(f"{kind} of shape {list(x.shape)} is an empty batch: give 1 {kind} or more")

    def _filtered_adjoint(self, y: Tensor) -> Tensor:
        return self._rays.transpose(full_product(y.reshape(-1, len(self._ramp)), self._ramp).view(y.shape))

    def _filtered_adjoint_transpose(self, x: Tensor) -> Tensor:
        y = self._rays(x)
        return full_product(y.view(-1, len(self._ramp)), self._ramp).view(y.shape)

    def _fbp(self, y: Tensor) -> Tensor:
        return self._backprojection.transpose(self._filter(y))

    def _fbp_transpose(self, x: Tensor) -> Tensor:
        rows = self._convolved(self._backprojection(x))
        n_before, n_after = self._lacking
        return rows[..., n_before : rows.shape[-1] - n_after] * self._ray_weights

    def _filter(self, y: Tensor) -> Tensor:
        """Weight each ray, add the bins that the shorter side lacks, and filter the rows by the ramp."""
        rows = y * self._ray_weights
        return self._convolved(pad(rows, self._lacking) if any(self._lacking) else rows)

    def _convolved(self, rows: Tensor) -> Tensor:
        """The rows after the ramp, by zero-padded FFT. The ramp is its own transpose."""
        n = 2 * (len(self._response) - 1)
        return torch.fft.irfft(torch.fft.rfft(rows, n).mul_(self._response), n)[..., : rows.shape[-1]]


def _square(x: Tensor) -> Tensor:
    """Squared norm of each sample, [B, 1, 1, 1]; never 0, to divide by."""
    return x.square().sum((1, 2, 3), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


_BYTES_OF_MATRICES = 80
"""Bytes while the matrices are built, per (distinct view × pixel of a side × bin or pixel of a side).

Measured: 73 to 78. Of these 24 stay.
"""
_BYTES_OF_PIXEL = 250
"""Bytes while the tables of the pixels' numbers are built, per pixel. Measured: 220 to 280."""


def _require_memory(geometry: FanBeamGeometry) -> None:
    """Raise GeometryError if this machine has too little memory for the matrices. Building them would take hours."""
    rays = geometry.n_distinct_views * geometry.n_distinct_bins
    needed = _BYTES_OF_MATRICES * rays * geometry.image_size * (1 + geometry.image_size / geometry.n_detectors)
    needed += _BYTES_OF_PIXEL * geometry.image_size**2
    available = memory()
    if needed > available:
        raise GeometryError(
            f"n_views={geometry.n_views} and n_detectors={geometry.n_detectors} need {needed / 2**30:.0f} GiB of "
            f"matrices at image_size={geometry.image_size}, and this machine has {available / 2**30:.0f} GiB: lower one"
        )


# The system matrix

_CROSSINGS_AT_A_TIME = 2**17
"""Ray–slab crossings computed at a time: few enough for the CPU's cache, and for little memory."""
_ON_GRID = 1e-9
"""A crossing this near to a grid line, in pixels, counts as exactly on it."""


def system_matrix(geometry: FanBeamGeometry) -> ScanMatrix:
    """A, with values in mm. Large ones are cached on disk."""

    def build() -> Arrays:
        layout = Numbering(geometry)
        forward = _by_rays(geometry)
        return *forward, *transpose_csr(forward, layout.n_pixels, layout.quarters)

    return ScanMatrix(geometry, cached("system matrix", geometry, build))


def _by_rays(geometry: FanBeamGeometry) -> Csr:
    """A of the distinct views: rows are rays, columns are pixels, numbered as `Numbering` says."""
    layout = Numbering(geometry)
    numbers = layout.pixel_numbers()
    order = layout.turned_rays()[:, 0]
    origin, direction = _lines_of_rays(geometry)

    def part(start: int, stop: int) -> Triples:
        rows = np.arange(start, stop, dtype=np.int32)[order[start:stop] >= 0]
        rays = order[rows]
        pixels, lengths, crossed = _intersect(origin[:, rays], direction[:, rays], geometry)
        return np.repeat(rows, crossed), numbers[pixels].astype(np.int32), lengths

    triples = in_threads(part, len(order), max(1, _CROSSINGS_AT_A_TIME // geometry.image_size))
    return to_csr(triples, len(order), layout.quarters * layout.n_pixels)


def _lines_of_rays(geometry: FanBeamGeometry) -> tuple[np.ndarray, np.ndarray]:
    """For each ray of the distinct views, the point nearest to the axis and the unit direction, as (column, row).

    In pixels, float64 [2, distinct views · D] each. Pixel (row i, column j) covers [j, j + 1] × [i, i + 1]; rows grow
    downwards.
    """
    phi = geometry.angles()[: geometry.n_distinct_views, None] - geometry.fan_angles()
    cos, sin = np.cos(phi), np.sin(phi)
    nearest = geometry.ray_distances() / geometry.pixel_size * np.stack([cos, -sin]) + geometry.image_size / 2
    return nearest.reshape(2, -1), np.stack([-sin, -cos]).reshape(2, -1)


def _intersect(
    origin: np.ndarray, direction: np.ndarray, geometry: FanBeamGeometry
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels that each ray crosses and the lengths in mm: int32 [nnz], float32 [nnz], and how many per ray [rays].

    A ray is followed along its longer axis. Between two neighbouring grid lines of that axis (a slab) it moves by at
    most one pixel across, so it meets at most two pixels there, split where it crosses the grid line between them.
    """
    n = geometry.image_size
    steep = np.abs(direction[1]) > np.abs(direction[0])
    along, across = (np.where(steep, origin[i], origin[1 - i])[:, None] for i in (1, 0))
    d_along, d_across = (np.where(steep, direction[i], direction[1 - i])[:, None] for i in (1, 0))

    position = across + (np.arange(n + 1) - along) * (d_across / d_along)
    grid_line = np.rint(position)
    position = np.where(np.abs(position - grid_line) < _ON_GRID, grid_line, position)
    enter, leave = position[:, :-1], position[:, 1:]
    enter_pixel, leave_pixel = (np.floor(edge).astype(np.int32) for edge in (enter, leave))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(
            enter_pixel == leave_pixel, 1.0, (np.maximum(enter_pixel, leave_pixel) - enter) / (leave - enter)
        )
    # A ray that runs along a grid line belongs to the pixels on both sides, half each.
    on_line = (enter == leave) & (enter == enter_pixel)
    enter_pixel -= on_line
    share[on_line] = 0.5

    strip = np.stack([enter_pixel, leave_pixel], axis=-1)
    lengths = np.stack([share, 1 - share], axis=-1) * (geometry.pixel_size / np.abs(d_along))[..., None]
    slab = np.arange(n, dtype=np.int32)[None, :, None]
    pixels = np.where(steep[:, None, None], slab * n + strip, strip * n + slab)
    mask = (strip >= 0) & (strip < n) & (lengths > 0)
    return pixels[mask], lengths[mask].astype(np.float32), mask.sum(axis=(1, 2))
