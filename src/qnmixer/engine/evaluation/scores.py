"""The scores of an evaluation: of each image, as a table, and in words."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan
from statistics import mean, stdev
from typing import Any

import numpy as np

from qnmixer.engine.config.sections import MetricConfig, default_metrics
from qnmixer.engine.reports.pictures import SliceImages
from qnmixer.engine.reports.terminal import in_digits

IN_WINDOW = {"window_psnr": "window PSNR, dB", "window_ssim": "window SSIM × 100"}
"""Headings of the metrics inside the HU window."""


def with_usual(metrics: Mapping[str, MetricConfig]) -> dict[str, MetricConfig]:
    """The metrics of a final table: PSNR and SSIM, and the run's own."""
    return default_metrics() | dict(metrics)


def titles_of(metrics: Mapping[str, MetricConfig]) -> dict[str, str]:
    """The headings of a final table by metric: PSNR, SSIM, the run's own, and PSNR and SSIM inside the HU window."""
    return {name: metric.title or name for name, metric in with_usual(metrics).items()} | IN_WINDOW


@dataclass
class ImageScore:
    """The scores of one method on one slice.

    `number` is the slice's number in its split, used by pages and pictures; `slice`, its file, may name a patient.
    `patient` is a number too, counted within the split; None: not known, as of phantoms. `values` are by name of the
    metric. Those inside the HU window are None for a slice that has nothing in it.
    """

    number: int
    slice: str
    method: str
    values: dict[str, Any]
    patient: int | None = None


def by_patient(scores: Sequence[ImageScore], metric: str) -> dict[str, float]:
    """The mean of each patient, by the name of the patient's first slice.

    The number of that slice is added only if patients share a name: it changes if a seed splits the patients anew.
    """
    patients: dict[int | str, list[ImageScore]] = {}
    for score in scores:
        patients.setdefault(f"slice {score.number}" if score.patient is None else score.patient, []).append(score)
    n_named = Counter(its[0].slice for its in patients.values())
    means = {}
    for its in patients.values():
        name = its[0].slice if n_named[its[0].slice] == 1 else f"{its[0].number} {its[0].slice}"
        if values := [value for it in its if (value := it.values.get(metric)) is not None]:
            means[name] = mean(values)
    return means


