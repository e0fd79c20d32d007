"""The report of a comparison: tables (terminal, CSV, Markdown), pictures, and one HTML page."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import figure
from rich.box import SIMPLE_HEAD
from rich.console import Console

from qnmixer.engine.config.commands import CompareConfig
from qnmixer.engine.config.run import to_plain
from qnmixer.engine.evaluation.scores import IN_WINDOW
from qnmixer.engine.reports.pictures import SliceImages, draw_slices, save_figure
from qnmixer.engine.reports.terminal import NOTHING, Table, csv_table, in_digits, markdown_table, terminal_table
from qnmixer.engine.tracking.loggers import without_folders
from qnmixer.engine.tracking.records import as_number, duration, git_commit, read_metrics, versions
from qnmixer.extras.comparison.compare import FBP
from qnmixer.extras.comparison.methods import ComparedJob, ComparedMethod, Comparison
from qnmixer.extras.comparison.statistics import Statistic
from qnmixer.extras.page.page import write_page
from qnmixer.files import digest, write_text

CURVES = "comparison_curves.png"
_DRAWN = 8  # a picture, or a table of pairs, has room for so many methods or curves
COSTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "steps": ("steps", "{:,}".format),
    "parameters": ("parameters", "{:,}".format),
    "train_seconds": ("training", duration),
    "step_seconds": ("step, ms", lambda seconds: _milliseconds(seconds)),
    "step_mib": ("step, MiB", "{:,.0f}".format),
    "inference_seconds": ("slice, ms", lambda seconds: _milliseconds(seconds)),
    "largest_gradient": ("largest gradient", "{:.3g}".format),
}
"""Heading and text of each cost. Times and memory depend on the machine, and on its other work."""

Line = dict[str, Any]
"""What is known of one method on one test, by column of comparison.csv. None: not known."""


def write_comparison(folder: Path, comparison: Comparison, config: CompareConfig, console: Console) -> None:
    """Print the tables and write comparison.{csv,md,png,html} and images.csv into a folder.

    If a method was validated during training, it also writes comparison_curves.png.
    """
    lines, tables = lines_of(comparison), tables_of(comparison)
    problems = [(method, job) for method in comparison.methods for job in method.jobs if job.problem]
    notes = comparison.notes + [f"{its.name}, job {_job(comparison, job)}: {job.problem}" for its, job in problems]
    sweeps = ", ".join(sweep.name for sweep in comparison.sweeps)
    title = f"Comparison of {sweeps}"
    made_by = {
        "sweep": sweeps,
        "tests": "; ".join(f"{name} [{', '.join(config.sets[name])}]" for name in comparison.tests),
        "split": f"{config.split}, phantoms and noise of seed {config.seed}, checkpoint {config.checkpoint}",
        "measured": f"{time.strftime('%Y-%m-%d %H:%M %Z')}, on {comparison.device}",
        "commit": git_commit() or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    cells = [[without_folders(cell) if isinstance(cell, str) else cell for cell in line.values()] for line in lines]
    write_text(folder / "comparison.csv", csv_table([[*lines[0]], *cells]))
    write_text(folder / "images.csv", csv_table(_image_lines(comparison)))
    write_text(folder / "comparison.md", _markdown(title, tables, notes, made_by))
    pictures = []
    if drawn := comparison.slices[comparison.tests[0]]:
        draw_slices(folder / "comparison.png", [drawn_of(of) for of in drawn.values()])
        pictures.append("comparison.png")
    if draw_curves(folder / CURVES, comparison.methods):
        pictures.append(CURVES)
    write_page(
        folder / "comparison.html",
        title,
        tables,
        [replace(of, name=f"{test}: {of.name}") for test, its in comparison.slices.items() for of in its.values()],
        made_by | {"notes": "; ".join(notes) or "none"},
        subtitle=f"methods: {len(comparison.methods)}, tests: {', '.join(comparison.tests)} ({config.split} split)",
        order="by test; images.csv has the scores of all",
    )
    for table in tables[:-1]:  # the table of sources is in the files only
        _print(table, console)
    written = ["comparison.html", "comparison.md", "comparison.csv", *pictures, "images.csv"]
    said = [*(f"note: {note}" for note in notes), f"comparison: {folder} ({', '.join(written)})"]
    console.print("\n".join(said), soft_wrap=True, highlight=False)


def drawn_of(of: SliceImages) -> SliceImages:
    """A slice of the picture: the best methods that there is room for, and always FBP."""
    methods = [its for its in of.methods[:-_DRAWN] if its.name == FBP] + of.methods[-_DRAWN:]
    return replace(of, methods=[replace(its, name=fill(its.name, 26)) for its in methods])


def lines_of(comparison: Comparison) -> list[Line]:
    """A line for each test and method, also if nothing was measured. The tables show parts of them."""
    return [_line(comparison, method, test) for test in comparison.tests for method in comparison.methods]


def _line(comparison: Comparison, method: ComparedMethod, test: str) -> Line:
    measured, psnr = method.measured.get(test), method.spread(test, "psnr")
    line: Line = {
        "test": test,
        "method": method.name,
        "status": "measured" if measured else method.jobs[0].problem if method.jobs else "not measured",
        "seeds": psnr and psnr.n_seeds,
        "jobs": len(method.jobs),
        "images": max(map(len, measured.values())) if measured else None,
        "patients": psnr and psnr.n_patients,
    }
    for metric in comparison.titles:
        found = method.spread(test, metric)
        line |= {metric: found and found.mean}
        line |= {f"{metric}_over_{of}": found and getattr(found, f"over_{of}") for of in ("seeds", "patients")}
    line |= {name: method.cost.get(name) for name in COSTS}
    return line | {
        "commit": _joined(map(_commit, method.jobs)),
        "config": _joined(map(config_digest, method.jobs)),
        "trained_on": _joined(map(_hardware, method.jobs)),
        "folders": ", ".join(_job(comparison, job) for job in method.jobs) or "made here",
    }


def pairs_of(comparison: Comparison, test: str) -> list[tuple[ComparedMethod, ComparedMethod, dict[str, Statistic]]]:
    """Pairs of the best methods, without FBP, that have the same sinograms. Methods are sorted: the better first."""
    best = [method for method in comparison.methods if method.measured.get(test) and method.network != FBP][:_DRAWN]
    return [(one, other, found) for one, other in combinations(best, 2) if (found := one.minus(other, test))]


def tables_of(comparison: Comparison) -> list[Table]:
    """The tables: the first test in full, differences, all tests if there are several, costs, sources of the rows."""
    lines, first = lines_of(comparison), comparison.tests[0]
    of_first = [line for line in lines if line["test"] == first]
    tables = [_quality(comparison, first, of_first), _pairs(comparison, first, of_first)]
    if len(comparison.tests) > 1:
        tables.append(_all_tests(comparison, lines))
    return [*(table for table in tables if table.rows), _costs(comparison, of_first), _sources(of_first)]


def _quality(comparison: Comparison, test: str, lines: list[Line]) -> Table:
    shown = _in_full(comparison)
    n_images, n_patients = (max(line[key] or 0 for line in lines) for key in ("images", "patients"))
    rows = []
    for line in lines:
        seeds, jobs = line["seeds"] or 0, line["jobs"]
        row = [line["method"], NOTHING if not jobs else str(seeds) if seeds == jobs else f"{seeds} of {jobs}"]
        for metric in shown:
            row += [_mean(line, metric), _plus_minus(line[f"{metric}_over_patients"], line[metric])]
        if line["psnr"] is None:
            row[2] = line["status"].partition(":")[0]
        rows.append(row)
    return Table(
        f"{test}: {n_images} slices of {n_patients} patients",
        ["method", "seeds", *(heading for title in shown.values() for heading in (title, "patients"))],
        rows,
        "Mean over seeds of the mean over patients, each the mean of its slices, ± standard deviation over seeds. "
        "Next: that over patients. A slice whose patient is not known, as a phantom, counts as a patient. Methods with "
        "another number of training steps stand below the others. The data range is 1, if no note says another one.",
    )


def _pairs(comparison: Comparison, test: str, lines: list[Line]) -> Table:
    shown = _in_full(comparison)
    of = {line["method"]: line for line in lines}
    rows = []
    for one, other, found in pairs_of(comparison, test):
        row = [one.name, other.name]
        for metric in shown:
            level = of[one.name][metric]
            if its := found.get(metric):
                row += [in_digits(its.mean, its.over_patients, level, "+"), _plus_minus(its.over_seeds, level)]
            else:
                row += [NOTHING] * 2
        rows.append([*row, f"{found['psnr'].n_patients}, {found['psnr'].n_seeds}"])
    return Table(
        f"{test}: differences",
        ["method", "minus", *(it for title in shown.values() for it in (title, "seeds")), "patients, seeds"],
        rows,
        "Mean difference on the same patients, ± half of its 95 % interval for other patients (each averaged over "
        "seeds): t(n − 1) · s/√n. Next: the interval for other seeds (each averaged over patients). Last: how many "
        "patients and seeds. A difference is clear if it is larger than both intervals. The best "
        f"{_DRAWN} methods, without FBP.",
    )


def _all_tests(comparison: Comparison, lines: list[Line]) -> Table:
    rows: dict[str, list[str]] = {method.name: [method.name] for method in comparison.methods}
    for line in lines:
        both = NOTHING if line["psnr"] is None else f"{_mean(line, 'psnr')} / {_mean(line, 'ssim')}"
        rows[line["method"]].append(both)
    note = "PSNR, dB / SSIM × 100, each the mean over seeds of the mean over patients ± standard deviation over seeds."
    return Table("All tests", ["method", *comparison.tests], [*rows.values()], note)


def _costs(comparison: Comparison, lines: list[Line]) -> Table:
    return Table(
        "Cost",
        ["method", *(heading for heading, _ in COSTS.values())],
        [[line["method"], *(_cost(line, name) for name in COSTS)] for line in lines],
        f"Training: a whole job, mean over seeds. Step: an optimizer step, median, and the most bytes in its tensors, "
        f"the highest of the seeds; slower where jobs run side by side. Slice: inference, batch 1, median, here "
        f"({comparison.device}). Largest norm of a gradient before clipping, of all jobs.",
    )


def _sources(lines: list[Line]) -> Table:
    keys = ("method", "folders", "commit", "config", "trained_on")
    return Table(
        "Where the rows come from",
        ["method", "jobs", "commit", "config", "trained on"],
        [[line[key] for key in keys] for line in lines],
        "Config: a digest of the config without the seed. results.json of each job has its overrides and versions.",
    )


def _in_full(comparison: Comparison) -> dict[str, str]:
    """Headings of the metrics of the whole range, by name. The files have those inside the HU window too."""
    return {name: title for name, title in comparison.titles.items() if name not in IN_WINDOW}


def _mean(line: Line, metric: str) -> str:
    return in_digits(line[metric], line[f"{metric}_over_seeds"])


def _plus_minus(value: float | None, of: float | None) -> str:
    return NOTHING if value is None else f"± {in_digits(value, of=of)}"


def _cost(line: Line, name: str) -> str:
    return NOTHING if line[name] is None else COSTS[name][1](line[name])


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:{',.3g' if seconds < 1 else ',.0f'}}"


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(text for text in texts if text)) or NOTHING


def _job(comparison: Comparison, job: ComparedJob) -> str:
    """The folder of a job, with that of its sweep if there are several."""
    several = len(comparison.sweeps) > 1
    return f"{job.folder.parent.name}/{job.folder.name}" if several else job.folder.name


def _commit(job: ComparedJob) -> str:
    commit, changed, _ = (job.results.get("git_commit") or "").partition("+")
    return commit[:9] + changed + "changes" * bool(changed)


def config_digest(job: ComparedJob) -> str:
    """A digest that is equal for jobs that differ only in their seed, or in whether they were stopped and resumed."""
    if job.config is None:
        return ""
    plain = to_plain(job.config)
    plain["seed"] = plain["data"]["seed"] = plain["resume"] = None
    return digest(plain, 8, sort_keys=True)


def _hardware(job: ComparedJob) -> str:
    device, threads = job.results.get("device"), job.results.get("threads")
    return f"{device}, {threads} thread{'s' * (threads != 1)}" if device else ""


def _image_lines(comparison: Comparison) -> list[list[Any]]:
    lines: list[list[Any]] = [["test", "method", "seed", "data_seed", "number", "slice", "patient", *comparison.titles]]
    for test in comparison.tests:
        for method in comparison.methods:
            for seeds, scores in method.measured.get(test, {}).items():
                which = [test, method.name, *seeds]
                lines += [[*which, s.number, s.slice, s.patient, *map(s.values.get, comparison.titles)] for s in scores]
    return lines


def _markdown(title: str, tables: list[Table], notes: list[str], made_by: dict[str, str]) -> str:
    parts = [f"# {title}"]
    for table in tables:
        parts += [f"## {table.title}", markdown_table(table.headings, table.rows), table.note]
    if notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
    parts += ["## Made by", "\n".join(f"- {name}: {text}" for name, text in made_by.items())]
    return without_folders("\n\n".join(parts)) + "\n"


def _print(table: Table, console: Console) -> None:
    rows = [[cell.replace(" / ", "\n") for cell in row] for row in table.rows]
    console.print(terminal_table(table.headings, rows, title=table.title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0)))
    console.print(f"{table.note}\n", soft_wrap=not console.is_terminal, highlight=False)


def curve_of(job: ComparedJob) -> list[tuple[int, float, float]]:
    """The validations of a job, by its metrics.csv: (steps, minutes of training alone, mean PSNR)."""
    curve: list[tuple[int, float, float]] = []
    seconds = samples = 0.0
    for row in read_metrics(job.folder / "metrics.csv"):
        if speed := as_number(row.get("train/samples_per_second", "")):  # since the last row with a speed
            now = float(row.get("samples") or samples)
            seconds, samples = seconds + (now - samples) / speed, now
        if decibels := row.get("val/psnr"):
            curve.append((int(row["step"]), seconds / 60, float(decibels)))
    return curve


def draw_curves(path: Path, methods: Sequence[ComparedMethod]) -> bool:
    """Draw the validations of the best methods: a line for each seed; a level for methods that learn nothing.

    A validation that is not a finite number is a gap. Returns False, and draws nothing, if none was validated twice.
    """
    found = [(method, its) for method in methods if (its := [c for job in method.done if (c := curve_of(job))])]
    learning = [(method.name, its) for method, its in found if method.steps is not None and max(map(len, its)) > 1]
    if not learning:
        return False
    drawn = figure.Figure(figsize=(11, 4.2), layout="constrained")
    both = drawn.subplots(1, 2, sharey=True)
    ends = [curve[-1][2] for _, seeds in learning for curve in seeds if np.isfinite(curve[-1][2])]
    bottom = min(ends) - 4 if ends else None  # the start is far below
    for column, (axes, label) in enumerate(zip(both, ("steps", "training time, minutes"), strict=True)):
        for k, (name, seeds) in enumerate(learning[:_DRAWN]):
            for n, curve in enumerate(map(np.array, seeds)):
                axes.plot(curve[:, column], curve[:, 2], ".-", color=f"C{k}", label=f"_{name}" if n else name, lw=1.2)
        for method, its in found:
            if method.steps is None:
                level = float(np.mean([curve[-1][2] for curve in its]))
                axes.axhline(level, color="0.4", linestyle="--", label=f"{method.name}, {level:.1f} dB")
        axes.set(xlabel=label, xlim=(0, None), ylim=(bottom, None))
        axes.grid(alpha=0.3)
    both[0].set_ylabel("validation PSNR, dB")
    drawn.legend(*both[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    save_figure(drawn, path)
    return True
