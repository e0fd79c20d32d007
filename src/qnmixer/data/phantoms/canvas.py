"""A canvas in HU on which shapes are painted, in coordinates that a smooth random field bends."""

import numpy as np
import numpy.typing as npt

from qnmixer.physics.units import AIR, FloatArray

BoolArray = npt.NDArray[np.bool_]

# Standard deviation, along one axis, of a cubic B-spline sum with unit normal coefficients (mean over a cell).
_SPLINE_STD = 0.6924


def _refine(field: FloatArray) -> FloatArray:
    """Double the rows of a field by cubic B-spline subdivision; [n, m] becomes [2(n − 2), m]."""
    middle = field[1:-1]
    fine = np.empty((2 * len(middle), field.shape[1]), np.float32)
    fine[0::2] = np.float32(0.75) * middle + np.float32(0.125) * (field[:-2] + field[2:])
    fine[1::2] = np.float32(0.5) * (middle + field[2:])
    return fine


def smooth_field(rng: np.random.Generator, cells: int, size: int) -> FloatArray:
    """Random field [size, size] of mean 0 and standard deviation ≈ 1. Its features are about size/cells pixels wide.

    It needs additions only. A matrix product would start threads, which data workers must not do.
    """
    doublings = max(round(np.log2(size / cells)), 0)
    start = -(-size // 2**doublings) + 4
    field = rng.standard_normal((start, start), dtype=np.float32) * np.float32(1 / _SPLINE_STD**2)
    for _ in range(doublings):
        field = _refine(field)
    field = np.ascontiguousarray(field[:size].T)
    for _ in range(doublings):
        field = _refine(field)
    return field[:size]


class Canvas:
    """HU canvas [n, n] with the (bent, zoomed, tilted) coordinates in which shapes are painted."""

    def __init__(
        self, n: int, rng: np.random.Generator, *, zoom: float, tilt: float, shift: tuple[float, float], bend: float
    ) -> None:
        self.rng, self.n, self.zoom, self.shift = rng, n, zoom, shift
        self.hu = np.full((n, n), AIR, np.float32)
        axis = ((np.arange(n, dtype=np.float32) + 0.5) * (2.0 / n)) - 1.0
        self.axis = axis
        c, s = np.float32(np.cos(tilt) / zoom), np.float32(np.sin(tilt) / zoom)
        x, y = axis[None, :] - np.float32(shift[0]), axis[:, None] - np.float32(shift[1])
        self.x: FloatArray = c * x + s * y + np.float32(bend) * smooth_field(rng, 4, n)
        self.y: FloatArray = c * y - s * x + np.float32(bend) * smooth_field(rng, 4, n)
        self._cos, self._sin = float(np.cos(tilt)), float(np.sin(tilt))
        self._margin = 3.5 * bend  # the fields have standard deviation 1, and rarely reach 3.5
        self.wobbles = smooth_field(rng, 9, n)

    def uniform(self, low: float, high: float) -> float:
        """One number, uniform in [low, high)."""
        return float(self.rng.uniform(low, high))

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return bool(self.rng.random() < probability)

    def box(self, x: float, y: float, radius: float) -> tuple[slice, slice]:
        """Rows and columns that contain every point within radius of (x, y), bending included."""
        px = self.zoom * (self._cos * x - self._sin * y) + self.shift[0]
        py = self.zoom * (self._sin * x + self._cos * y) + self.shift[1]
        reach = self.zoom * (radius + self._margin)

        def span(centre: float) -> slice:
            low, high = (centre - reach + 1) * self.n / 2, (centre + reach + 1) * self.n / 2
            return slice(int(min(max(low, 0), self.n)), int(min(max(high + 1, 0), self.n)))

        return span(py), span(px)

    def ellipse(
        self,
        x: float,
        y: float,
        a: float,
        b: float,
        value: float,
        *,
        angle: float = 0.0,
        wobble: float = 0.0,
        square: float = 0.0,
        within: BoolArray | None = None,
    ) -> BoolArray:
        """Paint an ellipse of half axes a, b. `wobble` roughens its edge, `square` (0 … 1) makes it more like a box.

        Returns the painted pixels, [n, n].
        """
        # A superellipse |u|⁴ + |v|⁴ = 1, as `square` gives, reaches 2^¼ ≈ 1.19 times as far as the circle.
        box = self.box(x, y, max(a, b) * (1 + 0.25 * (square > 0)) * (1 + 1.5 * wobble))
        dx, dy = self.x[box] - np.float32(x), self.y[box] - np.float32(y)
        if angle:
            c, s = np.float32(np.cos(angle)), np.float32(np.sin(angle))
            dx, dy = c * dx + s * dy, c * dy - s * dx
        u, v = dx * np.float32(1 / a), dy * np.float32(1 / b)
        u *= u
        v *= v
        distance = u + v
        if square:
            u *= u
            v *= v
            distance *= np.float32(1 - square)
            distance += np.float32(square) * (u + v)
        if wobble:
            distance += np.float32(wobble) * self.wobbles[box]
        mask: BoolArray = distance < 1
        if within is not None:
            mask &= within[box]
        self.hu[box][mask] = value
        painted = np.zeros((self.n, self.n), bool)
        painted[box] = mask
        return painted
