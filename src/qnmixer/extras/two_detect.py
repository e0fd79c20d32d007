"""2DeteCT: measured fan-beam CT of mixed objects in TIFF (Kiss et al., Scientific Data 2023).

Sinograms are converted to line integrals like in the authors' script, which made their reference images.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Gt, Le

from qnmixer.data.dataset import Scaling
from qnmixer.data.slices import SkipFile, reading, summarise_skipped
from qnmixer.errors import DataError
from qnmixer.extras.pairs import views_of
from qnmixer.files import path_of
from qnmixer.installed import optional
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.units import FloatArray

_PARTS = {"train": range(1, 3931), "val": range(3931, 4481), "test": range(4531, 5001)}
"""Slices of the benchmark's splits, by whole samples; 4481 to 4530 are in none."""
_MOVED = range(1, 2831), range(5521, 5871)  # slices whose detector was shifted by one (binned) bin
_VIEWS, _RAW_BINS, _SIZE = 3600, 1912, 1024
_RAW = "sinogram.tif", "dark.tif", "flat1.tif", "flat2.tif"
_REFERENCE = "reconstruction.tif"
_OTHER_SIZE = "files of another size than those of 2DeteCT"
_PIXEL = 0.113797  # millimetres of the references, whose values are attenuation per pixel
_LEAST = 1e-6  # the transmission of a ray without any light


class TwoDetectSource:
    """One split of the set: references of mode 2 as images, and sinograms [V, 956] of a mode at the scan's views.

    Files are read when a slice is used. Of a sinogram only the scan's views are read, if the file is not compressed.

    Args:
        part: train, val or test, as in the benchmark.
        geometry: the scan.
        hu_max: HU of x = 1; air is −1000.
        root: folder of slice00001/mode1/sinogram.tif and mode2/reconstruction.tif, at most two folders down. The
            references may be in another folder below it than the sinograms.
        mode: of the sinograms: 1 low dose, 2 clean, 3 beam hardening; references always have mode 2.
        max_attenuation: 1/mm of x = 1, which is a guess: compare with your references.

    Raises:
        DataError: tifffile is missing, or there is no slice.
        ConfigError: the scan has views that were not measured.
    """

    scan: ClassVar[dict[str, Any]] = {
        "beam": "fan_flat", "n_detectors": _RAW_BINS // 2, "detector_pitch": 0.1496, "detector_offset": 0.0,
        "source_to_axis": 431.019989, "axis_to_detector": 97.980499, "field_of_view": 116.528,
    }  # fmt: skip

    def __init__(
        self,
        part: str,
        geometry: FanBeamGeometry,
        hu_max: float,
        *,
        root: str,
        mode: Annotated[int, Ge(1), Le(3)] = 2,
        max_attenuation: Annotated[float, Gt(0)] = 0.05,
    ) -> None:
        optional("tifffile", "two_detect")
        self.max_attenuation = max_attenuation
        self.scaling = Scaling(-1000.0, hu_max + 1000.0)
        self._views = views_of(geometry, 0.0, 2 * np.pi / _VIEWS, _VIEWS, "two_detect")
        self._files: dict[int, dict[str, Path]] = {}
        folders, skipped = _folders(path_of(root)), list[tuple[str, str]]()
        if not folders:
            raise DataError(f"data.root={root} has no folder slice00001 or the like: unzip 2DeteCT there")
        places = {name: f"mode{mode}/{name}" for name in _RAW} | {_REFERENCE: f"mode2/{_REFERENCE}"}
        for number in sorted(folders.keys() & {*_PARTS[part]}):
            candidates = {name: [folder / place for folder in folders[number]] for name, place in places.items()}
            files = {name: path for name, paths in candidates.items() for path in paths if path.is_file()}
            if missing := [place for name, place in places.items() if name not in files]:
                skipped.append((f"slice{number:05d}", f"without {missing[0]}"))
            else:
                self._files[number] = files
        self._numbers = [*self._files]
        self.warnings = [summarise_skipped(str(root), skipped)] if skipped else []

    def __len__(self) -> int:
        return len(self._numbers)

    def load(self, index: int) -> FloatArray:
        """Reference [1024, 1024] with HU = −1000 + (hu_max + 1000)·x. Raises SkipFile if it cannot be used."""
        with reading(_OTHER_SIZE):
            attenuation = _reference(_read(self._files[self._numbers[index]][_REFERENCE]))
        return np.float32(self.scaling.offset) + attenuation * np.float32(self.scaling.scale / self.max_attenuation)

    def sinogram(self, index: int) -> FloatArray:
        """Sinogram [V, 956], value × mm. Raises SkipFile if it cannot be used."""
        moved = any(self._numbers[index] in slices for slices in _MOVED)
        files = self._files[self._numbers[index]]
        with reading(_OTHER_SIZE):
            sinogram, dark, *flats = (_read(files[name]) for name in _RAW)
            p = line_integrals(sinogram, dark, flats, self._views, moved=moved)
        return p / np.float32(self.max_attenuation)

    def name(self, index: int) -> str:
        """The folder of the slice, as slice00001."""
        return f"slice{self._numbers[index]:05d}"


