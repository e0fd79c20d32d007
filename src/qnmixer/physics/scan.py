"""A matrix between image and sinogram. If a quarter turn maps the scan onto itself, it has a quarter of the rays."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from qnmixer.physics.geometry import FanBeamGeometry

_PADDING = 4
"""Unused numbers after each row of a corner: rows a power of two apart would share cache lines, 15 % slower."""
_FAN = 16
"""Neighbouring bins that are numbered together through all views, before the next bins: they meet the same pixels."""
_COLUMNS = 32
"""Most columns of one product. With more, values that several rows need would leave the cache."""


class Numbering:
    """The numbers of the rows and columns of a matrix between pixels and rays, with the symmetry and without.

    With the symmetry, the first views are enough. A ray that is turned by k quarters sees in the image what the ray
    itself sees in the image turned back by k quarters. So the four turns of a ray form an orbit. Pixels are in four
    corners, which the turns map onto each other: if the image is turned by k, pixel p of corner q becomes pixel p of
    corner q + k. Without the symmetry Q is 1, and the only corner is the image.

    In a full turn, ray (view j, bin i) turned by k is (j + k·V/4, i). A parallel beam over π has views for one turn:
    the orbit is (j, i), then (j + V/2, i), then the same two lines from the other side, in the mirrored bin. The middle
    one of an odd number of bins is its own mirror image, so its orbit has two rays and two gaps.

    Pixels are numbered row by row in a corner. Rays are numbered fan by fan: `_FAN` bins of each view, then the next
    bins.

    Attributes:
        quarters: Q, 4 or 1.
        n_pixels: P, numbers for the pixels of a corner; padding stays unused.
        n_rays: R, numbers for the orbits of rays; those of the last fan beyond the detector stay unused.
    """

    def __init__(self, geometry: FanBeamGeometry) -> None:
        self.quarters = 4 if geometry.has_quarter_turn_symmetry else 1
        # np.rot90 turns anticlockwise, as views do with a positive span. The image is turned back.
        self._turn = -1 if geometry.angle_span > 0 else 1
        self._size, self._n_detectors = geometry.image_size, geometry.n_detectors
        self._n_views, self._half_turn = geometry.n_distinct_views, geometry.has_half_turn_symmetry
        self._n_bins = geometry.n_distinct_bins
        self.n_rays = -(-self._n_bins // _FAN) * self._n_views * _FAN
        self._side = self._size if self.quarters == 1 else self._size // 2  # of a corner
        self.n_pixels = self._side * (self._side + _PADDING)

    def pixel_numbers(self) -> np.ndarray:
        """q·P + p of each pixel in row-major order, int64 [H·W]."""
        return _flat_places(self.corner_pixels().T)

    def corner_pixels(self) -> np.ndarray:
        """The row-major index of pixel p of each corner, −1 for padding: int64 [P, Q]."""
        image = np.arange(self._size**2).reshape(self._size, -1)
        corners = (np.rot90(image, self._turn * q)[: self._side, : self._side] for q in range(self.quarters))
        padded = (np.pad(corner, ((0, 0), (0, _PADDING)), constant_values=-1) for corner in corners)
        return np.stack([corner.ravel() for corner in padded], axis=1)

    def ray_numbers(self) -> np.ndarray:
        """The number of each ray of the first views, int64 [views, D]; −1 in a mirrored bin, whose orbit has one."""
        bins = np.arange(self._n_bins)
        numbers = np.full((self._n_views, self._n_detectors), -1)
        view_starts = np.arange(self._n_views)[:, None] * _FAN
        numbers[:, : self._n_bins] = bins // _FAN * (self._n_views * _FAN) + view_starts + bins % _FAN
        return numbers

    def turned_rays(self) -> np.ndarray:
        """The row-major index in the sinogram of each orbit's ray at each turn, −1 for none: int64 [R, Q].

        No ray occurs twice.
        """
        rays = np.full((self.n_rays, self.quarters), -1)
        numbers = self.ray_numbers()
        views, bins = np.nonzero(numbers >= 0)
        for k in range(self.quarters):  # a turn by k quarters is one by n_distinct_views · k views
            view, bin_ = views + k * self._n_views, bins
            if self._half_turn and k >= 2:
                mirrored = self._n_detectors - 1 - bins
                view, bin_ = view - 2 * self._n_views, np.where(mirrored == bins, -1, mirrored)
            rays[numbers[views, bins], k] = np.where(bin_ < 0, -1, view * self._n_detectors + bin_)
        return rays

    def gathers(self) -> dict[str, Tensor]:
        """The indices of the gathers before and after a product, int32, by name.

        An entry without a pixel or ray may point anywhere if the matrix has no value for it. For the gaps in orbits the
        matrix has values, so `gaps` must set these entries to zero.
        """
        pixels, rays = self.corner_pixels(), self.turned_rays()
        tables = {
            "image_table": _all_turns(pixels, 1),
            "sinogram_order": _flat_places(rays),
            "sinogram_table": _all_turns(rays, -1),
            "image_order": _flat_places(pixels),
        }
        return {name: torch.from_numpy(table.clip(0).astype(np.int32)) for name, table in tables.items()}

    def gaps(self) -> Tensor | None:
        """The factors on the entries of the sinogram's table: 0 for gaps in orbits, 1 for rays; None if all are 1.

        Float32 [entries, 1].
        """
        rays = self.turned_rays()
        if not ((rays < 0) & (rays[:, :1] >= 0)).any():
            return None
        return torch.from_numpy(_all_turns(rays, -1) >= 0).float()[:, None]


class ScanMatrix(nn.Module):
    """M, a sparse matrix that takes images [B, 1, H, W] to sinograms [B, 1, V, D], and Mᵀ, both stored.

    The matrix of the distinct views has a block for each corner: [M_0 … M_{Q−1}]. For an image with corners c_q,
    quarter k of the sinogram is Σ_q M_q c_{q+k}. For a sinogram y with quarters y_k, corner j of Mᵀ y is
    Σ_q M_qᵀ y_{j−q}. Both are one sparse matrix times a table of the columns in all turns. One gather makes the table,
    another puts the product in order. That is three operators for one image. On small images, starting an operator
    costs more than its work.

    Values are float32 (float64 after `.double()`), indices int32; nothing is in `state_dict`.

    Args:
        geometry: the scan.
        arrays: starts, indices and values of [M_0 …] as [R, Q·P], numbered as `Numbering` says, and of [M_0ᵀ …] as
            [P, Q·R].
    """

    starts: Tensor
    pixels: Tensor
    values: Tensor
    starts_t: Tensor
    rays: Tensor
    values_t: Tensor
    image_table: Tensor
    sinogram_order: Tensor
    sinogram_table: Tensor
    image_order: Tensor
    gaps: Tensor | None

    def __init__(self, geometry: FanBeamGeometry, arrays: Sequence[np.ndarray]) -> None:
        super().__init__()
        layout = Numbering(geometry)
        self._quarters = layout.quarters
        self._image_shape = (1, geometry.image_size, geometry.image_size)
        self._sinogram_shape = (1, geometry.n_views, geometry.n_detectors)
        # Mᵀ has its own arrays: Mᵀ from those of M would scatter, and threads would add to the same pixel.
        names = ("starts", "pixels", "values", "starts_t", "rays", "values_t")
        for name, array in zip(names, arrays, strict=True):
            self.register_buffer(name, torch.from_numpy(array), persistent=False)
        for name, order in layout.gathers().items():
            self.register_buffer(name, order, persistent=False)
        self.register_buffer("gaps", layout.gaps(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """M x: sinograms [B, 1, V, D] of images x [B, 1, H, W], both of the values' dtype."""
        if (at_most := _COLUMNS // self._quarters) < len(x):
            return torch.cat([self(part) for part in x.split(at_most)])
        turned = _columns(x).index_select(0, self.image_table)
        product = self._product((self.starts, self.pixels, self.values), turned)
        return _samples(product.index_select(0, self.sinogram_order), self._sinogram_shape)

    def transpose(self, y: Tensor) -> Tensor:
        """Mᵀ y: images [B, 1, H, W] of sinograms y [B, 1, V, D], both of the values' dtype."""
        if (at_most := _COLUMNS // self._quarters) < len(y):
            return torch.cat([self.transpose(part) for part in y.split(at_most)])
        turned = _columns(y).index_select(0, self.sinogram_table)
        if self.gaps is not None:
            turned.view(len(self.gaps), -1).mul_(self.gaps)
        product = self._product((self.starts_t, self.rays, self.values_t), turned)
        return _samples(product.index_select(0, self.image_order), self._image_shape)

    def _product(self, matrix: tuple[Tensor, Tensor, Tensor], turned: Tensor) -> Tensor:
        """The product [rows · Q, B] of a matrix with columns in all turns [columns · Q, B]; a vector gives a vector."""
        n_columns = self._quarters * turned.shape[1:].numel()
        return torch.ops.qnmixer.csr_product(*matrix, turned.view(-1, n_columns)).view(-1, *turned.shape[1:])


def _columns(batch: Tensor) -> Tensor:
    """[B, …] → [n, B], or a vector [n] of one sample: a CPU takes four times as long to gather rows of one number."""
    return batch.flatten() if len(batch) == 1 else batch.flatten(1).t().contiguous()


def _samples(columns: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[n, B], or a vector [n], → [B, *shape]."""
    return (columns if columns.ndim == 1 else columns.t().contiguous()).view(-1, *shape)


def _all_turns(columns: np.ndarray, direction: int) -> np.ndarray:
    """The flat table [Q·n, Q] of columns [n, Q]: block q has them rolled by q quarters, back if direction is 1."""
    return np.concatenate([np.roll(columns, -direction * q, axis=1) for q in range(columns.shape[1])]).ravel()


def _flat_places(columns: np.ndarray) -> np.ndarray:
    """For each number from 0 on, its first index in flattened columns [n, Q]."""
    numbers = columns.ravel()
    indices = np.flatnonzero(numbers >= 0)[::-1]
    places = np.empty(numbers.max() + 1, dtype=np.int64)
    places[numbers[indices]] = indices  # backwards, so that the first index wins
    return places
