"""Evaluate every job of a sweep on the same slices and noisy sinograms, and measure the cost of each method."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, mode
from typing import NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from rich.console import Console
from torch import Tensor
from torch.utils.data import default_collate

from qnmixer.engine.batch import Batch
from qnmixer.engine.checkpoints import find_checkpoint, load_weights, split_of
from qnmixer.engine.config.commands import CompareConfig, needs_root, parse_evaluate
from qnmixer.engine.config.compose import compose, quoted
from qnmixer.engine.config.data import LOADING, DataConfig, PhantomData
from qnmixer.engine.config.rules import one_scale
from qnmixer.engine.config.run import Config, effective_batch, override, to_plain
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.splits import RunSplit, SplitRecord
from qnmixer.engine.evaluation.evaluate import evaluate
from qnmixer.engine.evaluation.run import other_slices
from qnmixer.engine.evaluation.scores import Evaluation, data_range, used_in_training
from qnmixer.engine.parallel.devices import choose_device
from qnmixer.engine.reconstructor import Reconstructor, build_geometry
from qnmixer.engine.reports.pictures import SliceImages
from qnmixer.engine.tracking.loggers import device_name
from qnmixer.engine.tracking.records import as_number, duration, read_metrics
from qnmixer.errors import CheckpointError, ConfigError, DataError, first_line
from qnmixer.extras.comparison.methods import ComparedJob, ComparedMethod, Comparison, methods_of
from qnmixer.files import digest

FBP = "FBP"
_TIMED = 5  # reconstructions; their median is the result
_SECONDS_TO_TIME = 10.0
# Keys of the data config that do not change a test slice.
_NOT_OF_TEST = {*LOADING, "seed", "augment", "n_train", "n_val", "train_slices"}


def compare(config: CompareConfig, sweeps: list[Path], console: Console) -> Comparison:
    """Evaluate every finished job of a sweep, or of several together.

    Raises ConfigError if no job is done, DataError if no test is possible.
    """
    methods = methods_of(sweeps, config.checkpoint, config.trust)
    if not any(method.done for method in methods):
        told = [f"job {job.folder.name}: {job.problem}" for method in methods for job in method.jobs]
        where = ", ".join(map(str, sweeps))
        raise ConfigError(f"no job of {where} is done ({'; '.join(told[:3]) or 'it has no jobs'}): train them first")
    if FBP not in {method.network for method in methods}:
        methods.append(ComparedMethod(FBP, [], FBP))  # each evaluation measures it too
    device = choose_device(config.accelerator)
    found = Comparison(sweeps, methods, device_name(device.type))
    tested: dict[str, object] = {}  # test → the configs of its jobs
    for test in config.sets:
        start = time.monotonic()
        try:
            jobs = [_TestJob(method, job, *config_of(config, job, test)) for method in methods for job in method.done]
            what = [to_plain(job.config) for job in jobs]
            if (same := next((name for name, its in tested.items() if its == what), None)) is not None:
                raise ConfigError(f"for this sweep it is the same as {same}")
            n_images = _measure(config, found, test, jobs, device)
            tested[test] = what
            line = f"{len(jobs)} jobs on {n_images} slices, {duration(time.monotonic() - start)}"
            console.print(f"{test}: {line}", highlight=False, soft_wrap=True)
        except (CheckpointError, ConfigError, DataError) as error:
            found.slices.pop(test, None)
            found.notes.append(f"{test} is left out: {first_line(error)}")
            console.print(found.notes[-1], highlight=False, soft_wrap=True)
    if not found.tests:
        raise DataError(found.notes[0])
    steps = [method.steps for method in methods if method.steps is not None]
    usual = {None, *([mode(steps)] if steps else [])}
    methods.sort(key=lambda method: (method.steps not in usual, -method.psnr(found.tests[0])))
    places = [method.name for method in reversed(methods)]  # in pictures the best one stands last
    for of in (of for its in found.slices.values() for of in its.values()):
        of.methods.sort(key=lambda method: places.index(method.name))
    return found


class _TestJob(NamedTuple):
    """A job that can be evaluated, with its config on a test. `own`: the slices are those of its run."""

    method: ComparedMethod
    of: ComparedJob
    config: Config
    own: bool


def _measure(config: CompareConfig, found: Comparison, test: str, jobs: list[_TestJob], device: torch.device) -> int:
    """Evaluate all jobs on one test. Returns how many slices there are.

    Raises ConfigError or DataError for a test that is not possible.
    """
    # One slice of each further test is shown.
    settings = replace(config.evaluation, n_pictures=1) if found.slices else config.evaluation
    shown = found.slices.setdefault(test, {})
    fbp = next((method for method in found.methods if not method.jobs), None)
    trained: dict[str, int] = {}  # the most slices that a job was trained on, by method
    n_images = 0
    for method, job, of_job, own in jobs:
        checkpoint = find_checkpoint(job.folder, config.checkpoint)
        record = split_of(checkpoint)
        data = _data(of_job, record if own else None)
        module = Reconstructor(of_job)
        load_weights(module, checkpoint)
        doing = f"{test}, {method.name}, job {job.folder.name}"
        evaluation = evaluate(module, data, config.split, settings, device, doing)
        n_images = max(n_images, evaluation.n_images)
        if record and method.steps is not None:  # TV and FBP learn nothing
            trained[method.name] = max(data.split.trained(config.split, record), trained.get(method.name, 0))
        assert job.config is not None
        seeds, scan = (job.config.seed, job.config.data.seed), digest(scan_under_test(of_job), sort_keys=True)
        for of, name in [(method, evaluation.methods[-1]), *([(fbp, FBP)] if fbp else [])]:
            if test not in of.measured:
                _show(shown, evaluation, name, of.name)
            of.scans[test] = scan
            of.measured.setdefault(test, {})[seeds] = evaluation.of(name)
            of.cost = of.cost or _cost(of, module, data, config.split)
    if fbp and len({method.scans[test] for method, *_ in jobs}) > 1:
        fbp.measured.pop(test)  # it would be only one of several FBPs
    if any(job.config.data.own_range for job in jobs):
        found.notes.append(f"{test}: {data_range(own=True)}")
    if names := [name for name, n in trained.items() if n]:
        found.notes.append(f"{test}, {', '.join(names)}: {used_in_training(max(trained.values()))}")
    return n_images


def _show(shown: dict[int, SliceImages], evaluation: Evaluation, name: str, method: str) -> None:
    """Keep the images of a method, which an evaluation calls `name`, of the slices to look at."""
    for number in evaluation.pictured:
        of = evaluation.slices[number]
        its = shown.setdefault(number, SliceImages(of.name, of.truth, []))
        if torch.equal(its.truth, of.truth):  # another method may have other slices
            its.methods.append(replace(next(it for it in of.methods if it.name == name), name=method))


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


def scan_under_test(config: Config) -> object:
    """The settings behind the sinograms of a test that all compared methods must share."""
    plain = to_plain(config)
    data = {key: value for key, value in plain["data"].items() if key not in _NOT_OF_TEST}
    geometry = {key: value for key, value in plain["geometry"].items() if key != "fbp_filter"}
    return [geometry, plain["noise"], data]


def _data(config: Config, record: SplitRecord | None) -> SliceDataModule:
    return SliceDataModule(config.data, split=RunSplit(record), geometry=build_geometry(config))


@torch.no_grad()
def _cost(method: ComparedMethod, module: Reconstructor, data: SliceDataModule, split: str) -> dict[str, float | None]:
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
    return {
        "steps": method.steps,
        "parameters": sum(p.numel() for p in module.network.parameters()) if done else 0,
        "train_seconds": mean(seconds) if seconds else None,
        "step_seconds": median(steps) if steps else None,
        "step_mib": max((mib for mib in memory if mib is not None), default=None),
        "inference_seconds": _seconds_of(reconstruct, module.measure(batch, "test")),
        "largest_gradient": max(norms, default=None),
    }


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
