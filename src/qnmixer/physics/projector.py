"""A, Aᵀ and FBP of a scan as one differentiable module."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from qnmixer.errors import GeometryError
from qnmixer.physics.fbp import backprojection_matrix, matched_gain, ramp_response, ray_weights, with_even_sides
from qnmixer.physics.geometry import FanBeamGeometry
from qnmixer.physics.matrix_cache import load_or_compute
from qnmixer.physics.rays import system_matrix
from qnmixer.physics.scan import from_columns, to_columns
from qnmixer.physics.sparse import FullPrecisionModule, apply_linear, full_product, symmetric_residual

_BYTES = 24
"""Bytes of the matrices per (distinct view × pixel of a side × bin or pixel of a side). Measured: 20 to 24."""


class FanBeamProjector(nn.Module):
    """A of a scan, with transpose and filtered back-projection, all linear and differentiable twice.

    Images x are [B, 1, H, W], sinograms y are [B, 1, V, D], line integrals in value × mm. Everything is computed in
    float32, whatever the autocast or the input's dtype; in float64 if the module (`.double()`) and the input are.
    Nothing of it is in `state_dict`: the matrices follow from the geometry.

    If the number of views of a full turn is a multiple of four, the matrices hold a quarter of the views. The image,
    turned by 0, 90, 180 and 270 degrees, is then four columns. This takes a quarter of the memory, and is at least
    twice as fast. A parallel beam over π with an even number of views and symmetric bins gains the same.

    Args:
        geometry: the scan.
        fbp_filter: window on the ramp: ramp, shepp-logan, cosine, hamming or hann.

    Raises:
        GeometryError: if an input's shape does not fit the geometry, or the matrices not into memory.
    """

    def __init__(self, geometry: FanBeamGeometry, fbp_filter: str = "ramp") -> None:
        super().__init__()
        _require_memory(geometry)
        self.geometry = geometry
        self.fbp_filter = fbp_filter
        even = with_even_sides(geometry)
        self._rays = system_matrix(geometry)
        self._backprojection = backprojection_matrix(even)
        response = ramp_response(even, fbp_filter, on_arc=geometry.beam == "fan_curved")
        lacking = even.n_detectors - geometry.n_detectors
        sides = (lacking, 0) if geometry.detector_offset > 0 else (0, lacking)
        self._filter = _RampFilter(ray_weights(geometry), response, sides)
        matched_response = matched_gain(geometry) * ramp_response(geometry, fbp_filter)
        self._matched_ramp = _MatchedRamp(matched_response, *self._rays.bins_first())
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
        if "operator" not in self._norms:
            self._norms["operator"] = load_or_compute(
                "norm of the operator",
                self.geometry,
                lambda: math.sqrt(self._power_iteration(lambda x: self.adjoint(self(x)))),
            )
        return self._norms["operator"]

    def filtered_adjoint(self, y: Tensor) -> Tensor:
        """A† y = Aᵀ F y: image [B, 1, H, W] of y [B, 1, V, D], with F the ramp of `fbp` and the gain of `fbp`.

        Iterations must use this instead of `fbp`. `fbp` interpolates at pixel centres, so it is not the transpose of
        A. With bins finer than pixels, FBP∘A has eigenvalues with negative real parts: no step along it is safe, and
        a few dozen steps explode. A†A = Aᵀ F A is symmetric and positive on every grid.
        """
        return self._apply_linear(y, "sinogram", self._filtered_adjoint, self._filtered_adjoint_transpose)

    def filtered_residual(self, x: Tensor, y: Tensor | None) -> Tensor:
        """A†(A x − y), [B, 1, H, W]: `filtered_adjoint(self(x) - y)` at less cost; y=None: 0."""
        self._check_shape(x, "image")
        dtype = self._rays.values.dtype
        if y is not None:
            self._check_shape(y, "sinogram")
            y = y.to(dtype)
        result = symmetric_residual(
            x.to(dtype), y, self._filtered_residual, self._filtered_adjoint, self._filtered_adjoint_transpose
        )
        return result if x.dtype == dtype else result.float()

    def safe_step_size(self) -> float:
        """1 over the largest eigenvalue of A†A, by power iteration from a fixed start; computed once.

        Power iteration slightly underestimates the eigenvalue. Descent x − λ A†(A x − y) is safe for λ up to twice
        this value, so that does no harm.
        """
        if "filtered" not in self._norms:
            self._norms["filtered"] = load_or_compute(
                f"norm of the filtered operator with {self.fbp_filter}",
                self.geometry,
                lambda: self._power_iteration(lambda x: self.filtered_adjoint(self(x))),
            )
        return 1 / self._norms["filtered"]

    @torch.no_grad()
    def _power_iteration(self, apply: Callable[[Tensor], Tensor]) -> float:
        """Largest eigenvalue of a map of images, to a relative change of about 1e-5 per step."""
        size = self.geometry.image_size
        x = torch.randn(1, 1, size, size, generator=torch.Generator().manual_seed(0)).to(self._rays.values.device)
        radius = 0.0
        for _ in range(200):
            x = apply(x / x.norm())
            previous, radius = radius, float(x.norm())
            if abs(radius - previous) <= 1e-5 * radius:
                break
        return radius

    def _apply_linear(
        self, x: Tensor, kind: str, apply: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Check the shape, convert to the dtype of the matrices, apply, and convert back to float32 or float64."""
        self._check_shape(x, kind)
        dtype = self._rays.values.dtype
        result = apply_linear(x.to(dtype), apply, transpose)
        return result if x.dtype == dtype else result.float()

    def _check_shape(self, x: Tensor, kind: str) -> None:
        """Raise GeometryError for a tensor that is no image or sinogram of this scan."""
        size, views, bins = self.geometry.image_size, self.geometry.n_views, self.geometry.n_detectors
        expected = (1, size, size) if kind == "image" else (1, views, bins)
        if x.ndim != 4 or tuple(x.shape[1:]) != expected:
            raise GeometryError(
                f"{kind} of shape {list(x.shape)} does not fit the geometry, which needs [batch, "
                f"{', '.join(map(str, expected))}]: check image_size, n_views and n_detectors"
            )

    def _fbp(self, y: Tensor) -> Tensor:
        return self._backprojection.transpose(self._filter(y))

    def _filtered_residual(self, x: Tensor, y: Tensor | None) -> Tensor:
        ramp = self._matched_ramp
        rays = self._rays.project(to_columns(x), ramp.order)
        if y is not None:
            rays.view(*reversed(y.shape[2:]), -1).sub_(y[:, 0].permute(2, 1, 0))
        return from_columns(self._rays.backproject(ramp(rays), ramp.table), x.shape[1:])

    def _filtered_adjoint(self, y: Tensor) -> Tensor:
        return self._rays.transpose(self._matched_ramp.of_rows(y))

    def _filtered_adjoint_transpose(self, x: Tensor) -> Tensor:
        return self._matched_ramp.of_rows(self._rays(x))

    def _fbp_transpose(self, x: Tensor) -> Tensor:
        return self._filter.transpose(self._backprojection(x))


