"""A matrix between image and sinogram, of a quarter of the views where a quarter turn maps the scan onto itself."""

import numpy as np
import torch
from torch import Tensor

from qnmixer.physics.geometry import FanBeamGeometry
from qnmixer.physics.sparse import FullPrecisionModule, transpose_csr

_PADDING = 4
"""Unused columns right of the image's copies: rows a power of two apart would share cache lines, 15 % slower."""
_FAN = 32
"""Neighbouring bins whose rays are followed through all views before the next bins': they meet the same pixels."""


class ScanMatrix(FullPrecisionModule):
    """M, a sparse matrix that takes images [B, 1, H, W] to sinograms [B, 1, V, D], and Mᵀ, both stored.

    With the symmetry, M_¼ of the first V/4 views serves all: view j + k·V/4 of an image is view j of the image turned
    back by k quarters. M applies M_¼ to the four turned images side by side. Mᵀ would have to turn four images back and
    add them up; instead the pixels are taken in four corners that the turns carry into each other. A pixel of corner q,
    in the image of quarter k, belongs at the same place of corner q + k, so the product itself adds them up.

    Values are float32 (float64 after `.double()`), indices int32; nothing is in `state_dict`.

    Args:
        geometry: the scan.
        starts, pixels, values: M_¼ (M, without the symmetry) as CSR arrays: rows by (view, bin), pixels in row-major
            order.
    """

    starts: Tensor
    pixels: Tensor
    values: Tensor
    position: Tensor
    corner_starts: Tensor
    rays: Tensor
    values_t: Tensor

    def __init__(self, geometry: FanBeamGeometry, starts: np.ndarray, pixels: np.ndarray, values: np.ndarray) -> None:
        super().__init__()
        self._size = geometry.image_size
        self._sinogram_shape = (1, geometry.n_views, geometry.n_detectors)
        self._quarters = 4 if geometry.has_quarter_turn_symmetry else 1
        self._turn = -1 if geometry.angle_span > 0 else 1
        forward = self._in_fans(starts, pixels, values, geometry.n_detectors)
        backward = self._in_corners(starts, pixels, values)
        for name, array in (forward | backward).items():
            self.register_buffer(name, torch.from_numpy(array), persistent=False)

    def _in_fans(
        self, starts: np.ndarray, pixels: np.ndarray, values: np.ndarray, n_detectors: int
    ) -> dict[str, np.ndarray]:
        """M_¼ with its rows fan by fan (`position` tells where each ray went) and pixels in padded rows."""
        order = np.argsort(np.arange(len(starts) - 1) % n_detectors // _FAN, kind="stable")
        position = np.empty(len(order), dtype=np.int32)
        position[order] = np.arange(len(order), dtype=np.int32)
        padded = pixels + pixels // self._size * _PADDING
        by_pixel, rays, lengths = transpose_csr(starts, padded, values, self._size * (self._size + _PADDING))
        # Transposed back, each row's pixels come in order, as CSR asks.
        by_fan = transpose_csr(by_pixel, position[rays], lengths, len(order))
        return dict(zip(("starts", "pixels", "values"), by_fan, strict=True)) | {"position": position}

    def _in_corners(self, starts: np.ndarray, pixels: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
        """Mᵀ_¼ with its rows corner by corner, each corner's starts from 0; `_bounds` tells where its values lie."""
        corners = self._corners(torch.arange(self._size**2, dtype=torch.int32).view(1, self._size, -1)).flatten()
        place = np.empty(self._size**2, dtype=np.int32)
        # Backwards, so that the middle of an odd image, which is in all corners, gets its values from corner 0 alone.
        place[corners.numpy()[::-1]] = np.arange(len(corners), dtype=np.int32)[::-1]
        starts_t, rays, values_t = transpose_csr(starts, place[pixels], values, len(corners))
        n_pixels = len(corners) // self._quarters
        self._bounds: list[int] = starts_t[::n_pixels].tolist()
        corner_starts = np.stack([starts_t[q * n_pixels :][: n_pixels + 1] for q in range(self._quarters)])
        return {"corner_starts": corner_starts - corner_starts[:, :1], "rays": rays, "values_t": values_t}

    def forward(self, x: Tensor) -> Tensor:
        """M x: sinograms [B, 1, V, D] of images x [B, 1, H, W], both of the values' dtype."""
        size, batch = self._size, len(x)
        image = x[:, 0].permute(1, 2, 0).contiguous()
        turned = image.new_empty(size, size + _PADDING, self._quarters, batch)
        for k in range(self._quarters):
            turned[:, :size, k] = torch.rot90(image, self._turn * k)
        columns = turned.view(-1, self._quarters * batch)
        result = torch.ops.qnmixer.csr_product(self.starts, self.pixels, self.values, columns)
        rows = result.index_select(0, self.position).t().contiguous().view(self._quarters, batch, -1)
        return rows.transpose(0, 1).reshape(batch, *self._sinogram_shape)

    def transpose(self, y: Tensor) -> Tensor:
        """Mᵀ y: images [B, 1, H, W] of sinograms y [B, 1, V, D], both of the values' dtype."""
        batch = len(y)
        columns = y.reshape(batch, self._quarters, -1).transpose(0, 1).reshape(self._quarters * batch, -1)
        sums = torch.ops.qnmixer.csr_stack_product(
            self.corner_starts, self.rays, self.values_t, self._bounds, columns.t().contiguous()
        )
        moved = sums.t().contiguous().view(2 * self._quarters - 1, batch, -1)
        corners = moved[: self._quarters]
        corners[:-1] += moved[self._quarters :]
        return self._join(corners)[:, None]

    def _regions(self) -> list[tuple[slice, slice]]:
        """Rows and columns of each corner. Turned by q quarters it lies at the top left, H//2 rows high, H − H//2 wide.

        The middle pixel of an odd image is in none. Without the symmetry the one corner is the image.
        """
        size, height = self._size, self._size // 2
        if self._quarters == 1:
            return [(slice(size), slice(size))]
        first, last = slice(height), slice(size - height, size)
        long_first, long_last = slice(size - height), slice(height, size)
        around = [(first, long_first), (long_last, first), (last, long_last), (long_first, last)]
        return around if self._turn < 0 else [around[-q % 4] for q in range(4)]

    def _has_middle(self) -> bool:
        """Whether the turns leave a pixel in its place."""
        return self._quarters == 4 and self._size % 2 == 1

    def _corners(self, x: Tensor) -> Tensor:
        """The corners of x [B, H, W], each turned to the top left, as [quarters, B, pixels]; the middle is in all."""
        corners = torch.stack(
            [
                torch.rot90(x[:, rows, columns], self._turn * q, (1, 2)).flatten(1)
                for q, (rows, columns) in enumerate(self._regions())
            ]
        )
        if self._has_middle():
            middle = x[:, self._size // 2, self._size // 2]
            corners = torch.cat([corners, middle.expand(self._quarters, -1)[..., None]], dim=2)
        return corners

    def _join(self, corners: Tensor) -> Tensor:
        """Transpose of `_corners`: the image [B, H, W] of its corners; what they hold of the middle is added up."""
        size, height = self._size, self._size // 2
        shape = (size, size) if self._quarters == 1 else (height, size - height)
        x = corners.new_empty(corners.shape[1], size, size)
        for q, (rows, columns) in enumerate(self._regions()):
            corner = corners[q, :, : shape[0] * shape[1]].unflatten(1, shape)
            x[:, rows, columns] = torch.rot90(corner, -self._turn * q, (1, 2))
        if self._has_middle():
            x[:, height, height] = corners[:, :, -1].sum(0)
        return x
