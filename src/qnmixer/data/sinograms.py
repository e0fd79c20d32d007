"""Files of measured sinograms, −log of transmission: .npy, .mat of MATLAB and .tif of helix2fan."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Gt

from qnmixer.data.fan_tiff import TIFF, open_fan
from qnmixer.data.numpy_files import open_stack, read_frame
from qnmixer.data.regrid import FloatList, regrid_scan
from qnmixer.data.slices import SkipFile, Slice, SliceInfo
from qnmixer.errors import DataError, first_line
from qnmixer.installed import optional
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.noise import attenuation_per_value
from qnmixer.physics.units import FloatArray

SCANS = (".npy", ".mat", *TIFF)
_LARGEST_ANGLE = 1e4  # radians; beyond it, an angle is no angle


@dataclass(frozen=True)
class SinogramFile:
    """An open file of sinograms."""

    n_scans: int
    scanner: FanBeamGeometry  # the rays of its views and bins
    angles: FloatList  # of its views, radians
    decode: Callable[[int], FloatArray]  # a sinogram [v, d]. Raises SkipFile
    water: float | None = None  # attenuation in 1/mm that the file gives


def open_sinograms(path: Path, geometry: FanBeamGeometry, of_npy: FanBeamGeometry | None = None) -> SinogramFile:
    """Open a file whose sinograms are for the image of a geometry.

    `of_npy`: the rays of a .npy, which does not give them; None: those of the geometry. Raises SkipFile or DataError
    for a file that cannot be used.
    """
    ending = path.suffix.lower()
    if ending == ".mat":
        of_mat, scanner, angles = read_mat(path, geometry)
        return SinogramFile(1, scanner, angles, [of_mat].__getitem__)
    if ending in TIFF:
        fan = open_fan(path)
        start, turned = fan.nearest(geometry.angles()[0])
        views = np.roll(np.arange(fan.n_views), -start)
        angles = geometry.angles()[0] + turned + fan.step * np.arange(fan.n_views)
        return SinogramFile(fan.n_slices, fan.scan(geometry), angles, partial(fan.rows, views=views), fan.water)
    scanner = of_npy or geometry
    return SinogramFile(len(open_stack(path)), scanner, scanner.angles(), partial(read_frame, path))


class SinogramReader:
    """Decodes measured sinograms for training without truth, each as [V, D] of the geometry, in value × mm.

    Args:
        geometry: the scan of the run. The files are regridded to it, as by `reconstruct`; a .npy must have its views
            and bins.
        hu_max: HU of x = 1.
        unit: attenuation (−log of transmission) or value (value × mm).
        water_attenuation: 1/mm, converts attenuation to HU; a .tif gives its own.
    """

    kind = "sinograms"
    wanted = "measured sinograms [views, bins] or [N, views, bins]: .npy, .mat or .tif"

    def __init__(
        self,
        geometry: FanBeamGeometry,
        hu_max: float,
        unit: Literal["attenuation", "value"] = "attenuation",
        water_attenuation: Annotated[float, Gt(0)] = 0.0192,
    ) -> None:
        self.geometry, self.hu_max, self.unit, self.water = geometry, hu_max, unit, water_attenuation

    def read(self, root: Path, path: str) -> Iterator[Slice]:
        """The sinograms of one file. Raises SkipFile for a file, or after the last for the sinograms, of no use."""
        if not path.lower().endswith(SCANS):
            raise SkipFile("not .npy, .mat or .tif")
        shape, skipped = (self.geometry.n_views, self.geometry.n_detectors), list[tuple[str, str]]()
        if path.lower().endswith(".npy") and (of_file := open_stack(root / path).shape[1:]) != shape:
            raise SkipFile(f"sinograms of {[*of_file]}, not {[*shape]}, as geometry.n_views and n_detectors say")
        try:
            file = open_sinograms(root / path, self.geometry)
        except DataError as error:
            raise SkipFile(str(error)) from error
        for k in range(file.n_scans):
            info = SliceInfo(path, k, file.n_scans, "", path, float(k))
            try:
                yield Slice(info, self._of_run(file, k))
            except (SkipFile, DataError) as reason:
                skipped.append((info.name, str(reason)))
        if skipped:
            raise SkipFile("unusable sinograms", skipped)

    def _of_run(self, file: SinogramFile, k: int) -> FloatArray:
        """Sinogram [V, D] of the run's rays, in value × mm."""
        y, missing = regrid_scan(file.decode(k), file.angles, file.scanner, self.geometry, "the sinogram")
        if missing.any():  # what is interpolated would be trained on as if it were measured
            raise SkipFile(f"{missing.sum()} of its {len(missing)} views are missing")
        if self.unit == "attenuation":
            y = y / np.float32(attenuation_per_value(file.water or self.water, self.hu_max))
        require_line_integrals(y, self.geometry)
        return y


