"""The methods of a comparison: jobs of a sweep, grouped if they differ only in their seed."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qnmixer.engine.checkpoints.reading import built_from, find_checkpoint, read_checkpoint
from qnmixer.engine.config import Config, to_plain
from qnmixer.engine.config.compose import of_hydra
from qnmixer.engine.config.data import LOADING
from qnmixer.engine.config.run import checked
from qnmixer.engine.evaluation.scores import ImageScore, by_patient, titles_of
from qnmixer.engine.plugins import check_trusted
from qnmixer.engine.reconstructor import method_name
from qnmixer.engine.reports.pictures import SliceImages
from qnmixer.engine.sweeps.jobs import outcome
from qnmixer.engine.sweeps.report import rows_of
from qnmixer.engine.tracking.results import read_results
from qnmixer.engine.tracking.sweep_file import read_sweep
from qnmixer.errors import UserError, first_line
from qnmixer.extras.comparison.statistics import Scores, Seeds, Statistic, difference, spread

_SEEDS = ("seed", "data.seed")
# Keys of the data config that do not change a test slice.
_NOT_OF_TEST = {*LOADING, "seed", "augment", "n_train", "n_val", "train_slices"}


@dataclass
class ComparedJob:
    """One job of a sweep, finished or not."""

    folder: Path
    overrides: list[str]
    results: dict[str, Any]
    config: Config | None  # None: it cannot be evaluated
    problem: str  # why it cannot be evaluated; empty if it can

    @property
    def seeds(self) -> Seeds:
        """The seeds, in which the jobs of a method differ."""
        assert self.config is not None
        return self.config.seed, self.config.data.seed

    @property
    def steps(self) -> int | None:
        """The configured number of optimizer steps; None: its method learns nothing."""
        done = self.results.get("steps")
        if self.config is None or not done:
            return None
        return done if self.config.trainer.max_steps == -1 else self.config.trainer.max_steps


@dataclass(frozen=True)
class Cost:
    """The cost of a method; None: not recorded. Times and memory depend on the machine, and on its other work."""

    parameters: int
    train_seconds: float | None  # mean over its jobs
    step_seconds: float | None  # of an optimizer step, median
    step_mib: float | None  # peak of a step, weights included; the highest of its jobs
    inference_seconds: float  # of one slice, measured here
    largest_gradient: float | None  # norm before clipping, of all steps of all jobs that were logged


@dataclass
class ComparedMethod:
    """Jobs that differ only in their seed."""

    name: str
    jobs: list[ComparedJob]
    network: str = ""  # the name of its network; its own name also tells variants apart
    measured: dict[str, dict[Seeds, list[ImageScore]]] = field(default_factory=dict)  # test → seeds → images
    scans: dict[str, str] = field(default_factory=dict)  # test → digest of what its sinograms come from
    cost: Cost | None = None
    own_range: set[str] = field(default_factory=set)  # tests whose references each have their own data range

    @property
    def done(self) -> list[ComparedJob]:
        """Jobs that can be evaluated."""
        return [job for job in self.jobs if not job.problem]

    @property
    def steps(self) -> int | None:
        """The configured number of optimizer steps of its jobs; None: it learns nothing."""
        return next((job.steps for job in self.done), None)

    def scores(self, test: str, metric: str) -> Scores:
        """One metric on one test, by patient; empty if nothing was measured."""
        found = {seeds: by_patient(scores, metric) for seeds, scores in self.measured.get(test, {}).items()}
        return {seeds: by_name for seeds, by_name in found.items() if by_name}

    def spread(self, test: str, metric: str) -> Statistic | None:
        """One metric on one test; None if nothing was measured."""
        scores = self.scores(test, metric)
        return spread(scores) if scores else None

    def psnr(self, test: str) -> float:
        """Mean PSNR on a test; −∞ if nothing was measured."""
        found = self.spread(test, "psnr")
        return -math.inf if found is None else found.mean

    def minus(self, other: "ComparedMethod", test: str) -> dict[str, Statistic]:
        """By metric the difference to another method on the same sinograms of the same patients; {} without these."""
        if test not in self.scans or self.scans[test] != other.scans.get(test):
            return {}
        names = dict.fromkeys(name for its in self.measured.get(test, {}).values() for s in its for name in s.values)
        found = {name: difference(self.scores(test, name), other.scores(test, name)) for name in names}
        return {name: its for name, its in found.items() if its is not None}


@dataclass
class Comparison:
    """The result of `compare`. Methods are sorted by PSNR on the first test; those without a score come last.

    Methods with another number of training steps than most come after the others.
    """

    sweeps: list[Path]
    tests: list[str]
    methods: list[ComparedMethod]
    slices: dict[str, list[SliceImages]]  # test → slices by all methods, to look at
    notes: list[str]
    device: str

    @property
    def titles(self) -> dict[str, str]:
        """Headings of all metrics by name."""
        configs = [job.config for method in self.methods for job in method.done if job.config is not None]
        return titles_of({name: it for config in configs for name, it in config.metrics.items()})


def methods_of(sweeps: Sequence[Path], checkpoint: str = "best", trust: Collection[str] = ()) -> list[ComparedMethod]:
    """Group the jobs of sweeps into methods: jobs that differ only in their seed. Each method gets a unique name.

    A job with the user's own code counts as failed, unless `trust` has its modules.
    """
    overrides: dict[Path, list[str]] = {}
    varying: dict[str, None] = {}
    for sweep in sweeps:
        described = read_sweep(sweep)
        varying |= dict.fromkeys(key.lstrip("+") for key in described["varying"])
        for row in rows_of(sweep, described["jobs"], []):
            listed = described["jobs"]
            of_job = listed[row.name] if listed else read_results(sweep / row.name).get("overrides", [])
            overrides[sweep / row.name] = of_job
    if len(sweeps) > 1:
        varying |= dict.fromkeys(_differing([*overrides.values()]))
    groups: dict[tuple[str, ...], list[ComparedJob]] = {}
    for folder, its in overrides.items():
        differs = {o.lstrip("+").partition("=")[0]: o for o in its}
        key = tuple(differs[k].lstrip("+") for k in varying if k in differs and k not in _SEEDS)
        groups.setdefault(key, []).append(_job(folder, its, checkpoint, trust))
    by_name: dict[str, list[tuple[str, ...]]] = {}
    for key, jobs in groups.items():
        by_name.setdefault(_name(jobs), []).append(key)
    return [
        ComparedMethod(_name_among(by_name, name, key), groups[key], name)
        for name, keys in by_name.items()
        for key in keys
    ]


def scan_under_test(config: Config) -> object:
    """The settings behind the sinograms of a test that all compared methods must share."""
    plain = to_plain(config)
    data = {key: value for key, value in plain["data"].items() if key not in _NOT_OF_TEST}
    geometry = {key: value for key, value in plain["geometry"].items() if key != "fbp_filter"}
    return [geometry, plain["noise"], data]


def _differing(jobs: list[list[str]]) -> list[str]:
    """The keys whose values differ between jobs, or that some jobs lack."""
    values = [dict(o.lstrip("+").partition("=")[::2] for o in its if not of_hydra(o)) for its in jobs]
    keys = dict.fromkeys(key for its in values for key in its)
    return [key for key in keys if len({its.get(key) for its in values}) > 1]


def _name_among(by_name: dict[str, list[tuple[str, ...]]], name: str, overrides: tuple[str, ...]) -> str:
    """A name that no other method has: its model, or the keys in which it differs, or both."""
    same = by_name[name]
    differing = [override for override in overrides if not name or not all(override in others for others in same)]
    more = " ".join(map(_without_group, differing))
    return more if more and (len(by_name) == 1 or not name) else f"{name} {more}".strip() or "unknown"


def _job(folder: Path, overrides: list[str], checkpoint: str, trust: Collection[str]) -> ComparedJob:
    results = read_results(folder)
    problem = "" if results.get("status") == "done" else outcome(results) if results else "not yet run"
    config = None
    if not problem:
        try:
            found = read_checkpoint(find_checkpoint(folder, checkpoint))[0]
            check_trusted(str(folder), built_from(found, "data.", "metrics."), trust)
            config = checked(found, "model", "noise")
        except UserError as error:
            problem = f"failed: {first_line(error)}"
    return ComparedJob(folder, overrides, results, config, problem)


def _name(jobs: list[ComparedJob]) -> str:
    return next((method_name(job.config) for job in jobs if job.config is not None), "")


def _without_group(override: str) -> str:
    """An override without its group: n_iterations=4."""
    key, _, value = override.partition("=")
    return f"{key.replace('/', '.').rpartition('.')[2]}={value}"
