"""The scores of an evaluation: of each image, as a table, and in words."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan
from statistics import mean, stdev
from typing import Any, NamedTuple

from qnmixer.data.splits import Overlap
from qnmixer.evaluation.pictures import SliceImages
from qnmixer.files import digest
from qnmixer.runs.tables import NOTHING, Table, in_digits
from qnmixer.settings.logged_names import COLUMNS_OF_IMAGES, IN_WINDOW, RESIDUAL, deviation_name
from qnmixer.settings.parts import MetricConfig
from qnmixer.settings.run import section


def with_usual(metrics: Mapping[str, MetricConfig]) -> dict[str, MetricConfig]:
    """The metrics of a final table: PSNR and SSIM, and the run's own."""
    usual: dict[str, MetricConfig] = section("metrics", "default")
    return usual | dict(metrics)


def titles_of(metrics: Mapping[str, MetricConfig]) -> dict[str, str]:
    """The headings of a final table by metric: PSNR, SSIM, the run's own, and PSNR and SSIM inside the HU window."""
    return {name: metric.title or name for name, metric in with_usual(metrics).items()} | IN_WINDOW


@dataclass
class ImageScore:
    """The scores of one method on one slice."""

    number: int  # of the slice in its split, used by pages and pictures
    slice: str  # its file, which may name a patient
    method: str
    values: dict[str, Any]  # by metric; None for those inside the HU window, if the slice has nothing in it
    patient: int | None = None  # counted within the split; None: not known, as of phantoms
    content: int = 0  # a digest of the truth: names may be equal for different slices


class Conditions(NamedTuple):
    """What makes two tests equal: digests of the slices, the scan and the noise, and what the noise follows.

    That is its seed, and the order of the slices. These three are empty without noise.
    """

    slices: str
    scan: str
    noise: str = ""
    seed: str = ""
    order: str = ""

    @classmethod
    def differing(cls, tests: Collection["Conditions"]) -> list[str]:
        """In what some tests differ. What follows from another difference is left out."""
        fields = [name for name in cls._fields if len({getattr(test, name) for test in tests}) > 1]
        following = {"slices": {"order"}, "noise": {"seed", "order"}}
        left_out = set[str]().union(*(following.get(name, set()) for name in fields))
        return [name for name in fields if name not in left_out]


def by_patient(scores: Sequence[ImageScore], metric: str) -> dict[str, float]:
    """The mean of each patient, by a digest of the patient's slices. Slices of no known patient stand alone."""
    patients: dict[tuple[str, int], list[ImageScore]] = {}
    for score in scores:
        patient = ("slice", score.number) if score.patient is None else ("patient", score.patient)
        patients.setdefault(patient, []).append(score)
    means: dict[str, float] = {}
    for of_patient in patients.values():
        name = digest(sorted(score.content for score in of_patient))
        while name in means:  # a copy of the patient
            name += "+"
        if values := [score.values[metric] for score in of_patient if score.values.get(metric) is not None]:
            means[name] = mean(values)
    return means


