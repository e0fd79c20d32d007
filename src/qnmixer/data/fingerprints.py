"""Two fingerprints of a slice, by which a copy of a training slice is found, whatever file or form it comes in.

`original` is a digest of the pixels as they were read. It is the same for a flipped or turned copy, with any border of
air, and at any `image_size`. `look` is a coarse image on a grid that follows the body. It also finds copies with other
pixels: it changes by at most 0.012 where a copy of a slice of 512 × 512 has half as many. Slices of different patients
are at least 0.04 apart (167 slices of 66 patients; 0.03 for 900 at 128 × 128). Neighbours of one patient can be as near
as copies.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qnmixer.data.slices import NO_AIR
from qnmixer.files import digest_of_bytes
from qnmixer.physics.units import AIR, FloatArray

WORDS_OF_LOOK = 8  # a look is so many int64 numbers: [_SIDE, _SIDE] bytes
_SIDE, _SPAN, _LEVELS = 8, 3.0, 100.0
_LEAST_MASS = 0.1
_NEAR = 0.02  # the largest root mean square difference of the looks of copies, in attenuation of water
_ROWS_AT_ONCE = 512


def original(hu: FloatArray) -> int:
    """A digest of a slice [H, W] in whole HU, inside its body's frame, in one of its eight orientations."""
    body = hu > NO_AIR
    rows, columns = (np.flatnonzero(body.any(axis)) for axis in (1, 0))
    crop = hu[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    image = np.maximum(crop, AIR).round().astype(np.int32)
    # Flips and turns of a slice must lead to one orientation: that whose sums of rows and columns come first.
    if (sums := image.sum(1).tolist())[::-1] < sums:
        image = image[::-1]
    if (sums := image.sum(0).tolist())[::-1] < sums:
        image = image[:, ::-1]
    if image.sum(0).tolist() < image.sum(1).tolist():
        image = image.T
    # With the number of rows: images of 2 × 6 and 3 × 4 pixels may have the same bytes.
    return digest_of_bytes(np.int64(len(image)).tobytes() + image.tobytes())


def look(hu: FloatArray) -> list[int]:
    """A slice [H, W] on 8 × 8 points around the centre of its attenuation, whose distance follows its extent."""
    mass = np.clip((hu - np.float32(AIR)) / np.float32(-AIR), 0, 2)
    mass[mass < _LEAST_MASS] = 0  # air differs between files
    axes, variance = [], 0.0
    for sums in (mass.sum(1, np.float64), mass.sum(0, np.float64)):
        places = np.arange(len(sums))
        centre = (sums * places).sum() / sums.sum()
        variance += (sums * (places - centre) ** 2).sum() / sums.sum()
        axes.append((places, centre))
    step = max(_SPAN / _SIDE * float(np.sqrt(variance)), 1.0)
    rows, columns = (_weights(places, centre, step) for places, centre in axes)
    levels = (_LEVELS * (rows @ mass @ columns.T)).round().clip(0, 255).astype(np.uint8)
    return levels.reshape(-1).view(np.int64).tolist()


def _weights(places: np.ndarray[Any, Any], centre: float, step: float) -> np.ndarray[Any, Any]:
    """The weight of each pixel in each point [_SIDE, N]: a mean over twice the distance of two points."""
    points = centre + (np.arange(_SIDE) - (_SIDE - 1) / 2) * step
    return np.maximum(0.0, 1.0 - np.abs(places - points[:, None]) / step) / step


def alike(looks: Tensor, seen: Tensor) -> Tensor:
    """Which of N looks is near to one of M, in any orientation: bool [N] from int64 [N · 8] and [M · 8]."""
    queries, references = _levels(looks), _levels(seen).flatten(1)
    near = torch.zeros(len(queries), dtype=torch.bool)
    for turns in range(4) if len(references) else ():
        for turned in (torch.rot90(queries, turns, (1, 2)), torch.rot90(queries, turns, (1, 2)).transpose(1, 2)):
            parts = [torch.cdist(part, references).amin(1) for part in turned.flatten(1).split(_ROWS_AT_ONCE)]
            # A Euclidean distance over _SIDE² points is _SIDE times the root mean square.
            near |= torch.cat(parts) <= _NEAR * _LEVELS * _SIDE
    return near


def _levels(looks: Tensor) -> Tensor:
    return torch.from_numpy(looks.numpy().view(np.uint8)).reshape(-1, _SIDE, _SIDE).float()
