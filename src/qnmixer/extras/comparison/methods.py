"""The methods of a comparison: jobs of a sweep, grouped if they differ only in their seed."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qnmixer.engine.checkpoints import built_from, find_checkpoint, read_checkpoint
from qnmixer.engine.config.compose import of_hydra
from qnmixer.engine.config.run import Config, checked
from qnmixer.engine.evaluation.scores import ImageScore, by_patient, titles_of
from qnmixer.engine.plugins import check_trusted
from qnmixer.engine.reconstructor import method_name
from qnmixer.engine.reports.pictures import SliceImages
from qnmixer.engine.sweeps import jobs_of, outcome
from qnmixer.engine.tracking.records import read_results
from qnmixer.errors import UserError, first_line
from qnmixer.extras.comparison.statistics import Scores, Seeds, Statistic, difference, spread

_OF_NO_METHOD = ("seed", "data.seed", "tags", "test_after_training")
"""Keys that change no method. Jobs that differ in these only are one method."""


@dataclass
class ComparedJob:
    """One job of a sweep, finished or not."""

    folder: Path
    results: dict[str, Any]
    config: Config | None  # None: it cannot be evaluated
    problem: str  # why it cannot be evaluated; empty if it can

    @property
    def steps(self) -> int | None:
        """The configured number of optimizer steps; None: its method learns nothing."""
        done = self.results.get("steps")
        if self.config is None or not done:
            return None
        return done if self.config.trainer.max_steps == -1 else self.config.trainer.max_steps


@dataclass
class ComparedMethod:
    """Jobs that differ only in their seed."""

    name: str
    jobs: list[ComparedJob]
    network: str = ""  # the name of its network; its own name also tells variants apart
    measured: dict[str, dict[Seeds, list[ImageScore]]] = field(default_factory=dict)  # test → seeds → images
    scans: dict[str, str] = field(default_factory=dict)  # test → digest of what its sinograms come from
    cost: dict[str, float | None] = field(default_factory=dict)  # by name, see `report.COSTS`; None: not recorded

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
    methods: list[ComparedMethod]
    device: str
    slices: dict[str, dict[int, SliceImages]] = field(default_factory=dict)  # test → slices by all methods, to look at
    notes: list[str] = field(default_factory=list)

    @property
    def tests(self) -> list[str]:
        """The tests that were made."""
        return [*self.slices]

    @property
    def titles(self) -> dict[str, str]:
        """Headings of all metrics by name."""
        configs = [job.config for method in self.methods for job in method.done if job.config is not None]
        return titles_of({name: it for config in configs for name, it in config.metrics.items()})


def methods_of(sweeps: Sequence[Path], checkpoint: str = "best", trust: Collection[str] = ()) -> list[ComparedMethod]:
    """Group the jobs of sweeps into methods: jobs that differ only in their seed. Each method gets a unique name.

    A job with the user's own code counts as failed, unless `trust` has its modules.
    """
    jobs = {folder: its for sweep in sweeps for folder, its in jobs_of(sweep).items()}
    given = [dict(o.lstrip("+").partition("=")[::2] for o in its if not of_hydra(o)) for its in jobs.values()]
    keys = dict.fromkeys(key for its in given for key in its if key not in _OF_NO_METHOD)
    varying = [key for key in keys if len({its.get(key) for its in given}) > 1]
    groups: dict[tuple[str, ...], list[ComparedJob]] = {}
    for folder, its in zip(jobs, given, strict=True):
        differs = tuple(f"{key}={its[key]}" for key in varying if key in its)
        groups.setdefault(differs, []).append(_job(folder, checkpoint, trust))
    networks = {differs: _network(of) for differs, of in groups.items()}
    return [ComparedMethod(_name_of(differs, networks), of, networks[differs]) for differs, of in groups.items()]


def _name_of(differs: tuple[str, ...], networks: dict[tuple[str, ...], str]) -> str:
    """A name that no other method has: its network, or the overrides in which it differs, or both."""
    name = networks[differs]
    same = [others for others, network in networks.items() if network == name]
    own = [override for override in differs if not name or not all(override in others for others in same)]
    more = " ".join(_without_group(override) for override in own)
    alone = len(same) == len(networks) or not name  # the name of the network says nothing
    return more if more and alone else f"{name} {more}".strip() or "unknown"


def _job(folder: Path, checkpoint: str, trust: Collection[str]) -> ComparedJob:
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
    return ComparedJob(folder, results, config, problem)


def _network(jobs: list[ComparedJob]) -> str:
    return next((method_name(job.config) for job in jobs if job.config is not None), "")


def _without_group(override: str) -> str:
    """An override without its group: n_iterations=4."""
    key, _, value = override.partition("=")
    return f"{key.replace('/', '.').rpartition('.')[2]}={value}"
