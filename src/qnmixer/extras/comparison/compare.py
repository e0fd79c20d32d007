"""Evaluate every job of a sweep on the same slices and noisy sinograms, and measure the cost of each method."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, mode
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from rich.console import Console
from torch import Tensor
from torch.utils.data import default_collate

from qnmixer.engine.batch import Batch
from qnmixer.engine.checkpoints.reading import find_checkpoint, load_weights, split_of
from qnmixer.engine.config import Config, effective_batch, override, to_plain
from qnmixer.engine.config.commands import CompareConfig, needs_root, parse_evaluate
from qnmixer.engine.config.compose import compose, quoted
from qnmixer.engine.config.data import DataConfig, PhantomData
from qnmixer.engine.config.rules import one_scale
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.splits import RunSplit, SplitRecord
from qnmixer.engine.evaluation.evaluate import evaluate
from qnmixer.engine.evaluation.scores import Evaluation, ImageScore, used_in_training
from qnmixer.engine.evaluation.slices import other_slices
from qnmixer.engine.parallel.devices import choose_device
from qnmixer.engine.reconstructor import Reconstructor, build_geometry
from qnmixer.engine.reports.pictures import SliceImages
from qnmixer.engine.tracking.loggers import device_name
from qnmixer.engine.tracking.records import read_metrics
from qnmixer.engine.tracking.results import duration
from qnmixer.engine.tracking.sweep_file import as_number
from qnmixer.errors import CheckpointError, ConfigError, DataError, first_line
from qnmixer.extras.comparison.methods import ComparedJob, ComparedMethod, Comparison, Cost, methods_of, scan_under_test
from qnmixer.files import digest

FBP = "FBP"
_TIMED = 5  # reconstructions; their median is the result
_SECONDS_TO_TIME = 10.0


def compare(config: CompareConfig, sweeps: list[Path], console: Console) -> Comparison:
    """Evaluate every finished job of a sweep, or of several together.

    Raises ConfigError if no job is done, DataError if no test is possible.
    """
    methods = methods_of(sweeps, config.checkpoint, config.trust)
    if not any(method.done for method in methods):
        jobs = [f"job {job.folder.name}: {job.problem}" for method in methods for job in method.jobs]
        where = ", ".join(map(str, sweeps))
        raise ConfigError(f"no job of {where} is done ({'; '.join(jobs[:3]) or 'it has no jobs'}): train them first")
    measuring = _Measuring(config, methods)
    tests, notes = [], []
    for test in config.sets:
        start = time.monotonic()
        try:
            n_jobs, n_images, more = measuring.run(test)
            line = f"{test}: {n_jobs} jobs on {n_images} slices, {duration(time.monotonic() - start)}"
            tests.append(test)
            notes += more
        except (CheckpointError, ConfigError, DataError) as error:
            line = f"{test} is left out: {first_line(error)}"
            notes.append(line)
            measuring.forget(test)
        console.print(line, highlight=False, soft_wrap=True)
    if not tests:
        raise DataError(notes[0])
    steps = [method.steps for method in methods if method.steps is not None]
    usual = {None, *([mode(steps)] if steps else [])}
    methods.sort(key=lambda method: (method.steps not in usual, -method.psnr(tests[0])))
    places = [method.name for method in methods]
    for of in (of for its in measuring.slices.values() for of in its.values()):
        of.methods.sort(key=lambda method: places.index(method.name))
    slices = {test: [*measuring.slices[test].values()] for test in tests}
    return Comparison(sweeps, tests, methods, slices, notes, device_name(measuring.device.type))


class _Measuring:
    """The jobs of a sweep while they are measured; results go into `methods`."""

    def __init__(self, config: CompareConfig, methods: list[ComparedMethod]) -> None:
        self.config, self.methods = config, methods
        self.device = choose_device(config.accelerator)
        self.slices: dict[str, dict[int, SliceImages]] = {}  # test → number → by all methods, to look at
        self._tested: dict[str, list[dict[str, Any]]] = {}  # test → the config of each job
        self._fbp = None if FBP in {method.network for method in methods} else ComparedMethod(FBP, [], FBP)
        if self._fbp is not None:
            methods.append(self._fbp)

    def run(self, test: str) -> tuple[int, int, list[str]]:
        """Evaluate all jobs on one test. Returns how many jobs and slices there are, and notes.

        Raises ConfigError or DataError for a test that is not possible.
        """
        its_jobs = [(method, job) for method in self.methods for job in sorted(method.done, key=lambda job: job.seeds)]
        jobs = [(method, job, *config_of(self.config, job, test)) for method, job in its_jobs]
        what = [to_plain(config) for _, _, config, _ in jobs]
        if (same := next((name for name, its in self._tested.items() if its == what), None)) is not None:
            raise ConfigError(f"for this sweep it is the same as {same}")
        settings = self.config.evaluation
        if any(method.measured for method in self.methods):  # one slice of each further test
            settings = replace(settings, n_pictures=1)
        self._tested[test], self.slices[test] = what, {}
        trained: dict[str, int] = {}  # the most slices that a job was trained on, by method
        for method, job, config, own in jobs:
            checkpoint = find_checkpoint(job.folder, self.config.checkpoint)
            record = split_of(checkpoint)
            data = _data(config, record if own else None)
            module = Reconstructor(config)
            load_weights(module, checkpoint)
            doing = f"{test}, {method.name}, job {job.folder.name}"
            found = evaluate(module, data, self.config.split, settings, self.device, doing)
            if record and method.steps is not None:  # TV and FBP learn nothing
                trained[method.name] = max(data.split.trained(self.config.split, record), trained.get(method.name, 0))
            self._keep(method, found.methods[-1], test, job, config, found)
            measured = [method]
            if self._fbp is not None:
                if _names(found.of(FBP)) not in map(_names, self._fbp.measured.get(test, {}).values()):
                    self._keep(self._fbp, FBP, test, job, config, found)
                measured.append(self._fbp)
            for of in measured:
                if of.cost is None:
                    of.cost = _cost(of, module, data, self.config.split)
        if self._fbp is not None and len({method.scans[test] for method in self.methods if method.done}) > 1:
            self._fbp.measured.pop(test)  # it would be only one of several FBPs
        n_images = max(len(its) for method in self.methods for its in method.measured.get(test, {}).values())
        notes = []
        if names := [name for name, n in trained.items() if n]:
            notes.append(f"{test}, {', '.join(names)}: {used_in_training(max(trained.values()))}")
        if split_anew(self.methods, test):
            notes.append(
                f"{test}: its jobs have different test slices, because data.seed splits the patients: data.seed=1 "
                "gives all seeds the same"
            )
        return len(jobs), n_images, notes

    def _keep(
        self, method: ComparedMethod, name: str, test: str, job: ComparedJob, config: Config, found: Evaluation
    ) -> None:
        """Keep the scores of a method, which an evaluation calls `name`; of its first job also the images."""
        for number in found.pictured if test not in method.measured else ():
            of = found.slices[number]
            images = next(it for it in of.methods if it.name == name)
            shown = self.slices[test].setdefault(number, SliceImages(of.name, of.truth, []))
            if torch.equal(shown.truth, of.truth):  # another job may have other slices
                shown.methods.append(replace(images, name=method.name))
        method.measured.setdefault(test, {})[job.seeds] = found.of(name)
        method.scans[test] = digest(scan_under_test(config), sort_keys=True)
        if config.data.own_range:
            method.own_range.add(test)

    def forget(self, test: str) -> None:
        """Drop the results of a test that was not possible."""
        for method in self.methods:
            method.measured.pop(test, None)


def config_of(compared: CompareConfig, job: ComparedJob, test: str) -> tuple[Config, bool]:
    """The training config of a job with the overrides of a test. Phantoms and noise use the test's seed.

    Also returns whether the slices are those of the run, so that its split applies.
    """
    assert job.config is not None
    overrides, trained, own = compared.sets[test], job.config, True
    try:
        if any(item.startswith("data=") for item in overrides):
            if needs_root(overrides):
                overrides = [*overrides, f"data.root={quoted(Path(str(compared.root)))}"]
            chosen = parse_evaluate(compose("evaluate", ["run=.", *overrides]))
            assert isinstance(chosen.data, DataConfig)
            data, own = other_slices(chosen.data, trained, overrides)
            config = replace(trained, data=data, noise=chosen.noise or trained.noise)
            one_scale(config)
        else:
            config = override(trained, overrides)
    except ConfigError as error:
        raise ConfigError(f"{error} (sets.{test})") from error
    of_own_class = type(config.data) is DataConfig and _data(config, None).measured
    if config.data.measured or of_own_class:  # a scanner's sinograms have their own noise
        config.noise = trained.noise
    if isinstance(config.data, PhantomData):
        config.data = replace(config.data, seed=compared.seed)
    return replace(config, seed=compared.seed), own


def split_anew(methods: list[ComparedMethod], test: str) -> bool:
    """Whether jobs of the same scan were tested on different slices."""
    scores = [(method.scans[test], its) for method in methods for its in method.measured.get(test, {}).values()]
    return len({(scan, *_names(its)) for scan, its in scores}) > len({scan for scan, _ in scores})


def _names(scores: list[ImageScore]) -> list[str]:
    return [score.slice for score in scores]


def _data(config: Config, record: SplitRecord | None) -> SliceDataModule:
    return SliceDataModule(config.data, split=RunSplit(record), geometry=build_geometry(config))


@torch.no_grad()
def _cost(method: ComparedMethod, module: Reconstructor, data: SliceDataModule, split: str) -> Cost:
    """What the runs of a method recorded, and the time of one reconstruction by its trained module."""
    done = method.done
    rows = [(job, row) for job in done for row in read_metrics(job.folder / "metrics.csv")]
    steps = [
        effective_batch(job.config) / speed
        for job, row in rows
        if job.config is not None and (speed := as_number(row.get("train/samples_per_second", "")))
    ]
    seconds = [job.results["seconds"] for job in done if "seconds" in job.results]
    memory = [job.results.get("memory", {}).get("measured_step") for job in done]
    norms = [float(norm) for _, row in rows if (norm := row.get("train/grad_norm_max"))]
    batch: Batch = move_data_to_device(default_collate([data.dataset(split)[0]]), module.device)
    reconstruct = module.network if done else module.projector.fbp
    return Cost(
        parameters=sum(p.numel() for p in module.network.parameters()) if done else 0,
        train_seconds=mean(seconds) if seconds else None,
        step_seconds=median(steps) if steps else None,
        step_mib=max((mib for mib in memory if mib is not None), default=None),
        inference_seconds=_seconds_of(reconstruct, module.measure(batch, "test")),
        largest_gradient=max(norms, default=None),
    )


def _seconds_of(reconstruct: Callable[[Tensor], object], y: Tensor) -> float:
    """Median time of a reconstruction, after one that does not count."""
    times: list[float] = []
    while len(times) <= _TIMED and (len(times) < 2 or sum(times) < _SECONDS_TO_TIME):
        start = time.perf_counter()
        reconstruct(y)
        if y.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[1:])
