"""`.npy` files in HU: single slices [H, W] or stacks [N, H, W]."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qnmixer.data.slices import LEAST_SIDE, OpenFile, SkipFile, Slice, SliceInfo, reading, require_size
from qnmixer.physics.units import FloatArray


def open_stack(path: Path) -> np.ndarray[Any, Any]:
    """Memory-map a `.npy` file as [N, H, W]. Raises SkipFile if it is no array of numbers of such a shape."""
    with reading("not a whole .npy array of numbers"):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise SkipFile("an .npz archive; save its slices as .npy")
    if array.dtype.kind not in "iuf" or array.ndim not in (2, 3) or 0 in array.shape:
        raise SkipFile(f"not slices of numbers but {array.dtype} {list(array.shape)}")
    return array[None] if array.ndim == 2 else array


def read_frame(path: Path, frame: int) -> FloatArray:
    """Slice [H, W] of a file that `open_stack` accepts. Raises SkipFile if the file has changed since.

    The file is mapped for this slice only, because all pages read through a map count as memory of the process.
    """
    return np.array(open_stack(path)[frame], np.float32)


class NumpyReader:
    """Decodes NumPy files."""

    kind = "numpy"
    wanted = ".npy slices in HU"
    endings = (".npy",)
    magic = b"\x93NUMPY"

    def open(self, path: Path) -> OpenFile:
        """Open one file. Raises SkipFile if it has no slices, or if they are too small or too large."""
        shape = open_stack(path).shape
        if shape[2] < LEAST_SIDE <= min(shape[:2]):
            raise SkipFile(f"shape {[*shape]}, as [H, W, N]; numpy.moveaxis(array, -1, 0) turns it to [N, H, W]")
        require_size(*shape[1:])
        return OpenFile(shape[0], partial(read_frame, path))

    def read(self, root: Path, path: str) -> Iterator[Slice]:
        """Slices of one file. `patient` is empty, so the folder decides. Raises SkipFile if the file has none."""
        if not path.lower().endswith((".npy", ".npz")):
            raise SkipFile("not .npy")
        file = self.open(root / path)
        series = path.rpartition("/")[0] if file.n_frames == 1 else path
        for frame in range(file.n_frames):
            yield Slice(SliceInfo(path, frame, file.n_frames, "", series, float(frame)), file.decode(frame))
