"""The methods of a comparison: jobs of sweeps that trained the same, but for their seeds.

What a job has trained says its checkpoint, which has all its settings, and results.json for the user's own code. The
words of a command line do not: the file that they name may have been edited, and 1e-3 is 0.001.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qnmixer.data.slices import shortlist
from qnmixer.data.splits import Overlap
from qnmixer.evaluation.pictures import SliceImages
from qnmixer.evaluation.scores import Conditions, ImageScore, by_patient
from qnmixer.evaluation.statistics import Scores, Seeds, Statistic, difference, spread
from qnmixer.files import digest
from qnmixer.reconstruction.checkpoints import Checkpoint, built_from
from qnmixer.reconstruction.weights import find_checkpoint
from qnmixer.runs.loggers import without_folders
from qnmixer.runs.records import as_number, own_modules, read_results
from qnmixer.runs.sweeps import jobs_of
from qnmixer.runs.trained_settings import what_is_trained
from qnmixer.settings.compose import of_hydra, values_of
from qnmixer.settings.plugins import check_trusted
from qnmixer.settings.run import Config, checked

_OF_NO_METHOD = ("seed", "data.seed", "tags", "test_after_training")
"""Keys that change no method. Jobs that differ in these only are one method."""
_OF_NO_NAME = ("logger", "evaluation", "resume", "trainer.accelerator")
"""What the words of runs may have too, and no name of a method."""


@dataclass
class ComparedJob:
    """One job of a sweep, or a run, that is done, and what its evaluation gave."""

    folder: Path  # of a run also a file
    results: dict[str, Any]
    config: Config
    scores: list[ImageScore] = field(default_factory=list)
    test: Conditions | None = None
    title: str = ""  # of its test
    # What it has trained, as `what_is_trained` gives it, and digests of its code
    trained: dict[str, Any] = field(default_factory=dict)

    @property
    def seeds(self) -> Seeds:
        """Those of the weights and of the data."""
        return self.config.seed, self.config.data.seed

    @property
    def method(self) -> str:
        """A digest of what it has trained, with numbers by value: 1 is 1.0."""
        trained = {key: float(value) if type(value) is int else value for key, value in self.trained.items()}
        return digest(trained, sort_keys=True)

    @property
    def name(self) -> str:
        """Its folder, with that of its sweep."""
        return f"{self.folder.parent.name}/{self.folder.name}"


@dataclass
class ComparedMethod:
    """Jobs that differ only in their seed."""

    name: str
    jobs: list[ComparedJob]  # those that are done, one for each seed
    n_seeds: int  # different seeds, also of jobs that are not done
    n_parameters: int = 0
    trained: Overlap = field(default_factory=Overlap)
    # Jobs that are done, and have the seed of another one. They do not count.
    repeats: list[ComparedJob] = field(default_factory=list)

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
        return [
            replace(self, jobs=jobs, n_seeds=len(jobs), repeats=self.repeats if number == 0 else [])
            for number, jobs in enumerate(groups.values())
        ]

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
    """The result of `compare`."""

    sources: list[Path]  # sweeps and runs
    methods: list[ComparedMethod]  # sorted by PSNR; those without a score come last
    titles: dict[str, str] = field(default_factory=dict)  # headings of all metrics by name
    # By test and number, by all methods, to look at.
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
        names = [shortlist([job.name for method in table for job in method.jobs]) for table in self.tables]
        jobs = "; ".join(f"test {n}: {listing}" for n, listing in enumerate(names, 1))
        return (
            f"Jobs had other tests, which differ in {' and '.join(fields)}, so each has its own table. Jobs of {jobs}"
        )


Words = dict[str, str]  # the overrides of a job, by key


def methods_of(
    sweeps: Sequence[Path], checkpoint: str = "best", trust: Collection[str] = (), runs: Sequence[Path] = ()
) -> list[ComparedMethod]:
    """Group the jobs of sweeps, and runs, into methods: jobs that trained the same, but for their seeds.

    Each has its own name. A job that is not done belongs to a method whose jobs have the same words.

    Raises PluginError for a job with the user's own code, unless `trust` has its modules.
    """
    words = {folder: _words(overrides) for sweep in sweeps for folder, overrides in jobs_of(sweep).items()}
    words |= {run: _words(read_results(run).get("overrides", [])) for run in runs}
    done = {folder: job for folder in words if (job := _job(folder, checkpoint, trust)) is not None}
    # What a job that is not done would have trained, only its words can say: those of a job that is done, or its own.
    methods = {folder: job.method for folder, job in done.items()}
    by_words = {_by_value(words[folder]): method for folder, method in reversed(methods.items())}
    groups: dict[Any, list[Path]] = {}
    for folder, own in words.items():
        groups.setdefault(methods.get(folder) or by_words.get(_by_value(own)) or _by_value(own), []).append(folder)
    # A method is named after its first job that is done.
    first = [next((folder for folder in group if folder in done), group[0]) for group in groups.values()]
    names = _names([words[folder] for folder in first], [done.get(folder) for folder in first])
    return [_method(name, group, words, done) for name, group in zip(names, groups.values(), strict=True)]


def _words(overrides: Sequence[str]) -> Words:
    return dict(override.lstrip("+").partition("=")[::2] for override in overrides if not of_hydra(override))


def _by_value(words: Words) -> tuple[tuple[str, float | str], ...]:
    """The overrides that say what a job trains, sorted. Numbers are compared by value: 1e-3 is 0.001."""
    of_method = [(key, text) for key, text in words.items() if key not in _OF_NO_METHOD]
    return tuple(sorted((key, text if (number := as_number(text)) is None else number) for key, text in of_method))


def _method(
    name: str, folders: Sequence[Path], words: Mapping[Path, Words], done: Mapping[Path, ComparedJob]
) -> ComparedMethod:
    by_seeds: dict[Seeds, ComparedJob] = {}
    jobs = [done[folder] for folder in folders if folder in done]
    for job in jobs:
        by_seeds.setdefault(job.seeds, job)
    repeats = [job for job in jobs if by_seeds[job.seeds] is not job]
    # A job that is not done counts by its seeds too; if its words do not tell them, as one of its own.
    begun = {_seeds(words[folder]) or folder for folder in folders if folder not in done}
    return ComparedMethod(name, [*by_seeds.values()], len(by_seeds.keys() | begun), repeats=repeats)


def _seeds(words: Words) -> tuple[float, float] | None:
    """The seeds of a job that is not done, if its words tell them."""
    seed = as_number(words.get("seed", ""))
    data_seed = as_number(words.get("data.seed", "")) if "data.seed" in words else seed
    return None if seed is None or data_seed is None else (seed, data_seed)


def _names(words: Sequence[Words], jobs: Sequence[ComparedJob | None]) -> list[str]:
    """A name for each method that no other has: its network, or the overrides in which it differs, or both.

    Methods with equal overrides have the settings in which they differ, or a digest of their code, in their names.
    """
    # What all methods have in common tells none from another.
    varying = [key for key in _varying(words) if key not in _OF_NO_METHOD and not key.startswith(_OF_NO_NAME)]
    overrides = [[f"{key}={own[key]}" for key in varying if key in own] for own in words]
    networks = [job.config.model.title if job else "" for job in jobs]
    names = [_name_of(own, network, overrides, networks) for own, network in zip(overrides, networks, strict=True)]
    # Equal words trained different things where a file or the code was edited in between.
    names = [f"{name}{_settings_apart(job, name, names, jobs)}" for name, job in zip(names, jobs, strict=True)]
    # A name is for tables that are published: without folders of this machine. Those may have been all that differed.
    names = [without_folders(name) for name in names]
    return [f"{name} ({names[:n].count(name) + 1})" if name in names[:n] else name for n, name in enumerate(names)]


def _varying(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys that have not the same value in all mappings."""
    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    return [key for key in keys if len({repr(mapping.get(key)) for mapping in mappings}) > 1]


