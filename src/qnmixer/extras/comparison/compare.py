"""Evaluate every job of a sweep on the same slices and noisy sinograms, and measure the cost of each method."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median, mode
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from rich.console import Console
from torch import Tensor
from torch.utils.data import default_collate

from qnmixer.engine.batch import Batch, to_hu
from qnmixer.engine.checkpoints.reading import find_checkpoint, load_weights, read_checkpoint, split_of
from qnmixer.engine.checkpoints.weights_file import digest_of_weights
from qnmixer.engine.config import Config, effective_batch, override, to_plain
from qnmixer.engine.config.commands import CompareConfig, needs_root, parse_evaluate
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.data import DataConfig, PairData, PhantomData
from qnmixer.engine.config.overrides import quoted
from qnmixer.engine.config.rules import one_scale
from qnmixer.engine.data.cache import list_files
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.splits import RunSplit
from qnmixer.engine.evaluation.evaluate import evaluate, pictured, shown_iterates
from qnmixer.engine.evaluation.scores import ImageScore, caption_of, used_in_training
from qnmixer.engine.evaluation.slices import other_slices
from qnmixer.engine.optimization.metrics import psnr, ssim
from qnmixer.engine.parallel.devices import choose_device
from qnmixer.engine.reconstructor import Reconstructor, build_geometry, method_name
from qnmixer.engine.reports.pictures import MethodImages, SliceImages
from qnmixer.engine.reports.progress import progress
from qnmixer.engine.tracking.loggers import device_name
from qnmixer.engine.tracking.metrics_file import read_metrics
from qnmixer.engine.tracking.results import duration, git_commit, versions
from qnmixer.errors import CheckpointError, ConfigError, DataError, first_line
from qnmixer.extras.comparison.methods import ComparedJob, ComparedMethod, Comparison, Cost, methods_of, scan_under_test
from qnmixer.files import digest, write_text

FBP = "FBP"
_TIMED = 5  # reconstructions; their median is the result
_SECONDS_TO_TIME = 10.0


def compare(config: CompareConfig, sweeps: list[Path], output: Path, console: Console) -> Comparison:
    """Evaluate every finished job of a sweep, or of several together.

    Scores of a network are stored below `output`. They are used again while its weights, the test, its slices and the
    code of this repository are unchanged. If you change classes of your own, or their files, delete the scores.

    Raises ConfigError if no job is done, DataError if no test is possible.
    """
    methods = methods_of(sweeps, config.checkpoint, config.trust)
    if not any(method.done for method in methods):
        jobs = [f"job {job.folder.name}: {job.problem}" for method in methods for job in method.jobs]
        where = ", ".join(map(str, sweeps))
        raise ConfigError(f"no job of {where} is done ({'; '.join(jobs[:3]) or 'it has no jobs'}): train them first")
    measuring = _Measuring(config, output / "evaluations", methods)
    tests, notes = [], []
    for test in config.sets:
        try:
            line = measuring.run(test, console)
            tests.append(test)
            if (trained := measuring.trained.get(test)) is not None:
                notes.append(f"{test}, {', '.join(trained)}: {used_in_training(max(trained.values()))}")
            if split_anew(methods, test):
                notes.append(
                    f"{test}: its jobs have different test slices, because data.seed splits the patients: data.seed=1 "
                    "gives all seeds the same"
                )
        except (CheckpointError, ConfigError, DataError) as error:
            line = f"{test} is left out: {first_line(error)}"
            notes.append(line)
            for method in methods:
                method.measured.pop(test, None)
        console.print(line, highlight=False, soft_wrap=True)
    if not tests:
        raise DataError(notes[0])
    steps = [method.steps for method in methods if method.steps is not None]
    usual = {None, *([mode(steps)] if steps else [])}
    methods.sort(key=lambda method: (method.steps not in usual, -method.psnr(tests[0])))
    slices = measuring.look(tests)
    return Comparison(sweeps, tests, methods, slices, notes, device_name(measuring.device.type))


def split_anew(methods: list[ComparedMethod], test: str) -> bool:
    """Whether jobs of the same scan were tested on different slices."""
    scores = [(method.scans[test], its) for method in methods for its in method.measured.get(test, {}).values()]
    return len({(scan, *_slices(its)) for scan, its in scores}) > len({scan for scan, _ in scores})


def _slices(scores: list[ImageScore]) -> list[str]:
    return [score.slice for score in scores]


class _Measuring:
    """The jobs of a sweep during the evaluation; results go into `methods`."""

    def __init__(self, config: CompareConfig, kept: Path, methods: list[ComparedMethod]) -> None:
        self.config, self.kept, self.methods = config, kept, methods
        self.device = choose_device(config.accelerator)
        self.trained: dict[str, dict[str, int]] = {}  # test → method → the most slices that a job was trained on
        self._tested: dict[str, list[dict[str, Any]]] = {}  # test → the config of each job
        self._code = git_commit() or versions()["qnmixer"]
        self._fbp = None if FBP in {method.network for method in methods} else ComparedMethod(FBP, [], FBP)
        if self._fbp is not None:
            methods.append(self._fbp)

    def run(self, test: str, console: Console) -> str:
        """Evaluate all jobs on one test. Returns a line about it.

        Raises ConfigError or DataError for a test that is not possible.
        """
        start, n_before = time.monotonic(), 0
        jobs = [(method, job, *self._config(job, test)) for method in self.methods for job in method.done]
        what = [to_plain(config) for _, _, config, _ in jobs]
        if (same := next((name for name, its in self._tested.items() if its == what), None)) is not None:
            raise ConfigError(f"for this sweep it is the same as {same}")
        self._tested[test] = what
        for method, job, config, own in progress(jobs, test, "job", console):
            scores, before, n_trained = self._scores(job, config, own)
            if n_trained and method.steps is not None:  # TV and FBP learn nothing
                of_test = self.trained.setdefault(test, {})
                of_test[method.name] = max(n_trained, of_test.get(method.name, 0))
            n_before += before
            by_name = {name: [s for s in scores if s.method == name] for name in (FBP, method_name(config))}
            method.measured.setdefault(test, {})[job.seeds] = by_name[method_name(config)]
            method.scans[test] = digest(scan_under_test(config), sort_keys=True)
            if config.data.own_range:
                method.own_range.add(test)
            if self._fbp is not None:
                self._fbp.own_range |= method.own_range
                known, its = self._fbp.measured.setdefault(test, {}), by_name[FBP]
                if _slices(its) not in map(_slices, known.values()):
                    known[job.seeds] = its
                self._fbp.scans.setdefault(test, method.scans[test])
        if self._fbp is not None and len({method.scans[test] for method in self.methods if method.measured}) > 1:
            self._fbp.measured.pop(test)  # it would be only one of several FBPs
        n_images = max((len(scores) for m in self.methods for scores in m.measured.get(test, {}).values()), default=0)
        again = f" ({n_before} of them before)" if n_before else ""
        return f"{test}: {len(jobs)} jobs on {n_images} slices{again}, {duration(time.monotonic() - start)}"

    def look(self, tests: list[str]) -> dict[str, list[SliceImages]]:
        """Reconstruct slices by all methods, several of the first test and one of each other, and measure the costs."""
        slices: dict[tuple[str, int], SliceImages] = {}
        first = next(job for method in self.methods for job in method.done)
        for method in self.methods:
            if not method.measured:
                continue
            job = min(method.done, key=lambda job: job.seeds, default=first)
            for test in tests:
                config, own = self._config(job, test)
                module, dataset = self._module(job, config), self._slices(job, config, own).dataset(self.config.split)
                n_pictures = self.config.evaluation.n_pictures if test == tests[0] else 1
                for index in sorted(pictured(len(dataset), n_pictures)):
                    batch: Batch = move_data_to_device(default_collate([dataset[index]]), self.device)
                    truth, name = to_hu(batch, batch["image"])[0, 0].cpu(), batch["name"][0]
                    y = module.measure(batch, "test")
                    if method.cost is None:
                        method.cost = _cost(method, module, y)
                    of = slices.setdefault((test, index), SliceImages(name, truth, []))
                    if of.name == name and of.truth.shape == truth.shape:
                        of.methods.append(_reconstructed(method, module, batch, y))
        return {
            test: [replace(it, name=f"slice {n}") for (of, n), it in slices.items() if of == test] for test in tests
        }

    def _config(self, job: ComparedJob, test: str) -> tuple[Config, bool]:
        """The training config of a job with the overrides of a test. Phantoms and noise use the test's seed.

        Also returns whether the slices are those of the run, so that its split applies.
        """
        assert job.config is not None
        overrides, trained, own = self.config.sets[test], job.config, True
        try:
            if any(item.startswith("data=") for item in overrides):
                if needs_root(overrides):
                    overrides = [*overrides, f"data.root={quoted(Path(str(self.config.root)))}"]
                chosen = parse_evaluate(compose("evaluate", ["run=.", *overrides]))
                assert isinstance(chosen.data, DataConfig)
                data, own = other_slices(chosen.data, trained, overrides)
                config = replace(trained, data=data, noise=chosen.noise or trained.noise)
                one_scale(config)
            else:
                config = override(trained, overrides)
        except ConfigError as error:
            raise ConfigError(f"{error} (sets.{test})") from error
        of_own_class = type(config.data) is DataConfig and self._slices(job, config, False).measured
        if config.data.measured or of_own_class:  # a scanner's sinograms have their own noise
            config.noise = trained.noise
        if isinstance(config.data, PhantomData):
            config.data = replace(config.data, seed=self.config.seed)
        return replace(config, seed=self.config.seed), own

    def _scores(self, job: ComparedJob, config: Config, own: bool) -> tuple[list[ImageScore], bool, int]:
        """The scores of a job on one test, whether they were stored before, and how many slices it was trained on."""
        split, window = self.config.split, self.config.evaluation.window
        checkpoint = find_checkpoint(job.folder, self.config.checkpoint)
        weights = digest_of_weights(read_checkpoint(checkpoint)[1])
        data = self._slices(job, config, own)
        what = [self._code, weights, to_plain(config), split, window, self.device.type, _identity(data, split)]
        path = self.kept / f"{digest(what, sort_keys=True)}.json"
        record = split_of(checkpoint)
        n_trained = data.split.trained(split, record) if record else 0
        if (before := _scores_of(path)) is not None:
            return before, True, n_trained
        scores = evaluate(self._module(job, config), data, split, self.config.evaluation, self.device).scores
        write_text(path, json.dumps([asdict(score) for score in scores]) + "\n")
        return scores, False, n_trained

    def _slices(self, job: ComparedJob, config: Config, own: bool) -> SliceDataModule:
        record = split_of(find_checkpoint(job.folder, self.config.checkpoint)) if own else None
        return SliceDataModule(config.data, split=RunSplit(record), geometry=build_geometry(config))

    def _module(self, job: ComparedJob, config: Config) -> Reconstructor:
        module = Reconstructor(config)
        load_weights(module, find_checkpoint(job.folder, self.config.checkpoint))
        return module.to(self.device).eval()


def _identity(data: SliceDataModule, split: str) -> list[object]:
    """What tells the slices of a split from others in the same place: names, patients, digests of pixels, files.

    Only folders of slices have digests, and only the public sets a list of files.
    """
    data.setup()
    part, places = data.parts[split], []
    if isinstance(data.config, PairData):
        places = [
            Path(root).expanduser() for key, root in data.config.keywords().items() if key.endswith("root") and root
        ]
    files = [asdict(file) for place in places for file in list_files(place)]
    names = [part.source.name(index) for index in range(len(part.source))]
    return [names, part.patients, data.split.digests(split), files]


@torch.no_grad()
def _reconstructed(method: ComparedMethod, module: Reconstructor, batch: Batch, y: Tensor) -> MethodImages:
    images = shown_iterates(module.network, y) if method.jobs else [module.projector.fbp(y)]
    x, truth, own_range = images[-1], batch["image"], module.config.data.own_range
    decibels, similarity = (of(x, truth, own_range=own_range).item() for of in (psnr, ssim))
    quality = caption_of(decibels, 100 * similarity)
    return MethodImages(method.name, [to_hu(batch, image)[0, 0].cpu() for image in images], quality)


def _cost(method: ComparedMethod, module: Reconstructor, y: Tensor) -> Cost:
    done = method.done
    parameters = sum(p.numel() for p in module.network.parameters()) if done else 0
    seconds = [job.results["seconds"] for job in done]
    memory = [job.results.get("memory", {}).get("measured_step") for job in done]
    rows = [(job, row) for job in done for row in read_metrics(job.folder / "metrics.csv")]
    steps = [
        effective_batch(job.config) / float(speed)
        for job, row in rows
        if job.config is not None and (speed := row.get("train/samples_per_second"))
    ]
    norms = [float(norm) for _, row in rows if (norm := row.get("train/grad_norm_max"))]
    return Cost(
        parameters=parameters,
        train_seconds=mean(seconds) if seconds else None,
        step_seconds=median(steps) if steps else None,
        step_mib=max((mib for mib in memory if mib is not None), default=None),
        inference_seconds=_seconds_of(module.network if done else module.projector.fbp, y),
        largest_gradient=max(norms, default=None),
    )


@torch.no_grad()
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


def _scores_of(path: Path) -> list[ImageScore] | None:
    """Read the scores in a file; None if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError):
        return [ImageScore(**score) for score in json.loads(path.read_text())]
    return None
