"""Slices: a class with __len__ and load(index) → [H, W] in HU (air −1000, water 0). conf/data/bodies.yaml chooses it.

Here they are drawn, so that a first run needs no file. Your own files, with a key `folder` in the config:

    class Files:
        def __init__(self, part: str, folder: str) -> None:
            self.files = sorted(Path(folder, part).glob("*.npy"))  # folders train, val and test

        def __len__(self) -> int:
            return len(self.files)

        def load(self, index: int) -> np.ndarray:
            return np.load(self.files[index])  # of one .h5: h5py.File(self.file)["hu"][index], in load; pip h5py

Measured sinograms come with the slices: add `sinogram(self, index)` → [V, D], line integrals in mm of the image that
the network sees, (HU + 1000) / (data.hu_max + 1000). Describe the scanner in the experiment, by geometry.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

PARTS = {"train": 0, "val": 1, "test": 2}


class Bodies:
    """Ellipses in a body of water, another at each index. No slice is in two parts.

    Args:
        part: train, val or test.
        image_size: H and W. The run gives it, since the class asks for it; else slices are resampled.
        n_train: slices for training.
        n_held_out: slices for validation, and as many for the test.
    """

    def __init__(self, part: str, image_size: int, n_train: int, n_held_out: int) -> None:
        self.part, self.size = part, image_size
        self.n = n_train if part == "train" else n_held_out

    def __len__(self) -> int:
        return self.n

    def load(self, index: int) -> NDArray[np.float32]:
        """Slice [H, W] in HU."""
        rng = np.random.default_rng([PARTS[self.part], index])
        hu = np.full((self.size, self.size), -1000.0)
        body = self._ellipse(np.zeros(2), rng.uniform(0.6, 0.9, 2), 0)
        hu[body] = rng.uniform(-50, 50)
        for _ in range(8):
            organ = self._ellipse(rng.uniform(-0.5, 0.5, 2), rng.uniform(0.05, 0.3, 2), rng.uniform(0, np.pi))
            hu[organ & body] += rng.uniform(-150, 250)
        return hu.astype(np.float32)

    def _ellipse(self, center: NDArray[Any], axes: NDArray[Any], angle: float) -> NDArray[np.bool_]:
        """The pixels [H, W] of an ellipse. Center [x, y] and half axes [2] are in units of half the image."""
        grid = np.linspace(-1, 1, self.size)
        x, y = grid[None] - center[0], grid[:, None] - center[1]
        along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
        return (along / axes[0]) ** 2 + (across / axes[1]) ** 2 < 1