def _name_of(own: Sequence[str], network: str, overrides: Sequence[Sequence[str]], networks: Sequence[str]) -> str:
    """The name of a method, from its overrides and its network, beside those of all methods."""
    namesakes = [words for words, other in zip(overrides, networks, strict=True) if other == network]
    # Overrides that all methods of this network have say no more than its name.
    words = [_without_group(word) for word in own if not network or not all(word in words for words in namesakes)]
    # Where all methods have one network, its name says nothing.
    only_words = words and len(namesakes) == len(networks)
    return " ".join(words if only_words else [network, *words]).strip() or "unknown"


def _settings_apart(
    job: ComparedJob | None, name: str, names: Sequence[str], jobs: Sequence[ComparedJob | None]
) -> str:
    """The settings of a job that tell it from others of its name, each after a blank."""
    if job is None:
        return ""
    namesakes = [other.trained for other, of_other in zip(jobs, names, strict=True) if other and of_other == name]
    return "".join(f" {_without_group(f'{key}={job.trained.get(key)}')}" for key in _varying(namesakes))


def _without_group(override: str) -> str:
    """An override without its group: n_iterations=4."""
    key, _, value = override.partition("=")
    return f"{key.replace('/', '.').rpartition('.')[2]}={value}"


def _job(folder: Path, checkpoint: str, trust: Collection[str]) -> ComparedJob | None:
    results = read_results(folder)
    if folder.is_dir() and results.get("status") != "done":  # a file has weights, and no record
        return None
    source = Checkpoint(find_checkpoint(folder, checkpoint))
    check_trusted(str(folder), built_from(source.config, "data.", "metrics."), [*trust, *own_modules(folder)])
    trained = what_is_trained(source.settings)
    words = values_of(results.get("overrides", []))  # a resumed run has read its weights before
    trained |= {key: words[key] for key in ("finetune", "finetune_strict") if key in words}
    trained |= {f"code.{module}": mark[:6] for module, mark in results.get("code", {}).items()}
    return ComparedJob(folder, results, checked(source.config, "model", "noise"), trained=trained)