@dataclass
class Evaluation:
    """All scores of a split, the slices that are kept to be looked at, and which of them are in the picture.

    `slices`: by number, the worst first. `baselines`: the methods that every network is compared with. `n_trained`: how
    many of the slices the network was trained on. `own_range`: the data range of each image is that of its reference,
    not 1. `titles`: headings of the metrics, by name.
    """

    scores: list[ImageScore]
    slices: dict[int, SliceImages] = field(default_factory=dict)
    pictured: list[int] = field(default_factory=list)
    baselines: list[str] = field(default_factory=list)
    n_trained: int = 0
    own_range: bool = False
    titles: dict[str, str] = field(default_factory=lambda: titles_of({}))

    @property
    def rows(self) -> list[SliceImages]:
        """The slices of the picture."""
        return [self.slices[number] for number in self.pictured]

    @property
    def methods(self) -> list[str]:
        """Methods in the order of their evaluation."""
        return list(dict.fromkeys(score.method for score in self.scores))

    @property
    def n_images(self) -> int:
        """How many slices were evaluated."""
        return len({score.number for score in self.scores})

    @property
    def n_patients(self) -> int:
        """How many patients the slices show; 0 if that is not known of each slice."""
        patients = {score.patient for score in self.scores}
        return 0 if None in patients else len(patients)

    def of(self, method: str) -> list[ImageScore]:
        """The scores of one method."""
        return [score for score in self.scores if score.method == method]

    def values(self, method: str, metric: str) -> list[float]:
        """One metric of one method, over the images that have it. [NaN] if none has."""
        values = [score.values[metric] for score in self.of(method)]
        return [value for value in values if value is not None] or [nan]

    def means(self) -> dict[str, dict[str, float]]:
        """method → metric → mean over images."""
        return {m: {metric: mean(self.values(m, metric)) for metric in self.titles} for m in self.methods}

    def metrics(self) -> dict[str, float]:
        """The means, under names that are the same for every network: psnr, fbp/psnr, tv/psnr."""
        means = self.means()
        named = {"": self.methods[-1]} | {f"{name.lower()}/": name for name in self.baselines}
        return {f"{prefix}{metric}": means[name][metric] for prefix, name in named.items() for metric in self.titles}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows, a row for each method: means ± standard deviations."""
        body = [[method] for method in self.methods]
        for metric in self.titles:
            for row in body:
                values = self.values(row[0], metric)
                row.append(in_digits(mean(values), deviation(values), of=self._size(metric)))
        return ["method", *self.titles.values()], body

    def numbers(self) -> tuple[list[str], list[list[str | float]]]:
        """The same table for programs: means and standard deviations are numbers in separate columns."""
        headings = ["method", *(f"{metric}{of}" for metric in self.titles for of in ("", "_std"))]
        body: list[list[str | float]] = []
        for method in self.methods:
            values = [self.values(method, metric) for metric in self.titles]
            body.append([method, *(it for of in values for it in (mean(of), deviation(of) or 0.0))])
        return headings, body

    def lines(self) -> list[list[Any]]:
        """Headings and rows of images.csv."""
        return [["number", "slice", "method", *self.titles, "patient"]] + [
            [s.number, s.slice, s.method, *(s.values[name] for name in self.titles), s.patient] for s in self.scores
        ]

    def gain(self) -> str:
        """The caption of the table: the gain of the network over every other method."""
        *others, last = self.methods
        over = ", ".join(f"over {other}: {self._mean_gain(other):+.2f} dB" for other in others)
        line = f"mean over {self.n_images} images ({data_range(self.own_range)})"
        first = f"{last} {over}, {line}" if others else line
        return "; ".join([first, *(self._patient_gain(other) for other in others if self.n_patients > 1)])

    def warnings(self) -> list[str]:
        """Warnings above the table: slices of the training set, a network below another method, pixels of no number."""
        *others, last = self.methods
        lines = [used_in_training(self.n_trained)] if self.n_trained else []
        lines += [
            f"{last} is BELOW {other} by {-gain:.2f} dB: it has not learned enough, or was trained for other data"
            for other in others
            if (gain := self._mean_gain(other)) < 0
        ]
        for method in self.methods:
            if bad := sum(isnan(value) or value == -inf for value in self.values(method, "psnr")):
                of = f"{bad} of {self.n_images} slices"
                lines.append(f"{method} gives NaN or infinite pixels for {of}, which images.csv names")
        return lines

    def _size(self, metric: str) -> float:
        """The largest mean of a metric, by which all its cells have the same decimals."""
        means = [abs(mean(self.values(method, metric))) for method in self.methods]
        return max((it for it in means if isfinite(it)), default=nan)

    def _mean_gain(self, other: str) -> float:
        """Mean PSNR difference of the last method and another one."""
        pairs = zip(self.values(self.methods[-1], "psnr"), self.values(other, "psnr"), strict=True)
        return mean(a - b for a, b in pairs)

    def _patient_gain(self, other: str) -> str:
        """The gain over another method by every metric, with the patient as the unit: slices of one look alike."""
        gains = []
        for metric, heading in self.titles.items():
            mine, its = (by_patient(self.of(method), metric) for method in (self.methods[-1], other))
            if differences := [mine[patient] - its[patient] for patient in mine]:
                gain = in_digits(mean(differences), half_width(differences), of=self._size(metric), sign="+")
                gains.append(f"{heading.partition(',')[0]} {gain}")
        return f"over {other}, mean over {self.n_patients} patients ± half of its 95 % interval: {', '.join(gains)}"


def caption_of(decibels: float, percent: float) -> str:
    """PSNR and SSIM × 100 as the text over an image."""
    return f"{decibels:.2f} dB, SSIM {percent:.2f}"


def data_range(own: bool) -> str:
    """The data range of PSNR and SSIM in words. `own`: that of each reference."""
    return "data range of each reference, SSIM as skimage's" if own else "data range 1"


def used_in_training(n: int) -> str:
    """The warning about n slices of a test that a network was trained on."""
    return f"{n} of the slices were used in training: the scores are too good"


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation. None for a single value; NaN for values that are not finite, which `stdev` refuses."""
    if len(values) < 2:
        return None
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


def half_width(values: Sequence[float]) -> float | None:
    """Half-width of the 95 % interval of a mean: t·s/√n with n − 1 degrees of freedom. None for a single value."""
    n, found = len(values), deviation(values)
    return None if found is None else student_quantile(n - 1) * found / math.sqrt(n)


def student_quantile(freedom: int) -> float:
    """The t for which |T| ≤ t has a probability of 95 % in Student's distribution.

    With t = √ν tan θ the density becomes cos^(ν−1) θ, which is summed here: right to 4 digits. (SciPy has it, but is no
    dependency.)
    """
    edges = np.linspace(0.0, np.pi / 2, 20_001)
    middles = (edges[1:] + edges[:-1]) / 2
    below = np.cumsum(np.cos(middles) ** (freedom - 1))
    theta = np.interp(0.95, np.concatenate([[0.0], below / below[-1]]), edges)
    return float(math.sqrt(freedom) * np.tan(theta))
