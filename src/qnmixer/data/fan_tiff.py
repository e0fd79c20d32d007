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
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qnmixer.data.slices import SkipFile, reading, require_size
from qnmixer.errors import DataError, GeometryError
from qnmixer.installed import optional
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.units import FloatArray

TIFF = (".tif", ".tiff")
_ROUGH = 0.5  # how much the angles of a file may differ from equal steps, in steps


@dataclass(frozen=True)
class FanTiff:
    """A scan in a file: V views in equal steps over a turn, D bins, Z slices; lengths in mm."""

    path: Path
    n_views: int
    n_detectors: int
    n_slices: int
    first_angle: float  # β of view 0 in radians
    step: float  # from view to view in radians, with a sign
    detector_pitch: float
    source_to_axis: float
    axis_to_detector: float
    water: float  # its attenuation in 1/mm

    def values(self) -> np.ndarray[Any, Any]:
        """−log of transmission [V, D, Z], mapped, in the order of bins of this package. Raises SkipFile."""
        with reading("a truncated or compressed TIFF"):
            values = optional("tifffile", "helix2fan").memmap(self.path, mode="r")
            return values.reshape(self.n_views, self.n_detectors, self.n_slices)[:, ::-1]

    def rows(self, index: int, views: npt.NDArray[np.intp]) -> FloatArray:
        """Some views of a slice [v, D], −log of transmission. Raises SkipFile."""
        return np.array(self.values()[:, :, index][views], np.float32)

    def scan(self, like: FanBeamGeometry, turned: float = 0.0) -> FanBeamGeometry:
        """The rays of all its views, with the image of another scan; `turned`: radians taken off each angle.

        Raises DataError if there can be no such rays.
        """
        try:
            return replace(
                like, beam="fan_flat", n_views=self.n_views, n_detectors=self.n_detectors, detector_offset=0.0,
                detector_pitch=self.detector_pitch, source_to_axis=self.source_to_axis,
                axis_to_detector=self.axis_to_detector, first_angle=(self.first_angle - turned) % (2 * np.pi),
                angle_span=self.step * self.n_views,
            )  # fmt: skip
        except GeometryError as error:
            raise DataError(f"{self.path} cannot be used: {error}") from error

    def nearest(self, angle: float) -> tuple[int, float]:
        """The view nearest to an angle, and how far it is turned from it in radians."""
        view = round((angle - self.first_angle) / self.step)
        return view % self.n_views, self.first_angle + self.step * view - angle


def open_fan(path: Path) -> FanTiff:
    """The scan in a file. Raises SkipFile for another file, and NotInstalled without tifffile."""
    tifffile = optional("tifffile", "helix2fan")
    with reading("unreadable or truncated TIFF"), tifffile.TiffFile(path) as file:
        description, shape, dtype = file.pages[0].description, file.series[0].shape, file.series[0].dtype
    with reading("no geometry of helix2fan in its description"):
        header = json.loads(description)
        bins, views = int(header["nu"]), int(header["rotview"])
        beta = -np.unwrap(np.array(header["angles"], np.float64)[:views]) - np.pi / 2
        step = math.copysign(2 * np.pi / views, beta[-1] - beta[0])
        first_angles = beta - step * np.arange(views)  # of each view
        lengths = [float(header[key]) for key in ("du", "dso", "ddo", "hu_factor")]
    if len(shape) != 3 or shape[:2] != (views, bins) or dtype.kind != "f":
        raise SkipFile(
            f"{[*shape]} values of {dtype}, not [{views}, {bins}, slices] of float32; *_flat_fan_projections.tif is "
            "the file of helix2fan that can be used"
        )
    require_size(views, bins, least=1)
    pitch, to_axis, to_detector, water = lengths
    if not (
        np.isfinite(lengths).all() and min(pitch, to_axis, water) > 0 and np.ptp(first_angles) <= _ROUGH * abs(step)
    ):
        raise SkipFile("distances in its description that are none, or angles that are no turn in equal steps")
    return FanTiff(
        path, views, bins, shape[2], float(first_angles.mean() % (2 * np.pi)), step, pitch, to_axis, to_detector, water
    )
