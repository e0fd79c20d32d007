"""Slices of any shape onto the square grid of the network."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from qnmixer.engine.data.slices import AIR, FloatArray

TISSUE = -300.0
"""HU. Denser pixels count as tissue."""


def square_padding(shape: tuple[int, int]) -> tuple[int, int, int]:
    """(side, rows, columns): side of the square that holds a slice, and its offset in it."""
    side = max(shape)
    return side, (side - shape[0]) // 2, (side - shape[1]) // 2


def field_of(shape: tuple[int, ...], spacing: Sequence[float] | None) -> float | None:
    """mm of the square around a slice whose pixels are not square; None if they are, or are not known.

    Args:
        shape: rows and columns.
        spacing: mm between rows and between columns.
    """
    if spacing is None or math.isclose(*spacing, rel_tol=1e-3):
        return None
    return max(n * mm for n, mm in zip(shape, spacing, strict=True))


def to_square(hu: FloatArray, size: int) -> FloatArray:
    """Pad [H, W] with air to a square, then resample to [size, size]: bilinear with antialiasing, as in most papers."""
    side, top, left = square_padding((hu.shape[0], hu.shape[1]))
    square = np.full((side, side), AIR, np.float32)
    square[top : top + hu.shape[0], left : left + hu.shape[1]] = hu
    if side == size:
        return square
    image = torch.from_numpy(square)[None, None]
    return functional.interpolate(image, (size, size), mode="bilinear", antialias=True, align_corners=False)[
        0, 0
    ].numpy()


def to_field(hu: FloatArray, spacing: tuple[float, float], size: int, field_of_view: float) -> FloatArray:
    """[H, W] at its true size in the middle of a square field [size, size], bilinear with antialiasing.

    Parts of the slice outside the field are cut. Pixels that the slice does not cover are air.

    Args:
        hu: the slice.
        spacing: mm between its rows and between its columns.
        size: pixels of a side of the field.
        field_of_view: mm of a side of the field.
    """
    step = field_of_view / size
    rows, columns = (_weights(n, mm, size, step) for n, mm in zip(hu.shape, spacing, strict=True))
    return rows @ (hu - np.float32(AIR)) @ columns.T + np.float32(AIR)


def _weights(n: int, mm: float, size: int, step: float) -> FloatArray:
    """The weight of each of n pixels of `mm` in each of `size` pixels of `step`, [size, n].

    Both rows of pixels are centred on 0.
    """
    wanted = (np.arange(size) - (size - 1) / 2) * (step / mm) + (n - 1) / 2  # in pixels of the slice
    reach = max(1.0, step / mm)
    pixels = np.ceil(wanted - reach).astype(int)[:, None] + np.arange(int(2 * reach) + 1)
    weights = np.maximum(0.0, 1.0 - np.abs(pixels - wanted[:, None]) / reach)
    weights /= weights.sum(axis=1, keepdims=True)  # pixels beyond the slice are air, and count in the mean
    row, near = np.nonzero((pixels >= 0) & (pixels < n))
    found = np.zeros((size, n), np.float32)
    found[row, pixels[row, near]] = weights[row, near]
    return found


def inside(hu: FloatArray, spacing: tuple[float, float] | None, field_of_view: float | None) -> FloatArray:
    """The pixels of a slice [H, W] whose centres lie in the field; those in its middle if the field is narrower.

    All of them if the spacing is unknown, or if the slice fills the whole field (None).
    """
    if field_of_view is None or spacing is None:
        return hu
    rows, columns = (
        np.abs(np.arange(n) - (n - 1) / 2) * mm <= max(field_of_view, mm) / 2
        for n, mm in zip(hu.shape, spacing, strict=True)
    )
    return hu[rows][:, columns]


def tissue_width(hu: FloatArray, spacing: tuple[float, float]) -> float:
    """mm of the square in the middle of a slice [H, W] that has all centres of pixels with tissue in it."""
    centres = [np.abs(np.arange(n) - (n - 1) / 2) * mm for n, mm in zip(hu.shape, spacing, strict=True)]
    has_tissue = (hu > TISSUE).any(1), (hu > TISSUE).any(0)
    return 2 * max(float(its[where].max(initial=0)) for its, where in zip(centres, has_tissue, strict=True))


def cut_line(root: str, widest: float, field_of_view: float) -> str | None:
    """The warning about tissue, up to `widest` mm wide, outside of the field of view; None if nothing is cut."""
    if widest <= field_of_view:
        return None
    return (
        f"{root}: tissue (above −300 HU) lies outside geometry.field_of_view={field_of_view:g} mm and is cut: train "
        f"with geometry.field_of_view={math.ceil(round(widest, 3)) + 1} to cut nothing"
    )


class Grid:
    """The pixel grid of the network, and how slices are resampled onto it.

    Args:
        size: rows and columns.
        field_of_view: mm that they cover, each slice at its true size; None: a slice fills the whole image.

    Attributes:
        widest: `tissue_width` of the slice with the widest tissue so far, if slices have their true size.
    """

    def __init__(self, size: int, field_of_view: float | None) -> None:
        self.size, self.field_of_view = size, field_of_view
        self.widest = 0.0

    def place(self, hu: FloatArray, spacing: tuple[float, float] | None) -> FloatArray:
        """A slice [H, W] as [size, size]. A slice of unknown spacing fills the whole image, with square pixels."""
        field = self.field_of_view or field_of(hu.shape, spacing)
        if field is None or spacing is None:
            return to_square(hu, self.size)
        if self.field_of_view is not None:
            self.widest = max(self.widest, tissue_width(hu, spacing))
        return to_field(hu, spacing, self.size, field)
