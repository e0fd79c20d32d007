"""Random phantoms in Hounsfield units: cross-sections that resemble a body, and plain ellipses. Endless; no files.

A phantom is a function of (seed, part, index) alone, so workers, ranks and epochs cannot change it. A body is painted
at twice the resolution. Then 2 × 2 pixels are averaged, so edges get partial values as in a scanner. Coordinates run
over [−1, 1], x to the right and y *down*.
"""

import zlib
from functools import partial
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from qnmixer.data.phantoms.bodies import body
from qnmixer.physics.units import AIR, FloatArray


def _scan(image: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Add the effects of a scanner to a picture [S, S]: slight blur, correlated noise, a round field of view."""
    blur = np.float32(rng.uniform(0.04, 0.25))
    image = _blur(image, blur)
    if rng.random() < 0.9:
        noise = _blur(rng.standard_normal(image.shape, dtype=np.float32), np.float32(rng.uniform(0.05, 0.25)))
        sigma = np.float32(np.exp(rng.uniform(np.log(4.0), np.log(45.0))))
        image += noise * sigma * (np.float32(0.25) + np.float32(0.75) * (image > -950))
    if rng.random() < 0.15:
        axis = (np.arange(len(image), dtype=np.float32) + 0.5) * (2.0 / len(image)) - 1.0
        image[axis[:, None] ** 2 + axis[None, :] ** 2 > rng.uniform(0.96, 1.0)] = AIR
    return np.clip(image, AIR, 3000.0, out=image)


def _blur(image: FloatArray, weight: np.float32) -> FloatArray:
    """Three-tap blur [w, 1 − 2w, w] along both axes; the border is repeated."""
    padded = np.pad(image, 1, mode="edge")
    centre = np.float32(1) - np.float32(2) * weight
    rows: FloatArray = centre * padded[1:-1] + weight * (padded[:-2] + padded[2:])
    return centre * rows[:, 1:-1] + weight * (rows[:, :-2] + rows[:, 2:])


def halve(image: FloatArray) -> FloatArray:
    """Mean of every 2 × 2 pixels; [2n, 2n] becomes [n, n]."""
    rows = image[0::2] + image[1::2]
    return np.float32(0.25) * (rows[:, 0::2] + rows[:, 1::2])


def phantom(
    size: int, *, seed: int, part: str, index: int, anatomy_share: float = 0.85, fine: bool = False
) -> FloatArray:
    """One random phantom [size, size] in HU. The first arguments are those of `qnmixer.phantom`.

    `anatomy_share`: probability that it resembles a body; the others are ellipses. With `fine` it is
    [2·size, 2·size]. Outlines then have the full resolution. Blur and noise of the scanner are equal in every 2 × 2
    pixels, whose mean is the phantom of `size`.
    """
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(part.encode()), index]))
    painted = body(size, rng, anatomy_share)
    averaged = halve(painted)
    image = _scan(averaged, rng)
    if fine:
        image = painted + np.repeat(np.repeat(image - averaged, 2, axis=0), 2, axis=1)
    image = np.rot90(image, k=int(rng.choice(4, p=[0.6, 0.15, 0.1, 0.15])))
    return np.ascontiguousarray(image[:, ::-1] if rng.random() < 0.3 else image)


class PhantomSource:
    """Phantoms of one part as a source of slices. `load` takes any index ≥ 0; `len` is the length of one epoch.

    Args:
        part: train, val or test.
        image_size: rows and columns.
        n_train: phantoms that count as one epoch; every epoch has new ones.
        n_val: validation phantoms, always the same.
        n_test: test phantoms, always the same.
        anatomy_share: share of the phantoms that resemble a body; the rest are ellipses.
        seed: of all phantoms.
        fine: paint the same phantoms with twice as many rows and columns.
    """

    endless = True

    def __init__(
        self,
        part: str,
        image_size: int,
        *,
        n_train: Annotated[int, Ge(1), Le(10**9)],
        n_val: Annotated[int, Ge(1), Le(10**7)],
        n_test: Annotated[int, Ge(1), Le(10**7)],
        anatomy_share: Annotated[float, Ge(0), Le(1)],
        seed: Annotated[int, Ge(0), Le(2**32 - 1)],
        fine: bool = False,
    ) -> None:
        self.part, self.length = part, {"train": n_train, "val": n_val, "test": n_test}[part]
        self._phantom = partial(phantom, image_size, seed=seed, part=part, anatomy_share=anatomy_share, fine=fine)

    def __len__(self) -> int:
        return self.length

    def load(self, index: int) -> FloatArray:
        """Phantom [S, S] of this number in HU; with `fine` [2S, 2S]."""
        return self._phantom(index=index)

    def name(self, index: int) -> str:
        """Name for tables, as `test-phantom-00012`."""
        return f"{self.part}-phantom-{index:05d}"
