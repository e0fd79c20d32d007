"""A scan, the input of one reconstruction; and how its readers warn."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydicom.dataset import FileDataset
from torch import Tensor

from qnmixer.physics.units import FloatArray
from qnmixer.runs.terminal import Console


@dataclass(kw_only=True)
class Scan:
    """The sinogram of one image, in HU = offset + scale · x, and what the image becomes."""

    name: str  # the file relative to the input, and `#frame` if it has several
    sinogram: Tensor  # y [1, 1, V, D] on the network's device
    offset: float
    scale: float
    measured: bool = False  # whether a scanner measured it. Else it was simulated from a slice
    missing: Tensor | None = None  # [V] bool, views of a measured scan that were interpolated; None: no view is missing
    template: FileDataset | None = None  # the DICOM file of the slice; None for other formats
    frame: int = 0  # number of the frame in the template
    place: int = 0  # of the slice in its series, from 0, if it has no template
    # In mm, what the image covers, if its template has true size; None: it covers the whole template
    field_of_view: float | None = None

    def hu(self, x: Tensor) -> FloatArray:
        """An image x [1, 1, S, S] of this scan as HU [S, S]."""
        return (self.offset + self.scale * x[0, 0].cpu().numpy()).astype(np.float32)


def by_numbers(path: Path | str) -> list[str | int]:
    """The key that sorts paths with the numbers in them as numbers: a slice 10 comes after 9, as in its series."""
    return [int(part) if k % 2 else part for k, part in enumerate(re.split(r"(\d+)", str(path)))]


def warn(line: str) -> None:
    """Print a line on standard error."""
    Console(stderr=True).warn(line)