def _require_memory(geometry: FanBeamGeometry) -> None:
    """Raise GeometryError if this machine has too little memory for the matrices. Building them would take hours."""
    there = _memory()
    size = geometry.image_size
    needed = _bytes_of_matrices(geometry, size)
    if there is None or needed <= there:
        return
    views = 4 * int(there / _bytes_of_matrices(replace(geometry, n_views=4), size))
    while size > 1 and _bytes_of_matrices(geometry, size) > there:
        size //= 2
    fits = [f"n_views up to {views}"] * (0 < views < geometry.n_views) + [f"image_size={size}"]
    raise GeometryError(
        f"n_views={geometry.n_views} and n_detectors={geometry.n_detectors} need {needed / 2**30:.0f} GiB of "
        f"matrices at image_size={geometry.image_size}, and this machine has {there / 2**30:.0f} GiB: what fits is "
        f"{', or '.join(fits)}"
    )


def _bytes_of_matrices(geometry: FanBeamGeometry, image_size: int) -> int:
    """Bytes of A, of back-projection, and of their transposes."""
    rays = geometry.n_distinct_views * len(geometry.distinct_bins)
    return int(_BYTES * rays * image_size * (1 + image_size / geometry.n_detectors))


def _memory() -> int | None:
    """Bytes of memory of this machine; None if the system does not report them, as on Windows."""
    with suppress(AttributeError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


class _MatchedRamp(FullPrecisionModule):
    """The ramp as a symmetric matrix [D, D], for sinograms with the bins first: one product filters a whole batch.

    Iterations use this filter most often. An FFT would take three operators, and two copies that put the bins last.

    Args:
        response: of the ramp, [n/2 + 1].
        order, table: of `ScanMatrix.bins_first`.
    """

    matrix: Tensor
    order: Tensor
    table: Tensor

    def __init__(self, response: np.ndarray, order: Tensor, table: Tensor, n_detectors: int) -> None:
        super().__init__()
        bins = np.arange(n_detectors)
        matrix = np.fft.irfft(response)[np.abs(bins[:, None] - bins)]
        for name, tensor in {"matrix": torch.from_numpy(matrix).float(), "order": order, "table": table}.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, rays: Tensor) -> Tensor:
        """Filter columns [D·V, B]."""
        return full_product(self.matrix, rays.view(len(self.matrix), -1)).view(rays.shape)

    def of_rows(self, y: Tensor) -> Tensor:
        """Filter sinograms [B, 1, V, D]."""
        return full_product(y.reshape(-1, len(self.matrix)), self.matrix).view(y.shape)


class _RampFilter(FullPrecisionModule):
    """Ray weights, then the ramp of FBP along the detector by zero-padded FFT.

    Args:
        weights: of the rays, to be broadcast to [V, D].
        response: of the ramp, [n/2 + 1].
        sides: how many bins without rays are added before and after each row.
    """

    weights: Tensor
    response: Tensor

    def __init__(self, weights: np.ndarray, response: np.ndarray, sides: tuple[int, int]) -> None:
        super().__init__()
        self._sides = sides
        self.register_buffer("weights", torch.from_numpy(weights).float(), persistent=False)
        self.register_buffer("response", torch.from_numpy(response).float(), persistent=False)

    def forward(self, y: Tensor) -> Tensor:
        """Weight the rows of y [..., V, D], add the bins of `sides`, and filter."""
        rows = y * self.weights
        return self._ramp(pad(rows, self._sides) if any(self._sides) else rows)

    def transpose(self, y: Tensor) -> Tensor:
        """Transpose of `forward`; the ramp itself is symmetric."""
        first, last = self._sides
        return self._ramp(y)[..., first : y.shape[-1] - last] * self.weights

    def _ramp(self, rows: Tensor) -> Tensor:
        n = 2 * (len(self.response) - 1)
        return torch.fft.irfft(torch.fft.rfft(rows, n).mul_(self.response), n)[..., : rows.shape[-1]]
