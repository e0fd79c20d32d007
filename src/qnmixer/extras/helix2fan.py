"""helix2fan: measured clinical scans, rebinned to a fan beam (see `qnmixer.data.fan_tiff`).

The input of a network is some views of a slice. Its true image is FBP of all views, because everybody who has such a
file has them. The vendor's images have another thickness, centre and kernel, and helix2fan does not say which of them
belongs to a slice. So the truth has the noise of the full scan, also that of the chosen views.
"""

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from qnmixer.data.fan_tiff import TIFF, FanTiff, open_fan
from qnmixer.data.slices import SkipFile, summarise_skipped
from qnmixer.errors import ConfigError, DataError
from qnmixer.extras.pairs import views_of
from qnmixer.files import path_of
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.fbp import fbp_of_slices
from qnmixer.physics.noise import attenuation_per_value
from qnmixer.physics.sparse import cached
from qnmixer.physics.units import FloatArray

_PARTS = "train", "val", "test"
_TOLERANCE = 1e-3  # share of a length that counts as equal


class Helix2FanSource:
    """The slices of the scans in one folder: FBP of all views as images, and sinograms [V, D] at the scan's views.

    Each n-th of a scan's views is taken, so `n_views` of the geometry divides their number. All are turned by the same
    angle, at most half a step between measured views, and the image is turned with them. Slices at the ends of a scan,
    whose turn is not complete, are left out. The images are computed once, and kept on the disk.

    Args:
        part: train, val or test: the name of a folder.
        geometry: the scan.
        hu_max: HU of x = 1; air is −1000.
        root: folder with the folders train, val and test, with *_flat_fan_projections.tif of whole patients in each.

    Raises:
        DataError: tifffile is missing, or there is no folder.
        ConfigError: a file was measured with other rays than those of the geometry.
    """

    scan: ClassVar[dict[str, Any]] = {}  # keys of `geometry` that all files fix: none
    attenuation_of_one = None  # each file has its own water
    own_range = False  # the data range of scores is 1, as of other slices in HU

    def __init__(self, part: str, geometry: FanBeamGeometry, hu_max: float, *, root: str) -> None:
        folder = path_of(root)
        if not any((folder / name).is_dir() for name in _PARTS):
            raise DataError(
                f"data.root={root} has no folder train, val or test: make them, with the *_flat_fan_projections.tif of "
                "whole patients in each"
            )
        self.geometry, self.hu_max = geometry, hu_max
        self._slices: list[tuple[FanTiff, list[int], float, int]] = []
        skipped: list[tuple[str, str]] = []
        for path in sorted(
            path for path in (folder / part).glob("*") if path.suffix.lower() in TIFF and path.is_file()
        ):
            try:
                fan = open_fan(path)
                middle = slice(max(0, fan.n_detectors // 2 - 8), fan.n_detectors // 2 + 8)  # all would be a gigabyte
                numbers = np.flatnonzero(fan.values()[:, middle].any(axis=1).all(axis=0))  # lacking views are zeros
            except SkipFile as reason:
                skipped.append((path.name, str(reason)))
                continue
            _require_same_rays(fan, geometry)
            turned = fan.nearest(geometry.angles()[0])[1]
            views = views_of(geometry, fan.first_angle - turned, fan.step, fan.n_views, "helix2fan")
            self._slices += [(fan, views, turned, int(z)) for z in numbers]
        self.warnings = [summarise_skipped(str(folder / part), skipped)] if skipped else []
        self.patients = [str(fan.path) for fan, *_ in self._slices]  # the slices of a file look alike

    def __len__(self) -> int:
        return len(self._slices)

    def load(self, index: int) -> FloatArray:
        """FBP of all views [S, S] in HU. Raises SkipFile if it cannot be used."""
        fan, _, turned, z = self._slices[index]
        attenuation = _images(fan.path, fan.path.stat().st_mtime_ns, fan.scan(self.geometry, turned))[z]
        return np.asarray(attenuation * np.float32(1000 / fan.water) - np.float32(1000))

    def sinogram(self, index: int) -> FloatArray:
        """Sinogram [V, D], value × mm. Raises SkipFile if it cannot be used."""
        fan, views, _, z = self._slices[index]
        return fan.rows(z, np.array(views)) / np.float32(attenuation_per_value(fan.water, self.hu_max))

    def name(self, index: int) -> str:
        """File and slice, as "scan_001_flat_fan_projections#5"."""
        fan, *_, z = self._slices[index]
        return f"{fan.path.stem}#{z}"


def _require_same_rays(fan: FanTiff, geometry: FanBeamGeometry) -> None:
    """Raise ConfigError if a scan has other rays than those of a file. It says which to give."""
    scan, line = fan.scan(geometry), ""
    for key in ("beam", "n_detectors", "detector_pitch", "detector_offset", "source_to_axis", "axis_to_detector"):
        measured, setting = getattr(scan, key), getattr(geometry, key)
        if isinstance(measured, float):
            if abs(setting - measured) > _TOLERANCE * abs(measured):
                line += f" geometry.{key}={measured:.8g}"
        elif setting != measured:
            line += f" geometry.{key}={measured}"
    if line:
        raise ConfigError(f"{fan.path} was measured with other rays than those of the config: give{line}")


@cache
def _images(path: Path, written: int, scan: FanBeamGeometry) -> FloatArray:
    """FBP [Z, S, S] in 1/mm of all views, and air where not all of them see. Raises SkipFile."""

    def build() -> list[FloatArray]:
        images = fbp_of_slices(open_fan(path).values(), scan, "hann")  # helix2fan's default
        axis = (np.arange(scan.image_size) - (scan.image_size - 1) / 2) * scan.pixel_size
        return [np.where(np.hypot(axis, axis[:, None]) < scan.ray_distances().max(), images, 0)]

    (images,) = cached(f"true images of {path} ({written})", scan, build)
    return images