def require_line_integrals(y: FloatArray, geometry: FanBeamGeometry) -> None:
    """Raise SkipFile for values [V, D], in value × mm, that no object in the field has: counts, or transmissions.

    This needs no product A x. One such product for a whole folder finds the rest: `qnmixer.measurement.pairs`.
    """
    bins, most = y.shape[1], 2 * geometry.field_of_view
    if (largest := float(y.max())) > most:
        raise SkipFile(f"line integrals to {largest:.4g} value × mm, and those of a field full of x = 2 are {most:g}")
    left, middle, right = (
        float(y[:, cut].mean()) for cut in np.s_[: bins // 16 or 1, bins // 4 : 3 * bins // 4, -bins // 16 :]
    )
    if min(left, right) > middle:
        raise SkipFile("less attenuation in the middle of the detector than at both ends: is it transmission?")


def read_mat(path: Path, geometry: FanBeamGeometry) -> tuple[FloatArray, FanBeamGeometry, FloatList]:
    """The sinogram [v, d] (−log of transmission), rays and angles of a MATLAB file in the form of the Helsinki scans.

    That is a struct with `sinogram` and `parameters` (angles in degrees, distances in mm, pixelSizePost). HelTomo reads
    this form, and the Helsinki tomography challenge 2022 publishes it. The angles are those of ASTRA's `fanflat`.

    Raises:
        DataError: the file has another form.
        NotInstalled: there is no scipy.
    """
    loadmat = optional("scipy.io", "mat", str(path)).loadmat
    try:
        content: dict[str, Any] = loadmat(path, simplify_cells=True)
        struct = next(v for v in content.values() if isinstance(v, dict) and {"sinogram", "parameters"} <= v.keys())
        sinogram, parameters = np.asarray(struct["sinogram"], np.float32), struct["parameters"]
        angles = np.radians(np.atleast_1d(np.asarray(parameters["angles"], np.float64)))
        to_axis, to_detector = (float(parameters[f"distanceSource{end}"]) for end in ("Origin", "Detector"))
        if sinogram.ndim != 2 or angles.shape != sinogram.shape[:1] or not (np.abs(angles) < _LARGEST_ANGLE).all():
            raise ValueError(f"sinogram {list(sinogram.shape)} with {len(angles)} angles")
        if (unit := parameters.get("distanceUnit", "mm")) != "mm":
            raise ValueError(f"distanceUnit {unit}")
        scanner = replace(
            geometry, beam="fan_flat", source_to_axis=to_axis, axis_to_detector=to_detector - to_axis,
            n_detectors=sinogram.shape[1], detector_pitch=float(parameters["pixelSizePost"]), detector_offset=0.0,
            n_views=len(angles),
        )  # fmt: skip
    except Exception as error:  # bytes of another format can make scipy raise anything
        raise DataError(
            f"{path} is no scan ({first_line(repr(error))}): give a struct with sinogram [views, bins] and parameters "
            "(angles, pixelSizePost, distanceSourceOrigin, distanceSourceDetector, in mm), or save it as .npy"
        ) from error
    return sinogram, scanner, angles
