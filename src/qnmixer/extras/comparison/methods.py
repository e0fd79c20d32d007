"""The methods of a comparison: jobs of a sweep, grouped if they differ only in their seed."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qnmixer.engine.checkpoints import built_from, find_checkpoint, read_checkpoint
from qnmixer.engine.config.compose import of_hydra
from qnmixer.engine.config.run import Config, checked
from qnmixer.engine.data.slices import shortlist
from qnmixer.engine.data.splits import Overlap
from qnmixer.engine.evaluation.scores import Conditions, ImageScore, by_patient
from qnmixer.engine.plugins import check_trusted
from qnmixer.engine.reconstructor import method_name
from qnmixer.engine.reports.pictures import SliceImages
from qnmixer.engine.sweeps import jobs_of
from qnmixer.engine.tracking.loggers import without_folders
from qnmixer.engine.tracking.records import own_modules, read_results
from qnmixer.extras.comparison.statistics import Scores, Seeds, Statistic, difference, spread

_OF_NO_METHOD = ("seed", "data.seed", "tags", "test_after_training")
"""Keys that change no method. Jobs that differ in these only are one method."""


@dataclass
class ComparedJob:
    """One job of a sweep that is done, and what its evaluation gave. `title`: of its test."""

    folder: Path
    results: dict[str, Any]
    config: Config
    scores: list[ImageScore] = field(default_factory=list)
    test: Conditions | None = None
    title: str = ""

    @property
    def seeds(self) -> Seeds:
        """Those of the weights and of the data."""
        return self.config.seed, self.config.data.seed


@dataclass
class ComparedMethod:
    """Jobs that differ only in their seed. `jobs`: those that are done, of `n_jobs`."""

    name: str
    jobs: list[ComparedJob]
    n_jobs: int
    n_parameters: int = 0
    trained: Overlap = field(default_factory=Overlap)

    @property
    def measured(self) -> dict[Seeds, list[ImageScore]]:
        """The scores by the seeds of a job."""
        return {job.seeds: job.scores for job in self.jobs if job.scores}

    @property
    def tests(self) -> frozenset[Conditions | None]:
        """The tests of its jobs. Several, where the slices of a test follow the seed."""
        return frozenset(job.test for job in self.jobs)

    def by_conditions(self) -> "list[ComparedMethod]":
        """The method, or several if its jobs had another scan, noise or noise seed: no mean is over such jobs."""
        groups: dict[Any, list[ComparedJob]] = {}
        for job in self.jobs:
            groups.setdefault(job.test and job.test[1:], []).append(job)
        if len(groups) < 2:
            return [self]
        return [replace(self, jobs=jobs, n_jobs=len(jobs)) for jobs in groups.values()]

    def spread(self, metric: str) -> Statistic | None:
        """One metric; None if nothing was measured."""
        scores = self._scores(metric)
        return spread(scores) if scores else None

    def minus(self, method: "ComparedMethod", metric: str) -> Statistic | None:
        """The difference to another method on the same patients; None without these."""
        return difference(self._scores(metric), method._scores(metric))

    def _scores(self, metric: str) -> Scores:
        means = {seeds: by_patient(scores, metric) for seeds, scores in self.measured.items()}
        return {seeds: by_name for seeds, by_name in means.items() if by_name}


@dataclass
class Comparison:
    """The result of `compare`. Methods are sorted by PSNR; those without a score come last.

    `titles`: headings of all metrics by name. `slices`: by test and number, by all methods, to look at.
    """

    sweeps: list[Path]
    methods: list[ComparedMethod]
    titles: dict[str, str] = field(default_factory=dict)
    slices: dict[tuple[Conditions | None, int], SliceImages] = field(default_factory=dict)

    @property
    def tables(self) -> list[list[ComparedMethod]]:
        """The methods of each table: those with equal tests. Methods without a score are in the first one."""
        groups: dict[frozenset[Conditions | None], list[ComparedMethod]] = {}
        for method in self.methods:
            tests = method.tests or next(iter(groups), frozenset())
            groups.setdefault(tests, []).append(method)
        return [*groups.values()]

    @property
    def warning(self) -> str:
        """A line that says which jobs had other tests, and in what these differ; empty if all are equal."""
        if len(self.tables) < 2:
            return ""
        fields = Conditions.differing({test for method in self.methods for test in method.tests if test})
        jobs = "; ".join(f"test {n}: {_listed(table)}" for n, table in enumerate(self.tables, 1))
        return (
            f"Jobs had other tests, which differ in {' and '.join(fields)}, so each has its own table. Jobs of {jobs}"
        )


def _listed(methods: Sequence[ComparedMethod]) -> str:
    """The jobs of some methods, with the name of their sweep."""
    names = [f"{job.folder.parent.name}/{job.folder.name}" for method in methods for job in method.jobs]
    return shortlist(names)


def methods_of(sweeps: Sequence[Path], checkpoint: str = "best", trust: Collection[str] = ()) -> list[ComparedMethod]:
    """Group the jobs of sweeps into methods: jobs that differ only in their seed. Each method gets a unique name.

    Raises PluginError for a job with the user's own code, unless `trust` has its modules.
    """
    jobs = {folder: overrides for sweep in sweeps for folder, overrides in jobs_of(sweep).items()}
    settings = [
        dict(override.lstrip("+").partition("=")[::2] for override in overrides if not of_hydra(override))
        for overrides in jobs.values()
    ]
    keys = dict.fromkeys(key for values in settings for key in values if key not in _OF_NO_METHOD)
    varying = [key for key in keys if len({values.get(key) for values in settings}) > 1]
    groups: dict[tuple[str, ...], list[ComparedJob | None]] = {}
    for folder, values in zip(jobs, settings, strict=True):
        overrides = tuple(f"{key}={values[key]}" for key in varying if key in values)
        groups.setdefault(overrides, []).append(_job(folder, checkpoint, trust))
    finished_jobs = {overrides: [job for job in group if job is not None] for overrides, group in groups.items()}
    networks = {overrides: method_name(group[0].config) if group else "" for overrides, group in finished_jobs.items()}
    return [
        ComparedMethod(_name_of(overrides, networks), finished_jobs[overrides], len(group))
        for overrides, group in groups.items()
    ]


def _name_of(overrides: tuple[str, ...], networks: dict[tuple[str, ...], str]) -> str:
    """A name that no other method has: its network, or the overrides in which it differs, or both."""
    name = networks[overrides]
    # Overrides that all methods of this network have tell nothing.
    namesakes = [method for method, network in networks.items() if network == name]
    words = [
        _without_group(override)
        for override in overrides
        if not name or not all(override in namesake for namesake in namesakes)
    ]
    says_nothing = words and len(namesakes) == len(networks)
    return without_folders(" ".join(words if says_nothing else [name, *words]).strip()) or "unknown"


def _without_group(override: str) -> str:
    """An override without its group: n_iterations=4."""
    key, _, value = override.partition("=")
    return f"{key.replace('/', '.').rpartition('.')[2]}={value}"


def _job(folder: Path, checkpoint: str, trust: Collection[str]) -> ComparedJob | None:
    results = read_results(folder)
    if results.get("status") != "done":
        return None
    config, _ = read_checkpoint(find_checkpoint(folder, checkpoint))
    check_trusted(str(folder), built_from(config, "data.", "metrics."), [*trust, *own_modules(folder)])
    return ComparedJob(folder, results, checked(config, "model", "noise"))
