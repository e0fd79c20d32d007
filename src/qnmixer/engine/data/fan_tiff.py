"""Measured fan-beam scans of helix2fan, which rebins clinical helical projections (Wagner et al., ISBI 2023).

Documented, in the code of github.com/faebstn96/helix2fan:

- `main.py` saves `*_flat_fan_projections.tif` by tifffile: float32 [rotview, nu, nz_rebinned], views × bins × slices.
- The description is JSON with all arguments. Here dso, ddo and du (mm), nu, rotview, hu_factor, and angles (radians, of
  all helical projections) are used. A turn has the first `rotview` angles.
- The detector is flat, and its bins are centred: those of the curved detector and its quarter offset are resampled.
- `reco_example_fan_beam.py` reverses the bins, and gives θ = angles + π/2 to torch-radon. With y up, its source is at
  −dso·(sin θ, cos θ), and its bins run along (cos θ, −sin θ). So β of this package is −θ.
- Moves of the focal spot (dangles, dz, drho) are not corrected, there and here.

Inferred: values are −log of transmission, and hu_factor is the attenuation of water in 1/mm, as in that example. It was
not run on a file of a scanner: tests write files like these.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qnmixer.engine.data.slices import FloatArray, SkipFile, optional, reading, require_size
from qnmixer.errors import DataError, GeometryError
from qnmixer.physics import FanBeamGeometry

TIFF = (".tif", ".tiff")
_HELICAL = "*_flat_fan_projections.tif is the file of helix2fan that can be used"


@dataclass(frozen=True)
class FanTiff:
    """A scan in a file: V views, D bins, Z slices; lengths in mm."""

    path: Path
    angles: npt.NDArray[np.float64]  # β of each view in radians, [V]
    n_detectors: int
    n_slices: int
    detector_pitch: float
    source_to_axis: float
    axis_to_detector: float
    water: float  # its attenuation in 1/mm

    def values(self) -> np.ndarray[Any, Any]:
        """−log of transmission [V, D, Z], mapped, in the order of bins of this package. Raises SkipFile."""
        with reading("a truncated or compressed TIFF"):
            values = optional("tifffile", "helix2fan").memmap(self.path, mode="r")
            return values.reshape(len(self.angles), self.n_detectors, self.n_slices)[:, ::-1]

    def rows(self, index: int, views: npt.NDArray[np.intp]) -> FloatArray:
        """Some views of a slice [v, D], −log of transmission. Raises SkipFile."""
        return np.array(self.values()[:, :, index][views], np.float32)

    def scan(self, like: FanBeamGeometry, turned: float = 0.0) -> FanBeamGeometry:
        """The rays of all its views, with the image of another scan; `turned`: radians taken off each angle.

        Raises DataError if there can be no such rays.
        """
        try:
            return replace(
                like, beam="fan_flat", n_views=len(self.angles), n_detectors=self.n_detectors, detector_offset=0.0,
                detector_pitch=self.detector_pitch, source_to_axis=self.source_to_axis,
                axis_to_detector=self.axis_to_detector, view_angles=tuple((self.angles - turned) % (2 * np.pi)),
            )  # fmt: skip
        except GeometryError as error:
            raise DataError(f"{self.path} cannot be used: {error}") from error

    def nearest(self, angles: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """The view nearest to each angle, and how far it is turned from it in radians: int [v], float64 [v]."""
        turned = (self.angles - np.asarray(angles)[:, None] + np.pi) % (2 * np.pi) - np.pi
        views = np.abs(turned).argmin(axis=1)
        return views, np.take_along_axis(turned, views[:, None], axis=1)[:, 0]


def open_fan(path: Path) -> FanTiff:
    """The scan in a file. Raises SkipFile for another file, and DataError if tifffile is not installed."""
    tifffile = optional("tifffile", "helix2fan")
    with reading("unreadable or truncated TIFF"), tifffile.TiffFile(path) as file:
        description, shape, dtype = file.pages[0].description, file.series[0].shape, file.series[0].dtype
    with reading("no geometry of helix2fan in its description"):
        its = json.loads(description)
        angles = np.array(its["angles"], np.float64)[: int(its["rotview"])]
        bins, views = int(its["nu"]), int(its["rotview"])
        pitch, to_axis, to_detector, water = (float(its[key]) for key in ("du", "dso", "ddo", "hu_factor"))
    if len(shape) != 3 or shape[:2] != (views, bins):
        raise SkipFile(f"{[*shape]} values, not [{views}, {bins}, slices]; {_HELICAL}")
    if dtype.kind != "f":
        raise SkipFile(f"values of {dtype}, not float32; {_HELICAL}")
    require_size(views, bins, least=1)
    numbers = *angles, pitch, to_axis, to_detector, water
    if angles.shape != (views,) or not np.isfinite(numbers).all() or min(pitch, to_axis, water) <= 0:
        raise SkipFile("angles or distances in its description that are none")
    beta = -(angles + np.pi / 2) % (2 * np.pi)
    return FanTiff(path, beta, bins, shape[2], pitch, to_axis, to_detector, water)
