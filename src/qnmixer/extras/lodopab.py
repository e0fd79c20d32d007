"""LoDoPaB-CT: chest CT and its low-dose observations in HDF5 (Leuschner et al., Scientific Data 2021)."""

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from qnmixer.data.dataset import Scaling
from qnmixer.data.slices import SkipFile, reading, usable
from qnmixer.extras.pairs import views_of
from qnmixer.files import path_of
from qnmixer.installed import optional
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.units import FloatArray

_NAMES = {"train": "train", "val": "validation", "test": "test"}
_IMAGES = {"train": 35820, "val": 3522, "test": 3553}  # the last file of images has more
_VIEWS, _BINS, _SIZE = 1000, 513, 362
_WATER, _AIR, _LARGEST = 20.0, 0.02, 81.35858  # attenuation in 1/m: x = (HU·(water − air)/1000 + water)/largest
_PER_HU = (_WATER - _AIR) / 1000
_MM = 1000.0  # millimetres in a metre: observations are line integrals of x over metres


class LodopabSource:
    """One split of the set: images in their own HU, and observations as sinograms [V, 513] of the scan's views.

    Files are opened for each sample only: a process that is started later must not inherit an open file.

    Args:
        part: train, val or test.
        geometry: the scan.
        root: folder of the unzipped files: observation_train_000.hdf5, ground_truth_train_000.hdf5, …
        sinograms: "measured" (the observations, with geometry=lodopab) or "simulated" (from the images, any scan and
            noise).

    Raises:
        DataError: h5py is missing, or a file has another layout.
        ConfigError: the scan has views that were not measured.
    """

    scan: ClassVar[dict[str, Any]] = {
        "beam": "parallel", "n_detectors": _BINS, "detector_pitch": 0.716755, "detector_offset": 0.0,
        "field_of_view": 260.0,
    }  # fmt: skip
    hu_max = 3071.0
    hu_scaling = (-_WATER / _PER_HU, _LARGEST / _PER_HU)  # HU = offset + scale · x: x = 0 is not quite −1000 HU
    attenuation_of_one = _LARGEST / 1000
    scaling = Scaling(*hu_scaling)

    def __init__(
        self,
        part: str,
        geometry: FanBeamGeometry,
        *,
        root: str,
        sinograms: Literal["measured", "simulated"] = "measured",
    ) -> None:
        self.root = path_of(root)
        self._views: list[int] = []
        if sinograms == "measured":  # the set's views start half a step after ODL's first angle, which is −π/2 here
            step = np.pi / _VIEWS
            self._views = views_of(geometry, step / 2 - np.pi / 2, step, _VIEWS, "lodopab")
        kind, shape = ("observation", (_VIEWS, _BINS)) if self._views else ("ground_truth", (_SIZE, _SIZE))
        files = sorted(self.root.glob(f"{kind}_{_NAMES[part]}_[0-9][0-9][0-9].hdf5"))
        places = [(path.name.removeprefix(kind), row) for path in files for row in range(_rows(path, shape))]
        self._places = places[: _IMAGES[part]]

    def __len__(self) -> int:
        return len(self._places)

    def load(self, index: int) -> FloatArray:
        """Image [362, 362] in HU. Raises SkipFile if it cannot be read."""
        return self.scaling.offset + self.scaling.scale * self._row("ground_truth", index)

    def sinogram(self, index: int) -> FloatArray:
        """The observation of an image, [V, 513], value × mm. Raises SkipFile if it cannot be read."""
        return self._row("observation", index)[self._views] * np.float32(_MM)

    def name(self, index: int) -> str:
        """File and row, as "test_012#5"."""
        end, row = self._places[index]
        return f"{end[1:].removesuffix('.hdf5')}#{row}"

    def _row(self, kind: str, index: int) -> FloatArray:
        end, row = self._places[index]
        path = self.root / f"{kind}{end}"
        h5py = optional("h5py", "lodopab")
        with reading(f"{path.name} is missing or damaged"), h5py.File(path, "r") as stream:
            return np.asarray(stream["data"][row], np.float32)


def _rows(path: Path, shape: tuple[int, int]) -> int:
    """The number of arrays of this shape in a file. Raises DataError for another layout."""
    h5py = optional("h5py", "lodopab")
    with usable(path, "unzip it again"), reading("no whole HDF5 file of LoDoPaB-CT"), h5py.File(path, "r") as stream:
        dimensions = stream["data"].shape
        if len(dimensions) != 3 or dimensions[1:] != shape:
            raise SkipFile(f"values {[*dimensions]} in `data`, not [n, {shape[0]}, {shape[1]}]")
        return int(dimensions[0])
