"""Evaluate every job of a sweep, or several runs, on the same slices."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from qnmixer.errors import ConfigError, say, visible
from qnmixer.evaluation.evaluate import evaluate
from qnmixer.evaluation.evaluate_run import on_test
from qnmixer.parallel.devices import choose_device
from qnmixer_studies.comparison.compare_config import CompareConfig
from qnmixer_studies.comparison.methods import Comparison, methods_of


def compare(config: CompareConfig, sweeps: list[Path], overrides: list[str], runs: Sequence[Path] = ()) -> Comparison:
    """Evaluate every finished job of sweeps, and runs, all together.

    Raises ConfigError if no job is done, and CheckpointError, ConfigError or DataError for slices that do not fit.
    """
    sources = [*sweeps, *runs]
    comparison = Comparison(sources, methods_of(sweeps, config.checkpoint, config.trust, runs))
    jobs = [(method, job) for method in comparison.methods for job in method.jobs]
    if not jobs:
        raise ConfigError(f"no job of {', '.join(map(str, sources))} is done: train them first")
    device = choose_device(config.accelerator)
    for method, job in jobs:
        say(visible(f"{method.name}, job {job.folder.name}"))
        module, data, record = on_test(config, str(job.folder), overrides, config.seed)
        evaluation = evaluate(module, data, config.split, config.evaluation, device, config.symmetries)
        if not method.measured:
            for number in evaluation.pictured:
                images = evaluation.slices[number]
                slice_ = comparison.slices.setdefault((evaluation.test, number), replace(images, methods=[]))
                slice_.methods.append(replace(images.methods[-1], name=method.name))
        job.scores = evaluation.scores_of(evaluation.methods[-1])
        job.test, job.title = evaluation.test, evaluation.title
        method.n_parameters = sum(p.numel() for p in module.network.parameters())
        if record and method.n_parameters:  # TV and FBP learn nothing
            method.trained = max(method.trained, data.trained(config.split, record))
        comparison.titles |= evaluation.titles
    comparison.methods = [part for method in comparison.methods for part in method.by_conditions()]
    comparison.methods.sort(key=lambda method: -psnr.mean if (psnr := method.spread("psnr")) else inf)
    places = [method.name for method in reversed(comparison.methods)]  # in pictures the best one stands last
    for slice_ in comparison.slices.values():
        slice_.methods.sort(key=lambda method: places.index(method.name))
    return comparison