@dataclass
class Evaluation:
    """All scores of a split, the slices that are kept to be looked at, and which of them are in the picture."""

    scores: list[ImageScore]
    title: str = ""  # what was measured
    slices: dict[int, SliceImages] = field(default_factory=dict)  # by number, the worst first
    pictured: list[int] = field(default_factory=list)
    baselines: list[str] = field(default_factory=list)  # the methods that every network is compared with
    trained: Overlap = field(default_factory=Overlap)  # how many of the slices the network was trained on
    test: Conditions | None = None  # tells tests apart
    own_range: bool = False  # the data range of each image is that of its reference, not 1
    note: str = ""  # more of the caption
    titles: dict[str, str] = field(default_factory=lambda: titles_of({}))  # headings of the metrics, by name

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

    def scores_of(self, method: str) -> list[ImageScore]:
        """The scores of one method."""
        return [score for score in self.scores if score.method == method]

    def values(self, method: str, metric: str) -> list[float]:
        """One metric of one method, over the images that have it. [NaN] if none has."""
        values = [score.values[metric] for score in self.scores_of(method)]
        return [value for value in values if value is not None] or [nan]

    @property
    def has_truth(self) -> bool:
        """Whether images were compared with a truth. Else the residual is their only score."""
        return "psnr" in self.titles

    @property
    def _unit(self) -> str:
        return " dB" if self.has_truth else " of the residual"

    def goods(self, method: str) -> list[float]:
        """The score of one method that is the larger, the better: PSNR, or minus the residual."""
        return self.values(method, "psnr") if self.has_truth else [-value for value in self.values(method, RESIDUAL)]

    @property
    def empty(self) -> list[str]:
        """Metrics that no image has, such as those inside a window that holds no pixel."""
        return [metric for metric in self.titles if all(score.values[metric] is None for score in self.scores)]

    def means(self) -> dict[str, dict[str, float]]:
        """method → metric → mean over images."""
        return {m: {metric: mean(self.values(m, metric)) for metric in self.titles} for m in self.methods}

    def metrics(self) -> dict[str, float]:
        """The means, under names that are the same for every network: psnr, fbp/psnr, tv/psnr."""
        means = self.means()
        names = [self.methods[-1], *self.baselines]
        return {
            f"{log_prefix(name, self.methods)}{metric}": means[name][metric] for name in names for metric in self.titles
        }

    def table(self) -> Table:
        """A row for each method: means ± standard deviations. The note is the gain."""
        body = []
        for method in self.methods:
            columns = [self.values(method, metric) for metric in self.titles]
            cells = [in_digits(mean(values), deviation(values)) for values in columns]
            row = (NOTHING if metric in self.empty else cell for metric, cell in zip(self.titles, cells, strict=True))
            body.append([method, *row])
        return Table(["method", *self.titles.values()], body, self.title, self.gain())

    def numbers(self) -> Table:
        """The same table for programs: means and standard deviations are numbers in separate columns."""
        headings = ["method", *(name for metric in self.titles for name in (metric, deviation_name(metric)))]
        body: list[list[str | float]] = []
        for method in self.methods:
            columns = [self.values(method, metric) for metric in self.titles]
            pairs = [(mean(values), deviation(values) or 0.0) for values in columns]
            body.append([method, *(number for pair in pairs for number in pair)])
        return Table(headings, body)

    def images(self) -> Table:
        """The table of images.csv."""
        *columns, patient_column = COLUMNS_OF_IMAGES
        rows = [[s.number, s.slice, s.method, *map(s.values.get, self.titles), s.patient] for s in self.scores]
        return Table([*columns, *self.titles, patient_column], rows)

    def gain(self) -> str:
        """The caption of the table: the gain of the network over every other method."""
        *rivals, network = self.methods
        gains = ", ".join(f"over {rival}: {self._mean_gain(rival):+.2f}{self._unit}" for rival in rivals)
        scale = "data range of each reference, SSIM as skimage's" if self.own_range else "data range 1"
        scale = scale if self.has_truth else "in units of the noise: lower is better, 1 is as good as it allows"
        line = f"mean over {self.n_images} images, ± their standard deviation ({scale}){self.note}"
        return f"{network} {gains}, {line}" if rivals else line

    def warnings(self) -> list[str]:
        """Warnings above the table: slices of the training set, copies, a network below another method, NaN pixels."""
        network = self.methods[-1]
        lines = used_in_training(self.trained)
        contents = [score.content for score in self.scores_of(network)]
        if any(contents) and (n_copies := self.n_images - len({*contents})):
            lines.append(f"{n_copies} of the {self.n_images} slices have the pixels of another one, and count too")
        for rival in self.baselines:
            if (gain := self._mean_gain(rival)) < 0:
                why = "it has not learned enough, or was trained for other data"
                lines.append(f"{network} is BELOW {rival} by {-gain:.2f}{self._unit}: {why}")
        for method in self.methods:
            if n_bad := sum(isnan(value) or value == -inf for value in self.goods(method)):
                share = f"{n_bad} of {self.n_images} slices"
                lines.append(f"{method} gives NaN or infinite pixels for {share}, which images.csv names")
        if empty := [self.titles[metric] for metric in self.empty]:
            lines.append(f"no slice has {' or '.join(empty)}: no pixel lies in evaluation.window, choose another one")
        return lines

    def _mean_gain(self, rival: str) -> float:
        """Mean PSNR difference, or that of the residual, of the last method and another one."""
        pairs = zip(self.goods(self.methods[-1]), self.goods(rival), strict=True)
        return mean(a - b for a, b in pairs)


def log_prefix(method: str, methods: Sequence[str]) -> str:
    """What loggers get before the names of a method's scores: nothing for the network, which is the last method."""
    return "" if method == methods[-1] else f"{method.lower()}/"


def used_in_training(overlap: Overlap) -> list[str]:
    """The warnings about slices of a test that a network was trained on."""
    lines = []
    if overlap.same:
        lines.append(f"{overlap.same} of the slices were used in training: the scores are too good")
    if overlap.likely:
        subject = "other slices" if overlap.same else "of the slices"
        lines.append(
            f"{overlap.likely} {subject} look like training slices in another size, or have the PatientID or UID of "
            "one: the scores may be too good"
        )
    return lines


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation. None for a single value; NaN for values that are not finite, which `stdev` refuses."""
    if len(values) < 2:
        return None
    return stdev(values) if all(map(isfinite, values)) else nan
