"""A scan, the input of one reconstruction; and what its readers share."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from qnmixer.engine.data.cache import list_files
from qnmixer.engine.data.slices import FloatArray
from qnmixer.engine.reports.terminal import Console


@dataclass(kw_only=True)
class Scan:
    """The sinogram of one image, in HU = offset + scale · x, and what the image becomes.

    Attributes:
        name: the file relative to the input, and `#frame` if it has several.
        sinogram: y [1, 1, V, D] on the network's device.
        measured: whether a scanner measured it. Else it was simulated from a slice.
        template: the DICOM file of the slice; None for other formats.
        frame: number of the frame in the template.
        field_of_view: mm that the image covers, if its template has true size; None: it covers the whole template.
    """

    name: str
    sinogram: Tensor
    offset: float
    scale: float
    measured: bool = False
    template: Path | None = None
    frame: int = 0
    field_of_view: float | None = None

    def hu(self, x: Tensor) -> FloatArray:
        """An image x [1, 1, S, S] of this scan as HU [S, S]."""
        return (self.offset + self.scale * x[0, 0].cpu().numpy()).astype(np.float32)


def input_files(path: Path) -> list[Path]:
    """The files of an input: a file itself, or all files of a folder. Raises DataError if there is none."""
    return [path] if path.is_file() else [path / file for file in list_files(path, key="input")]


def warn(line: str) -> None:
    """Print a line on standard error."""
    Console(stderr=True).warn(line)
