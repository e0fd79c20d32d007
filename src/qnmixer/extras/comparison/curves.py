"""Validation PSNR during training, over steps and over training time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from qnmixer.engine.reports.pictures import save_figure
from qnmixer.engine.tracking.records import read_metrics
from qnmixer.engine.tracking.sweep_file import as_number
from qnmixer.extras.comparison.methods import ComparedJob, ComparedMethod

_MOST = 8  # curves in a picture


def curve_of(job: ComparedJob) -> list[tuple[int, float, float]]:
    """The validations of a job, by its metrics.csv: (steps, seconds of training alone, mean PSNR)."""
    curve: list[tuple[int, float, float]] = []
    seconds = samples = 0.0
    for row in read_metrics(job.folder / "metrics.csv"):
        if speed := as_number(row.get("train/samples_per_second", "")):  # since the last row with a speed
            now = float(row.get("samples") or samples)
            seconds, samples = seconds + (now - samples) / speed, now
        if decibels := row.get("val/psnr"):
            curve.append((int(row["step"]), seconds, float(decibels)))
    return curve


def draw_curves(path: Path, methods: Sequence[ComparedMethod]) -> bool:
    """Draw the validations of the best methods: a line for each seed; a level for methods that learn nothing.

    A validation that is not a finite number is a gap. Returns False, and draws nothing, if none was validated twice.
    """
    found = [(method, its) for method in methods if (its := [c for job in method.done if (c := curve_of(job))])]
    learning = [(method.name, its) for method, its in found if method.steps is not None and max(map(len, its)) > 1]
    if not learning:
        return False
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    for k, (name, seeds) in enumerate(learning[:_MOST]):
        for n, curve in enumerate(seeds):
            look = {"color": f"C{k}", "label": f"_{name}" if n else name, "lw": 1.2}
            at_steps, seconds, psnrs = (np.array(its) for its in zip(*curve, strict=True))
            for axes, at in zip(both, (at_steps, seconds / 60), strict=True):
                axes.plot(at, psnrs, ".-", **look)
    ends = [curve[-1][2] for _, seeds in learning for curve in seeds if np.isfinite(curve[-1][2])]
    for axes, label in zip(both, ("steps", "training time, minutes"), strict=True):
        for method, its in found:
            if method.steps is None:
                level = float(np.mean([curve[-1][2] for curve in its]))
                axes.axhline(level, color="0.4", linestyle="--", label=f"{method.name}, {level:.1f} dB")
        axes.set(xlabel=label, xlim=(0, None), ylim=(min(ends) - 4 if ends else None, None))  # the start is far below
        axes.grid(alpha=0.3)
    both[0].set_ylabel("validation PSNR, dB")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    save_figure(figure, path)
    return True
