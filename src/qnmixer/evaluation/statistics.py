"""Statistics of a method over seeds and images, and of the difference between two methods."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, stdev, variance

import numpy as np

Seeds = tuple[int, int]
"""The seeds of the weights and of the data."""

Scores = Mapping[Seeds, Mapping[str, float]]
"""seeds → image → score. The images of two seeds may differ."""


@dataclass(frozen=True)
class Spread:
    """The mean over seeds of the mean over images, and standard deviations (None: only one value)."""

    mean: float
    over_seeds: float | None  # standard deviation of the seeds' means
    over_images: float | None  # standard deviation of the images' means over seeds
    n_seeds: int
    n_images: int


@dataclass(frozen=True)
class Difference:
    """Mean difference of two methods on the same images."""

    mean: float
    half_width: float | None  # of the 95 % interval; None: too few images and seeds to estimate it


def with_deviation(value: float, deviation: float | None, sign: str = "") -> str:
    """The text of a table cell: "34.13 ± 0.52", or only the value without a deviation."""
    return f"{value:{sign}.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def spread(scores: Scores) -> Spread:
    """Mean and standard deviations of one method."""
    seeds, images = _seed_means(scores), _image_means(scores)
    return Spread(
        mean(seeds),
        stdev(seeds) if len(seeds) > 1 else None,
        stdev(images.values()) if len(images) > 1 else None,
        len(seeds),
        len(images),
    )


def difference(one: Scores, other: Scores) -> Difference:
    """`one` minus `other`, paired by image, with a 95 % interval for other images and other seeds.

    The variance is the variance of the image differences over their number, plus for each method the variance over its
    seeds over their number. The degrees of freedom follow Welch and Satterthwaite. Noise of an image over seeds counts
    in both, so the interval is too wide rather than too narrow. A method with one seed adds no variance over seeds.

    Raises ValueError if they have no image in common.
    """
    first, second = _image_means(one), _image_means(other)
    differences = [first[image] - second[image] for image in first if image in second]
    if not differences:
        raise ValueError("two methods without a common image")
    parts = [  # variance of the mean, degrees of freedom
        (variance(values) / len(values), len(values) - 1)
        for values in (differences, _seed_means(one), _seed_means(other))
        if len(values) > 1
    ]
    total = sum(part for part, _ in parts)
    if not parts:
        return Difference(mean(differences), None)
    if total == 0:
        return Difference(mean(differences), 0.0)
    freedom = total**2 / sum(part**2 / n for part, n in parts)
    return Difference(mean(differences), student_quantile(freedom) * math.sqrt(total))


def student_quantile(freedom: float) -> float:
    """The t for which |T| ≤ t has a probability of 95 % in Student's distribution; `freedom` may be fractional.

    With t = √ν tan θ the density becomes cos^(ν−1) θ, which is summed here: right to 4 digits (ν ≥ 1).
    """
    edges = np.linspace(0.0, np.pi / 2, 20_001)
    middles = (edges[1:] + edges[:-1]) / 2
    below = np.cumsum(np.cos(middles) ** (freedom - 1))
    theta = np.interp(0.95, np.concatenate([[0.0], below / below[-1]]), edges)
    return float(math.sqrt(freedom) * np.tan(theta))


def _seed_means(scores: Scores) -> list[float]:
    return [mean(of_seed.values()) for of_seed in scores.values()]


def _image_means(scores: Scores) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for of_seed in scores.values():
        for image, score in of_seed.items():
            values.setdefault(image, []).append(score)
    return {image: mean(found) for image, found in values.items()}
