"""The methods of a comparison: jobs of a sweep, grouped if they differ only in their seed."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qnmixer.engine.checkpoints import built_from, find_checkpoint, read_checkpoint
from qnmixer.engine.config.compose import of_hydra
from qnmixer.engine.config.run import Config, checked
from qnmixer.engine.evaluation.scores import ImageScore, by_patient
from qnmixer.engine.plugins import check_trusted
from qnmixer.engine.reconstructor import method_name
from qnmixer.engine.reports.pictures import SliceImages
from qnmixer.engine.sweeps import jobs_of
from qnmixer.engine.tracking.loggers import without_folders
from qnmixer.engine.tracking.records import read_results
from qnmixer.extras.comparison.statistics import Scores, Seeds, Statistic, difference, spread

_OF_NO_METHOD = ("seed", "data.seed", "tags", "test_after_training")
"""Keys that change no method. Jobs that differ in these only are one method."""


@dataclass
class ComparedJob:
    """One job of a sweep that is done."""

    folder: Path
    results: dict[str, Any]
    config: Config


@dataclass
class ComparedMethod:
    """Jobs that differ only in their seed.

    `jobs`: those that are done, of `n_jobs`. `measured`: the scores by the seeds of a job.
    """

    name: str
    jobs: list[ComparedJob]
    n_jobs: int
    measured: dict[Seeds, list[ImageScore]] = field(default_factory=dict)
    n_parameters: int = 0

    def spread(self, metric: str) -> Statistic | None:
        """One metric; None if nothing was measured."""
        scores = self._scores(metric)
        return spread(scores) if scores else None

    def minus(self, other: "ComparedMethod", metric: str) -> Statistic | None:
        """The difference to another method on the same patients; None without these."""
        return difference(self._scores(metric), other._scores(metric))

    def _scores(self, metric: str) -> Scores:
        found = {seeds: by_patient(scores, metric) for seeds, scores in self.measured.items()}
        return {seeds: by_name for seeds, by_name in found.items() if by_name}


@dataclass
class Comparison:
    """The result of `compare`. Methods are sorted by PSNR; those without a score come last.

    `title`: what was measured. `titles`: headings of all metrics by name. `slices`: by all methods, to look at.
    """

    sweeps: list[Path]
    methods: list[ComparedMethod]
    title: str = ""
    titles: dict[str, str] = field(default_factory=dict)
    slices: dict[int, SliceImages] = field(default_factory=dict)
    n_trained: int = 0


def methods_of(sweeps: Sequence[Path], checkpoint: str = "best", trust: Collection[str] = ()) -> list[ComparedMethod]:
    """Group the jobs of sweeps into methods: jobs that differ only in their seed. Each method gets a unique name.

    Raises PluginError for a job with the user's own code, unless `trust` has its modules.
    """
    jobs = {folder: its for sweep in sweeps for folder, its in jobs_of(sweep).items()}
    given = [dict(o.lstrip("+").partition("=")[::2] for o in its if not of_hydra(o)) for its in jobs.values()]
    keys = dict.fromkeys(key for its in given for key in its if key not in _OF_NO_METHOD)
    varying = [key for key in keys if len({its.get(key) for its in given}) > 1]
    groups: dict[tuple[str, ...], list[ComparedJob | None]] = {}
    for folder, its in zip(jobs, given, strict=True):
        differs = tuple(f"{key}={its[key]}" for key in varying if key in its)
        groups.setdefault(differs, []).append(_job(folder, checkpoint, trust))
    done = {differs: [job for job in of if job is not None] for differs, of in groups.items()}
    networks = {differs: method_name(of[0].config) if of else "" for differs, of in done.items()}
    return [ComparedMethod(_name_of(it, networks), done[it], len(of)) for it, of in groups.items()]


def _name_of(differs: tuple[str, ...], networks: dict[tuple[str, ...], str]) -> str:
    """A name that no other method has: its network, or the overrides in which it differs, or both."""
    name = networks[differs]
    same = [others for others, network in networks.items() if network == name]
    own = [_without_group(it) for it in differs if not name or not all(it in others for others in same)]
    says_nothing = own and len(same) == len(networks)
    return without_folders(" ".join(own if says_nothing else [name, *own]).strip()) or "unknown"


def _without_group(override: str) -> str:
    """An override without its group: n_iterations=4."""
    key, _, value = override.partition("=")
    return f"{key.replace('/', '.').rpartition('.')[2]}={value}"


def _job(folder: Path, checkpoint: str, trust: Collection[str]) -> ComparedJob | None:
    results = read_results(folder)
    if results.get("status") != "done":
        return None
    config, _ = read_checkpoint(find_checkpoint(folder, checkpoint))
    check_trusted(str(folder), built_from(config, "data.", "metrics."), trust)
    return ComparedJob(folder, results, checked(config, "model", "noise"))
