"""Slices of any shape onto the square grid of the network."""

import numpy as np
import torch
from torch.nn import functional

from qnmixer.data.slices import AIR, FloatArray


def square_padding(shape: tuple[int, int]) -> tuple[int, int, int]:
    """(side, rows, columns): side of the square that holds a slice, and its offset in it."""
    side = max(shape)
    return side, (side - shape[0]) // 2, (side - shape[1]) // 2


def to_square(hu: FloatArray, size: int) -> FloatArray:
    """Pad [H, W] with air to a square, then resample bilinearly with antialiasing, as the field does, to
    [size, size].
    """
    side, top, left = square_padding((hu.shape[0], hu.shape[1]))
    square = np.full((side, side), AIR, np.float32)
    square[top : top + hu.shape[0], left : left + hu.shape[1]] = hu
    if side == size:
        return square
    image = torch.from_numpy(square)[None, None]
    return functional.interpolate(image, (size, size), mode="bilinear", antialias=True, align_corners=False)[
        0, 0
    ].numpy()
