"""helix2fan: measured clinical scans, rebinned to a fan beam (see `qnmixer.engine.data.fan_tiff`).

The input of a network is some views of a slice. Its true image is FBP of all views, because everybody who has such a
file has them. The vendor's images have another thickness, centre and kernel, and helix2fan does not say which of them
belongs to a slice. So the truth has the noise of the full scan, also that of the chosen views.
"""

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from qnmixer.engine.data.fan_tiff import TIFF, FanTiff, open_fan
from qnmixer.engine.data.slices import FloatArray, SkipFile, summarise_skipped, usable
from qnmixer.errors import ConfigError, DataError
from qnmixer.files import path_of
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.fbp import fbp_of_slices
from qnmixer.physics.noise import attenuation_per_value
from qnmixer.physics.sparse import cached

_PARTS = "train", "val", "test"
_FIX = "copy it again, or move it elsewhere"
_SAME = 1e-3
"""Share of a length that counts as equal."""
_NEAR = 0.25
"""How far a view may be from its angle, in steps between measured views."""


class Helix2FanSource:
    """The slices of the scans in one folder: FBP of all views as images, and sinograms [V, D] at the scan's views.

    Of a scan's views those nearest to the angles of the geometry are taken, so `n_views` should divide their number.
    All are turned by the same angle, at most half a step between measured views, and the image is turned with them.
    Slices at the ends of a scan, whose turn is not complete, are left out. The images are computed once, and kept on
    the disk.

    Attributes:
        scan: keys of `geometry` that all files fix: none.
        attenuation_of_one: 1/mm of x = 1: each file has its own water.
        own_range: the data range of scores is 1, as of other slices in HU.
        patients: the file of each slice, because the slices of a file look alike.

    Args:
        part: train, val or test: the name of a folder.
        image_size: rows and columns.
        geometry: the scan.
        hu_max: HU of x = 1; air is −1000.
        root: folder with the folders train, val and test, with *_flat_fan_projections.tif of whole patients in each.

    Raises:
        DataError: tifffile is missing, or there is no folder.
        ConfigError: a file was measured with other rays than those of the geometry.
    """

    endless = False
    scan: ClassVar[dict[str, Any]] = {}
    attenuation_of_one = None
    own_range = False

    def __init__(self, part: str, image_size: int, geometry: FanBeamGeometry, hu_max: float, *, root: str) -> None:
        folder = path_of(root)
        if not any((folder / it).is_dir() for it in _PARTS):
            raise DataError(
                f"data.root={root} has no folder train, val or test: make them, with the *_flat_fan_projections.tif of "
                "whole patients in each"
            )
        self.geometry, self.hu_max = geometry, hu_max
        self.warnings: list[str] = []
        self._slices: list[tuple[FanTiff, npt.NDArray[np.intp], float, int]] = []
        skipped: list[tuple[str, str]] = []
        for path in sorted(it for it in (folder / part).glob("*") if it.suffix.lower() in TIFF and it.is_file()):
            try:
                fan = open_fan(path)
                middle = slice(max(0, fan.n_detectors // 2 - 8), fan.n_detectors // 2 + 8)  # all would be a gigabyte
                whole = np.flatnonzero(fan.values()[:, middle].any(axis=1).all(axis=0))  # lacking views are zeros
            except SkipFile as reason:
                skipped.append((path.name, str(reason)))
                continue
            views, turned = views_of(fan, geometry)
            self._slices += [(fan, views, turned, int(z)) for z in whole]
            if few := fan.n_slices - len(whole):
                self.warnings.append(f"{path}: {few} of {fan.n_slices} slices lack views, and are left out")
        if skipped:
            self.warnings.append(summarise_skipped(str(folder / part), skipped))
        self.patients = [str(fan.path) for fan, *_ in self._slices]

    def __len__(self) -> int:
        return len(self._slices)

    def load(self, index: int) -> FloatArray:
        """FBP of all views [S, S] in HU. Raises DataError if it cannot be used."""
        fan, _, turned, z = self._slices[index]
        with usable(fan.path, _FIX):
            attenuation = _images(fan.path, fan.path.stat().st_mtime_ns, fan.scan(self.geometry, turned))[z]
            if not np.isfinite(attenuation).all():
                raise SkipFile(f"NaN or infinite values in slice {z}")
        return np.asarray(attenuation * np.float32(1000 / fan.water) - np.float32(1000))

    def sinogram(self, index: int) -> FloatArray:
        """Sinogram [V, D], value × mm. Raises DataError if it cannot be used."""
        fan, views, _, z = self._slices[index]
        with usable(fan.path, _FIX):
            return fan.rows(z, views) / np.float32(attenuation_per_value(fan.water, self.hu_max))

    def name(self, index: int) -> str:
        """File and slice, as "scan_001_flat_fan_projections#5"."""
        fan, *_, z = self._slices[index]
        return f"{fan.path.stem}#{z}"


def views_of(fan: FanTiff, geometry: FanBeamGeometry) -> tuple[npt.NDArray[np.intp], float]:
    """Indices of a file's views at the angles of a scan, and by how many radians they are all turned.

    Raises ConfigError if the scan has other rays.
    """
    its, line = fan.scan(geometry), ""
    for key in ("beam", "n_detectors", "detector_pitch", "detector_offset", "source_to_axis", "axis_to_detector"):
        measured, ours = getattr(its, key), getattr(geometry, key)
        if ours != measured and not (isinstance(measured, float) and abs(ours - measured) <= _SAME * abs(measured)):
            line += f" geometry.{key}={measured:.8g}" if isinstance(measured, float) else f" geometry.{key}={measured}"
    if line:
        raise ConfigError(f"{fan.path} was measured with other rays than those of the config: give{line}")
    _, turned = fan.nearest(geometry.angles()[:1])
    views, left = fan.nearest(geometry.angles() + turned)
    if (far := np.abs(left)).max() > _NEAR * 2 * np.pi / len(fan.angles):
        j = int(far.argmax())
        raise ConfigError(
            f"view {j} of geometry, at {np.degrees(geometry.angles()[j]):.4g}°, is {np.degrees(far[j]):.2g}° from the "
            f"nearest of the {len(fan.angles)} views of {fan.path}: give a divisor of that as geometry.n_views"
        )
    return views, float(turned[0])


@cache
def _images(path: Path, written: int, scan: FanBeamGeometry) -> FloatArray:
    """FBP [Z, S, S] in 1/mm of all views, and air where not all of them see. Raises SkipFile.

    Args:
        path: of the file.
        written: when it was.
        scan: rays of all its views.
    """

    def build() -> list[FloatArray]:
        images = fbp_of_slices(open_fan(path).values(), scan, "hann")  # helix2fan's default
        axis = (np.arange(scan.image_size) - (scan.image_size - 1) / 2) * scan.pixel_size
        return [np.where(np.hypot(axis, axis[:, None]) < scan.ray_distances().max(), images, 0)]

    (found,) = cached(f"true images of {path} ({written})", scan, build)
    return found
