"""A matrix between image and sinogram, of a quarter of the views where a quarter turn maps the scan onto itself."""

import numpy as np
import torch
from torch import Tensor

from qnmixer.physics.geometry import FanBeamGeometry
from qnmixer.physics.sparse import Csr, FullPrecisionModule

_PADDING = 4
"""Unused numbers after each row of a corner: rows a power of two apart would share cache lines, 15 % slower."""
_FAN = 16
"""Neighbouring bins whose rays are followed through all views before the next bins': they meet the same pixels."""
_COLUMNS = 32
"""Columns of a product; of more, the values that the rows share leave the cache."""


class Numbering:
    """How the rows and columns of a matrix between pixels and rays are numbered, with the symmetry and without.

    With the symmetry, the first V/4 views serve all: view j + k·V/4 of an image is view j of the image turned back by k
    quarters. So pixels are taken in four corners that the turns carry into each other: pixel p of corner q is, in the
    image turned by k, pixel p of corner q + k. Without it, Q is 1, and the one corner is the image.

    Pixels are numbered row by row of a corner, rays fan by fan: `_FAN` bins of each view, then the next bins.

    Attributes:
        quarters: Q, 4 or 1.
        n_pixels: P, numbers for the pixels of a corner; padding stays unused.
        n_rays: R, numbers for the rays of the distinct views; those of the last fan beyond the detector stay unused.
    """

    def __init__(self, geometry: FanBeamGeometry) -> None:
        self.quarters = 4 if geometry.has_quarter_turn_symmetry else 1
        self._turn = -1 if geometry.angle_span > 0 else 1
        self._size, self._n_detectors = geometry.image_size, geometry.n_detectors
        self._n_views = geometry.n_distinct_views
        self._fans = -(-geometry.n_detectors // _FAN)
        self.n_rays = self._fans * self._n_views * _FAN
        height, width = self._corner_shape()
        self.n_pixels = height * (width + _PADDING) + self.sums_middle

    def pixel_columns(self, x: Tensor) -> Tensor:
        """Columns [P, Q, B] of images [B, 1, H, W]: the corners, each turned to the top left."""
        height = self._corner_shape()[0]
        columns = x.new_zeros(self.n_pixels, self.quarters, len(x))
        corners = self._unpadded(columns)
        for q, (rows, cols) in enumerate(self._corners()):
            corners[:, :, q] = torch.rot90(x[:, 0, rows, cols], self._turn * q, (1, 2)).permute(1, 2, 0)
        if self.sums_middle:
            columns[-1] = x[:, 0, height, height]
        return columns

    def images(self, columns: Tensor) -> Tensor:
        """Transpose of `pixel_columns`: images [B, 1, H, W]; what the corners hold of the middle is added up."""
        height = self._corner_shape()[0]
        x = columns.new_empty(columns.shape[2], 1, self._size, self._size)
        corners = self._unpadded(columns).permute(2, 3, 0, 1)
        for q, (rows, cols) in enumerate(self._corners()):
            x[:, 0, rows, cols] = torch.rot90(corners[q], -self._turn * q, (1, 2))
        if self.sums_middle:
            x[:, 0, height, height] = columns[-1].sum(0)
        return x

    def ray_columns(self, y: Tensor) -> Tensor:
        """Columns [R, Q, B] of sinograms [B, 1, V, D]."""
        padded = torch.nn.functional.pad(y, (0, self._fans * _FAN - self._n_detectors))
        fans = padded.reshape(len(y), self.quarters, self._n_views, self._fans, _FAN)
        return fans.permute(3, 2, 4, 1, 0).reshape(self.n_rays, self.quarters, len(y))

    def sinograms(self, columns: Tensor) -> Tensor:
        """Transpose of `ray_columns`: sinograms [B, 1, V, D]."""
        fans = columns.view(self._fans, self._n_views, _FAN, self.quarters, -1)
        padded = fans.permute(4, 3, 1, 0, 2).reshape(fans.shape[-1], 1, self.quarters * self._n_views, -1)
        return padded[..., : self._n_detectors].contiguous()

    def pixel_numbers(self) -> np.ndarray:
        """q·P + p of each pixel in row-major order, int64 [H·W]."""
        pixels = self.corner_pixels().T.ravel()
        # Backwards, so that the middle of an odd image, which is in all corners, is that of corner 0.
        used = np.flatnonzero(pixels >= 0)[::-1]
        numbers = np.empty(self._size**2, dtype=np.int64)
        numbers[pixels[used]] = used
        return numbers

    def corner_pixels(self) -> np.ndarray:
        """The pixel, in row-major order, that each p of each corner is, −1 for none: int64 [P, Q]."""
        from_one = torch.arange(1, self._size**2 + 1).view(1, 1, self._size, -1)
        return self.pixel_columns(from_one)[:, :, 0].numpy() - 1

    def ray_numbers(self) -> np.ndarray:
        """The number of each ray of the distinct views, int64 [V/Q, D]."""
        views, bins = np.arange(self._n_views)[:, None], np.arange(self._n_detectors)
        return bins // _FAN * (self._n_views * _FAN) + views * _FAN + bins % _FAN

    @property
    def sums_middle(self) -> bool:
        """Whether the corners share a middle pixel, whose value is a sum over them."""
        return self.quarters == 4 and self._size % 2 == 1

    def gathers(self) -> dict[str, Tensor]:
        """The indices of the gathers before and after a product, int32, by name.

        They are found by running the methods above on numbers. Padding may come from anywhere: the matrix has no value
        for it.
        """
        x = torch.arange(1, self._size**2 + 1).view(1, 1, self._size, -1)
        y = torch.arange(1, self.quarters * self._n_views * self._n_detectors + 1)
        rows = torch.arange(self.n_rays * self.quarters).view(self.n_rays, self.quarters)
        pixels = torch.arange(self.n_pixels * self.quarters).view(self.n_pixels, self.quarters, 1)
        images = self.images(pixels).flatten()
        if self.sums_middle:
            images[len(images) // 2] = pixels[-1, 0, 0]
        tables = {
            "image_table": _all_turns(self.pixel_columns(x), 1).flatten() - 1,
            "sinogram_order": self.sinograms(rows).flatten(),
            "sinogram_table": _all_turns(self.ray_columns(y.view(1, 1, -1, self._n_detectors)), -1).flatten() - 1,
            "image_order": images,
        }
        return {name: table.clamp_min(0).int() for name, table in tables.items()}

    def _unpadded(self, columns: Tensor) -> Tensor:
        """Columns [P, …] as corners [height, width, …]."""
        height, width = self._corner_shape()
        return columns[: height * (width + _PADDING)].unflatten(0, (height, width + _PADDING))[:, :width]

    def _corner_shape(self) -> tuple[int, int]:
        """Height and width of each corner, turned to the top left; the middle pixel of an odd image is in none."""
        size, height = self._size, self._size // 2
        return (size, size) if self.quarters == 1 else (height, size - height)

    def _corners(self) -> list[tuple[slice, slice]]:
        """Rows and columns of each corner."""
        size, (height, width) = self._size, self._corner_shape()
        if self.quarters == 1:
            return [(slice(size), slice(size))]
        first, last = slice(height), slice(size - height, size)
        long_first, long_last = slice(width), slice(height, size)
        around = [(first, long_first), (long_last, first), (last, long_last), (long_first, last)]
        return around if self._turn < 0 else [around[-q % 4] for q in range(4)]


class ScanMatrix(FullPrecisionModule):
    """M, a sparse matrix that takes images [B, 1, H, W] to sinograms [B, 1, V, D], and Mᵀ, both stored.

    By corner q the matrix of the first V/Q views is [M_0 … M_{Q−1}]. Quarter k of the sinogram of the corners c is
    Σ_q M_q c_{q+k}, and corner j of Mᵀ y is Σ_q M_qᵀ y_{j−q}, with y by quarters: either way one sparse matrix
    times a table of the columns in all turns. A gather makes the table, another puts the product in order: three
    operators for one image, where starting an operator costs more than its work on small images.

    Values are float32 (float64 after `.double()`), indices int32; nothing is in `state_dict`.

    Args:
        geometry: the scan.
        forward: [M_0 …] as [R, Q·P], numbered as `Numbering` says.
        backward: [M_0ᵀ …] as [P, Q·R].
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

    def __init__(self, geometry: FanBeamGeometry, forward: Csr, backward: Csr) -> None:
        super().__init__()
        layout = Numbering(geometry)
        self._quarters, self._sums_middle = layout.quarters, layout.sums_middle
        self._image_shape = (1, geometry.image_size, geometry.image_size)
        self._sinogram_shape = (1, geometry.n_views, geometry.n_detectors)
        arrays = dict(zip(("starts", "pixels", "values"), forward, strict=True))
        arrays |= dict(zip(("starts_t", "rays", "values_t"), backward, strict=True))
        for name, array in arrays.items():
            self.register_buffer(name, torch.from_numpy(array), persistent=False)
        for name, order in layout.gathers().items():
            self.register_buffer(name, order, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """M x: sinograms [B, 1, V, D] of images x [B, 1, H, W], both of the values' dtype."""
        matrix = self.starts, self.pixels, self.values
        parts = [self._product(matrix, self.image_table, self.sinogram_order, part) for part in self._parts(x)]
        return _joined(parts).view(-1, *self._sinogram_shape)

    def transpose(self, y: Tensor) -> Tensor:
        """Mᵀ y: images [B, 1, H, W] of sinograms y [B, 1, V, D], both of the values' dtype."""
        matrix, middle = (self.starts_t, self.rays, self.values_t), self._sums_middle
        parts = [self._product(matrix, self.sinogram_table, self.image_order, part, middle) for part in self._parts(y)]
        return _joined(parts).view(-1, *self._image_shape)

    def _product(
        self, matrix: tuple[Tensor, Tensor, Tensor], table: Tensor, order: Tensor, x: Tensor, sums_middle: bool = False
    ) -> Tensor:
        """[B, values of an output] from [B, …]: columns in all turns, times the matrix, in the output's order."""
        columns = x.reshape(len(x), -1).t().contiguous()  # a view for one sample
        product = torch.ops.qnmixer.csr_product(
            *matrix, columns.index_select(0, table).view(-1, len(x) * self._quarters)
        )
        if sums_middle:  # the four corners of an odd image share the middle pixel
            middle = product[-1].view(self._quarters, -1)
            middle[0] = middle.sum(0)
        return product.view(-1, len(x)).index_select(0, order).t().contiguous()

    def _parts(self, batch: Tensor) -> tuple[Tensor, ...]:
        """The batch in parts of at most as many samples as one product takes."""
        return batch.split(_COLUMNS // self._quarters)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _all_turns(columns: Tensor, direction: int) -> Tensor:
    """Of columns [n, Q, B] the table [Q·n, Q·B] whose block q has them moved on by q quarters, or back."""
    n, quarters, batch = columns.shape
    if quarters == 1:
        return columns[:, 0]
    around = torch.cat([columns, columns[:, :-1]], 1)
    turns = [around[:, direction * q % quarters :][:, :quarters] for q in range(quarters)]
    return torch.stack(turns).view(quarters * n, quarters * batch)
