"""A scan, the input of one reconstruction; and how its readers warn."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydicom.dataset import FileDataset
from torch import Tensor
from torch.nn.functional import avg_pool2d

from qnmixer.physics import FanBeamProjector
from qnmixer.physics.units import FloatArray
from qnmixer.runs.terminal import Console


@dataclass(kw_only=True)
class Scan:
    """The sinogram of one image, in HU = offset + scale · x, and what the image becomes.

    Attributes:
        name: the file relative to the input, and `#frame` if it has several.
        sinogram: y [1, 1, V, D] on the network's device.
        measured: whether a scanner measured it. Else it was simulated from a slice.
        missing: [V] bool, views of a measured scan that were interpolated; None: no view is missing.
        template: the DICOM file of the slice; None for other formats.
        frame: number of the frame in the template.
        place: of the slice in its series, from 0, if it has no template.
        field_of_view: mm that the image covers, if its template has true size; None: it covers the whole template.
    """

    name: str
    sinogram: Tensor
    offset: float
    scale: float
    measured: bool = False
    missing: Tensor | None = None
    template: FileDataset | None = None
    frame: int = 0
    place: int = 0
    field_of_view: float | None = None

    def hu(self, x: Tensor) -> FloatArray:
        """An image x [1, 1, S, S] of this scan as HU [S, S]."""
        return (self.offset + self.scale * x[0, 0].cpu().numpy()).astype(np.float32)

    def hu_of_difference(self, x: Tensor) -> FloatArray:
        """A difference of images, or a deviation [1, 1, S, S], in HU [S, S]."""
        return (self.scale * x[0, 0].cpu().numpy()).astype(np.float32)


def by_numbers(path: Path | str) -> list[str | int]:
    """The key that sorts paths with the numbers in them as numbers: a slice 10 comes after 9, as in its series."""
    return [int(part) if k % 2 else part for k, part in enumerate(re.split(r"(\d+)", str(path)))]


def misfit(projector: FanBeamProjector, x: Tensor, scan: Scan, bins: int = 1) -> float:
    """‖A x − y‖ / ‖y‖ of an image [1, 1, S, S] over the views that were measured, with means of `bins` neighbours."""
    views = slice(None) if scan.missing is None else ~scan.missing
    residual = projector(x) - scan.sinogram
    residual, y = (avg_pool2d(sinogram[:, :, views], (1, bins)) for sinogram in (residual, scan.sinogram))
    return float(residual.norm() / y.norm())


def warn(line: str) -> None:
    """Print a line on standard error."""
    Console(stderr=True).warn(line)
