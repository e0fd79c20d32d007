"""Validation PSNR during training, over steps and over training time."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from qnmixer.engine.reports.pictures import save_figure
from qnmixer.engine.tracking.records import read_metrics
from qnmixer.engine.tracking.sweep_file import as_number
from qnmixer.extras.comparison.methods import ComparedJob, ComparedMethod

_MOST = 8  # curves in a picture


@dataclass(frozen=True)
class Validation:
    """The mean PSNR over the validation slices, after so many steps and seconds of training."""

    step: int
    seconds: float  # of training alone: data, forward, backward, optimizer
    psnr: float


def curve_of(job: ComparedJob) -> list[Validation]:
    """The validations of a job, by its metrics.csv."""
    curve: list[Validation] = []
    seconds = samples = 0.0
    for row in read_metrics(job.folder / "metrics.csv"):
        if speed := as_number(row.get("train/samples_per_second", "")):  # since the last row with a speed
            now = float(row.get("samples") or samples)
            seconds, samples = seconds + (now - samples) / speed, now
        if decibels := row.get("val/psnr"):
            curve.append(Validation(int(row["step"]), seconds, float(decibels)))
    return curve


def draw_curves(path: Path, methods: Sequence[ComparedMethod]) -> bool:
    """Draw the validations of the best methods: a line for each seed; a level for methods that learn nothing.

    A validation that is not a finite number is a gap. Returns False, and draws nothing, if none was validated twice.
    """
    found = {method.name: [its for job in method.done if (its := curve_of(job))] for method in methods}
    learning = [method.name for method in methods if method.steps is not None]
    curves = {name: found[name] for name in learning if any(len(its) > 1 for its in found[name])}
    levels = {name: mean(its[-1].psnr for its in of) for name, of in found.items() if of and name not in learning}
    if not curves:
        return False
    longest = max(its[-1].seconds for of in curves.values() for its in of)
    unit, scale = ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0) if longest > 120 else ("seconds", 1.0)
    ends = [value for of in curves.values() for its in of if isfinite(value := its[-1].psnr)]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    steps, times = figure.subplots(1, 2, sharey=True)
    for k, (name, seeds) in enumerate([*curves.items()][:_MOST]):
        for n, its in enumerate(seeds):
            psnrs, look = [it.psnr for it in its], {"color": f"C{k}", "label": f"_{name}" if n else name, "lw": 1.2}
            steps.plot([it.step for it in its], psnrs, ".-", **look)
            times.plot([it.seconds / scale for it in its], psnrs, ".-", **look)
    for axes, label in ((steps, "steps"), (times, f"training time, {unit}")):
        for k, (name, level) in enumerate(levels.items()):
            axes.axhline(
                level, color=str(0.55 * (k % 2)), linestyle=("--", ":")[k % 2], label=f"{name}, {level:.1f} dB"
            )
        axes.set(xlabel=label, xlim=(0, None), ylim=(min(ends) - 4 if ends else None, None))  # the start is far below
        axes.grid(alpha=0.3)
    steps.set_ylabel("validation PSNR, dB")
    figure.legend(*steps.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    save_figure(figure, path)
    return True
