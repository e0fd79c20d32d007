"""Validation PSNR during training, and the step from which on a method stays above total variation."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import mean, median_high

from qnmixer.engine.evaluation.slices import kind_of
from qnmixer.engine.tracking.metrics_file import read_metrics
from qnmixer.extras.comparison.methods import ComparedJob, ComparedMethod, scan_under_test
from qnmixer.extras.comparison.statistics import Seeds
from qnmixer.files import digest


@dataclass(frozen=True)
class Validation:
    """The mean PSNR over the validation slices, after so many steps and seconds of training."""

    step: int
    seconds: float  # of training alone: data, forward, backward, optimizer
    psnr: float


class Level:
    """The validation PSNR of a method that learns nothing.

    Args:
        name: of its network, as total variation.
        methods: of a comparison, with the jobs of that method.
    """

    def __init__(self, name: str, methods: Sequence[ComparedMethod]) -> None:
        self.found: dict[str, dict[Seeds, float]] = {}  # by sinograms
        for job in (job for method in methods if method.network == name for job in method.done):
            if curve := curve_of(job):
                of_scan = self.found.setdefault(_scan(job), {})
                of_scan[job.seeds] = max(of_scan.get(job.seeds, -inf), curve[-1].psnr)

    def of(self, job: ComparedJob) -> float | None:
        """Its PSNR on the slices and sinograms that a job was validated on; None if it has no job for these.

        On slices from files, other seeds only change the noise. If no job has the same seeds, the mean of all is taken.
        """
        assert job.config is not None
        levels = self.found.get(_scan(job), {})
        if job.seeds in levels or not levels or kind_of(job.config.data) == "phantoms":
            return levels.get(job.seeds)
        return mean(levels.values())

    def crossings(self, method: ComparedMethod) -> list[int | None]:
        """For each job of a method the step from which on it stays above; None: it does not. [] without a level."""
        jobs = [(job, self.of(job)) for job in method.done if job.steps is not None]
        return [first_above(curve_of(job), level) for job, level in jobs if level is not None]


def curve_of(job: ComparedJob) -> list[Validation]:
    """The validations of a job, by its metrics.csv."""
    curve: list[Validation] = []
    seconds = samples = 0.0
    for row in read_metrics(job.folder / "metrics.csv"):
        if speed := row.get("train/samples_per_second"):  # since the last row with a speed
            seconds, samples = seconds + (float(row["samples"]) - samples) / float(speed), float(row["samples"])
        if decibels := row.get("val/psnr"):
            curve.append(Validation(int(row["step"]), seconds, float(decibels)))
    return curve


def first_above(curve: Sequence[Validation], level: float) -> int | None:
    """The step of the first validation from which on all are above the level; None if the last one is not."""
    found = None
    for validation in reversed(curve):
        if not validation.psnr > level:
            break
        found = validation.step
    return found


def median_step(steps: Sequence[int | None]) -> str:
    """The median over jobs as "1,500", or "none"; if only some jobs stay above: "1,500 (2 of 3)"."""
    middle = median_high(inf if step is None else step for step in steps)
    n, n_above = len(steps), sum(step is not None for step in steps)
    return ("none" if middle == inf else f"{middle:,}") + (f" ({n_above} of {n})" if 0 < n_above < n else "")


def _scan(job: ComparedJob) -> str:
    """A digest of what its validation sinograms come from. Their number counts too, as the mean is over all of them."""
    assert job.config is not None
    return digest([scan_under_test(job.config), getattr(job.config.data, "n_val", None)], sort_keys=True)