def _folders(root: Path) -> dict[int, list[Path]]:
    """The folders of each slice, by its number. A slice has several if archives were unpacked side by side."""
    folders: dict[int, list[Path]] = {}
    for level in ("", "*/", "*/*/"):
        for folder in sorted(root.glob(f"{level}slice[0-9][0-9][0-9][0-9][0-9]")):
            folders.setdefault(int(folder.name[-5:]), []).append(folder)
    return folders


def _read(path: Path) -> np.ndarray[Any, Any]:
    """The values of a TIFF, mapped if they are not compressed. Raises SkipFile if it is not one."""
    tifffile = optional("tifffile", "two_detect")
    with reading(f"an unreadable or truncated {path.name}"):
        try:
            return tifffile.memmap(path, mode="r")
        except ValueError:
            return np.asarray(tifffile.imread(path))


def _binned(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Add neighbouring pixels of the detector in pairs, as the authors intend: [..., 1912] → [..., 956]."""
    return values.reshape(*values.shape[:-1], -1, 2).sum(axis=-1, dtype=np.float64)


def line_integrals(
    sinogram: np.ndarray[Any, Any],  # counts [3601, 1912]; the last view repeats the first
    dark: np.ndarray[Any, Any],  # counts without X-rays [1912]
    flats: Sequence[np.ndarray[Any, Any]],  # counts without an object [1912], before and after
    views: Sequence[int],  # indices into the 3600 views
    *,
    moved: bool,  # whether the detector was shifted by one bin in this slice
) -> FloatArray:
    """−log of transmission [V, 956] of some views of raw counts.

    Raises SkipFile for a bin of the detector without light, and ValueError or IndexError for another size.
    """
    dark_counts, *flat_counts = (_binned(counts.reshape(_RAW_BINS)) for counts in (dark, *flats))
    light = np.mean(flat_counts, axis=0) - dark_counts
    if light.min() <= 0:
        raise SkipFile("detector bins without light in its flat fields")
    transmission = (_binned(sinogram[[*views]]) - dark_counts) / light
    if moved:
        # The shift leaves no value for the last bin: its two neighbours are continued.
        last_bin = 2 * transmission[:, -1:] - transmission[:, -2:-1]
        transmission = np.concatenate([transmission[:, 1:], last_bin], axis=1)
    return -np.log(np.maximum(transmission, _LEAST)).astype(np.float32)


def _reference(values: np.ndarray[Any, Any]) -> FloatArray:
    """A reference in 1/mm on the pixels of the scan. The set's own pixels are shifted by one, down and to the right."""
    moved = np.zeros((_SIZE, _SIZE), np.float32)
    moved[:-1, :-1] = values[1:, 1:] / np.float32(_PIXEL)
    return moved
