"""Drawn acrylic discs with holes, as those of the Helsinki Tomography Challenge 2022: endless; no files.

A disc is a function of (seed, part, index) alone. Its holes are round, polygons and slits, the cells between bars, or
shapes that lines cut. Shapes are signed distances in mm, below 0 inside, so edges get partial values.
"""

import math
import zlib
from functools import lru_cache, partial
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from qnmixer.data.phantoms.phantoms import halve
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.units import AIR, FloatArray

_TRIES = 8  # places that are tried for a hole, before it is left out


class _Drawing:
    """Signed distances [n, n] to random shapes, from the coordinates of the pixels in mm."""

    def __init__(self, n: int, width: float, rng: np.random.Generator) -> None:
        axis = (((np.arange(n) + 0.5) / n - 0.5) * width).astype(np.float32)
        self.x, self.y, self.rng = axis[None, :], axis[:, None], rng

    def uniform(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def circle(self, x: float, y: float, radius: float) -> FloatArray:
        away = np.hypot(self.x - np.float32(x), self.y - np.float32(y)).astype(np.float32, copy=False)
        return away - np.float32(radius)

    def half_plane(self, x: float, y: float, angle: float) -> FloatArray:
        """Its edge is a line through (x, y), and its normal points to an angle."""
        c, s = np.float32(np.cos(angle)), np.float32(np.sin(angle))
        return c * (self.x - np.float32(x)) + s * (self.y - np.float32(y))

    def common(self, distances: list[FloatArray], rounding: float) -> FloatArray:
        """What all shapes have in common, with corners of about this radius in mm."""
        scaled = [distance / rounding for distance in distances]
        largest: FloatArray = np.maximum.reduce(scaled)
        total: FloatArray = np.log(sum(np.exp(distance - largest) for distance in scaled))
        return np.float32(rounding) * (largest + total)

    def hole(self, x: float, y: float, radius: float) -> FloatArray:
        """A circle, an ellipse, a polygon or a slit within a circle."""
        kind, turn, rounding = self.rng.random(), self.uniform(0, 2 * np.pi), self.uniform(0.05, 0.8)
        if kind < 0.25:
            return self.circle(x, y, radius)
        if kind < 0.4:
            u, v = self.half_plane(x, y, turn), self.half_plane(x, y, turn + np.pi / 2)
            share = self.uniform(0.3, 1)
            return (np.hypot(u, v / share) - np.float32(radius)) * share
        if kind < 0.6:  # a slit, or a rectangle
            width = self.uniform(0.12, 0.9) * radius
            half = width, math.sqrt(radius**2 - width**2)
            sides = [(turn + k * np.pi / 2, half[k % 2]) for k in range(4)]
        else:
            n = int(self.rng.integers(3, 8))
            sides = [
                (turn + 2 * np.pi * (k + self.uniform(-0.25, 0.25)) / n, radius * np.cos(np.pi / n)) for k in range(n)
            ]
        planes = [self.half_plane(x + d * np.cos(angle), y + d * np.sin(angle), angle) for angle, d in sides]
        return self.common([*planes, self.circle(x, y, radius)], rounding)

    def holes(self, x: float, y: float, radius: float, n: int) -> list[FloatArray]:
        """At most n holes in a circle. In a fifth of the discs they may touch."""
        placed, apart, gap = list[tuple[float, float, float]](), self.rng.random() < 0.8, self.uniform(0.8, 3)
        largest = self.uniform(3, 0.8 * radius)
        for _ in range(n * _TRIES):
            r, angle = float(self.uniform(1.2, largest)), self.uniform(0, 2 * np.pi)
            away = (radius - r) * np.sqrt(self.rng.random())
            px, py = x + away * np.cos(angle), y + away * np.sin(angle)
            if len(placed) < n and not (apart and any(np.hypot(px - a, py - b) < r + c + gap for a, b, c in placed)):
                placed.append((px, py, r))
        return [self.hole(*circle) for circle in placed]

    def cells(self, x: float, y: float, radius: float, n: int) -> list[FloatArray]:
        """The Voronoi cells of n points in a circle, with bars of one width between them. Some may be left out."""
        half_bar, rounding, share = self.uniform(0.5, 2.2), self.uniform(0.1, 1.5), self.uniform(0.7, 1.3)
        points = list[tuple[float, float]]()
        for _ in range(n * _TRIES):
            angle, away = self.uniform(0, 2 * np.pi), radius * np.sqrt(self.rng.random())
            px, py = x + away * np.cos(angle), y + away * np.sin(angle)
            if len(points) < n and all(np.hypot(px - a, py - b) > radius / np.sqrt(n) for a, b in points):
                points.append((px, py))
        shapes = []
        for a, b in points:
            others = [point for point in points if point != (a, b)]
            planes = [self.half_plane((a + c) / 2, (b + d) / 2, np.arctan2(d - b, c - a)) + half_bar for c, d in others]
            if self.rng.random() < share:
                shapes.append(self.common([*planes, self.circle(x, y, radius)], rounding))
        return shapes

    def cut(self, shapes: list[FloatArray], x: float, y: float, n: int) -> list[FloatArray]:
        """Shapes without n bars that pass near a point."""
        bars = list[FloatArray]()
        for _ in range(n):
            turn, right, down = self.uniform(0, 2 * np.pi), self.uniform(-14, 14), self.uniform(-14, 14)
            bars.append(np.float32(self.uniform(0.5, 2.2)) - np.abs(self.half_plane(x + right, y + down, turn)))
        return [np.maximum.reduce([shape, *bars]) for shape in shapes]


def disc(n: int, width: float, radius: float, shift: float, rng: np.random.Generator) -> FloatArray:
    """One drawn disc: the share of acrylic of each pixel, [n, n], of an image of this width. Lengths are in mm."""
    drawing = _Drawing(n, width, rng)
    away, angle, radius = shift * np.sqrt(rng.random()), rng.uniform(0, 2 * np.pi), radius * rng.uniform(0.99, 1.01)
    x, y = away * np.cos(angle), away * np.sin(angle)
    inner, kind = radius - rng.uniform(2, 9), rng.random()
    if kind < 0.4:
        shapes = drawing.holes(x, y, inner, int(rng.integers(1, 16)))
    elif kind < 0.75:
        shapes = drawing.cells(x, y, inner, int(rng.integers(3, 15)))
    else:
        shapes = drawing.holes(x, y, inner, int(rng.integers(1, 5))) if kind < 0.9 else [drawing.circle(x, y, inner)]
        shapes = drawing.cut(shapes, x, y, int(rng.integers(1, 6)))
    pixel = np.float32(width / n)
    body, holes = (
        np.clip(0.5 - distance / pixel, 0, 1)
        for distance in (
            drawing.circle(x, y, radius),
            np.minimum.reduce([np.full((n, n), np.inf, np.float32), *shapes]),
        )
    )
    return body * (1 - holes)


class DiscSource:
    """Drawn discs of one part as a source of slices. `load` takes any index ≥ 0; `len` is the length of one epoch.

    Args:
        part: train, val or test.
        image_size: rows and columns.
        geometry: the scan, whose image is so many mm wide.
        n_train: discs that count as one epoch; every epoch has new ones.
        n_val: validation discs, always the same.
        n_test: test discs, always the same.
        radius: of a disc in mm, ± 1 %.
        shift: the largest distance of its centre from the axis of rotation, in mm.
        hu: of acrylic.
        spread: the largest change of its attenuation from disc to disc, as a share.
        seed: of all discs.
        fine: draw the same discs with twice as many rows and columns.
    """

    endless = True

    def __init__(
        self,
        part: str,
        image_size: int,
        geometry: FanBeamGeometry,
        *,
        n_train: Annotated[int, Ge(1), Le(10**9)],
        n_val: Annotated[int, Ge(1), Le(10**7)],
        n_test: Annotated[int, Ge(1), Le(10**7)],
        radius: Annotated[float, Gt(0)],
        shift: Annotated[float, Ge(0)],
        hu: Annotated[float, Gt(-1000)],
        spread: Annotated[float, Ge(0), Lt(1)],
        seed: Annotated[int, Ge(0), Le(2**32 - 1)],
        fine: bool = False,
    ) -> None:
        self.part, self.length = part, {"train": n_train, "val": n_val, "test": n_test}[part]
        self.fine, self.hu = fine, hu
        self._drawn = partial(_drawn, 2 * image_size, geometry.field_of_view, radius, shift, spread, seed, part)

    def __len__(self) -> int:
        return self.length

    def load(self, index: int) -> FloatArray:
        """Disc [S, S] of this number in HU, around it air; with `fine` [2S, 2S]."""
        share = self._drawn(index)
        return AIR + np.float32(self.hu - AIR) * (share if self.fine else halve(share))

    def name(self, index: int) -> str:
        """Name for tables, as `test-disc-00012`."""
        return f"{self.part}-disc-{index:05d}"


@lru_cache(maxsize=1)  # of both grids
def _drawn(
    n: int, width: float, radius: float, shift: float, spread: float, seed: int, part: str, index: int
) -> FloatArray:
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(part.encode()), index]))
    return np.float32(1 + rng.uniform(-spread, spread)) * disc(n, width, radius, shift, rng)
