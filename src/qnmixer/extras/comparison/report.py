"""The report of a comparison: tables (terminal, CSV, Markdown), a picture, and one HTML page."""

from dataclasses import astuple
from itertools import combinations, product
from pathlib import Path
from statistics import mean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console

from qnmixer.engine.evaluation.scores import IN_WINDOW, used_in_training
from qnmixer.engine.reports.pictures import draw_slices
from qnmixer.engine.reports.terminal import NOTHING, Table, csv_table, in_digits, markdown_table, terminal_table
from qnmixer.engine.tracking.loggers import without_folders
from qnmixer.engine.tracking.records import duration
from qnmixer.extras.comparison.methods import Comparison
from qnmixer.extras.page.page import write_page
from qnmixer.files import write_text

_MOST_PAIRED = 8  # a table of pairs has room for so many methods


def write_comparison(folder: Path, comparison: Comparison, console: Console) -> None:
    """Print the tables and write comparison.{csv,md,png,html} and images.csv into a folder."""
    tables = [table for table in (_methods(comparison), _pairs(comparison)) if table.rows]
    title = f"Comparison of {', '.join(sweep.name for sweep in comparison.sweeps)}"
    parts = [f"# {title}"]
    for table in tables:
        parts += [f"## {table.title}", markdown_table(table.headings, table.rows), table.note]
        console.print(terminal_table(table.headings, table.rows, title=table.title, box=SIMPLE_HEAD))
        console.print(f"{table.note}\n", soft_wrap=not console.is_terminal, highlight=False)
    write_text(folder / "comparison.csv", csv_table(_statistics(comparison)))
    write_text(folder / "images.csv", csv_table(_image_lines(comparison)))
    write_text(folder / "comparison.md", without_folders("\n\n".join(parts)) + "\n")
    slices = [*comparison.slices.values()]
    draw_slices(folder / "comparison.png", slices)
    write_page(folder / "comparison.html", title, tables, slices, subtitle=comparison.title)
    written = "comparison.html, comparison.md, comparison.csv, comparison.png, images.csv"
    console.print(f"comparison: {folder} ({written})", soft_wrap=True, highlight=False)


def _methods(comparison: Comparison) -> Table:
    rows = []
    for method in comparison.methods:
        results = [job.results for job in method.jobs]
        steps = {f"{its['steps']:,}" for its in results if its.get("steps")}
        seconds = [its["seconds"] for its in results if "seconds" in its]
        memory = [mib for its in results if (mib := its.get("memory", {}).get("measured_step")) is not None]
        spreads = [method.spread(metric) for metric in _in_full(comparison)]
        rows.append([
            method.name,
            str(method.n_jobs) if len(results) == method.n_jobs else f"{len(results)} of {method.n_jobs}",
            *(NOTHING if its is None else in_digits(its.mean, its.over_seeds) for its in spreads),
            f"{method.n_parameters:,}",
            ", ".join(sorted(steps)) or NOTHING,
            duration(mean(seconds)) if seconds else NOTHING,
            f"{max(memory):,.0f}" if memory else NOTHING,
        ])  # fmt: skip
    warning = f"\nWarning: {used_in_training(comparison.n_trained)}." if comparison.n_trained else ""
    n_patients = max(its.n_patients for method in comparison.methods if (its := method.spread("psnr")))
    return Table(
        f"{comparison.title}: {n_patients} patients",
        ["method", "seeds", *_in_full(comparison).values(), "parameters", "steps", "training", "step, MiB"],
        rows,
        "Mean over seeds of the mean over patients, each the mean of its slices, ± standard deviation over seeds. A "
        "slice whose patient is not known, as a phantom, counts as a patient. The data range is 1; on LoDoPaB-CT and "
        "2DeteCT it is that of each reference. Training: a whole job, mean over seeds. Step: the most bytes in the "
        "tensors of an optimizer step, the highest of the seeds." + warning,
    )


def _pairs(comparison: Comparison) -> Table:
    shown, rows = _in_full(comparison), []
    best = [method for method in comparison.methods if method.measured][:_MOST_PAIRED]
    for one, other in combinations(best, 2):  # the better first
        if (psnr := one.minus(other, "psnr")) is None:
            continue  # they have no patient in common
        row = [one.name, other.name]
        for metric in shown:
            found, level = one.minus(other, metric), one.spread(metric)
            if found is None or level is None:
                row += [NOTHING] * 2
            else:
                size = level.mean  # a difference of 0.12 dB has two digits, as the values have
                row += [in_digits(found.mean, found.over_patients, size), in_digits(found.over_seeds, of=size)]
        rows.append([*row, f"{psnr.n_patients}, {psnr.n_seeds}"])
    return Table(
        "Differences",
        ["method", "minus", *(it for title in shown.values() for it in (title, "± seeds")), "patients, seeds"],
        rows,
        "Mean difference on the same patients, ± half of its 95 % interval for other patients (each averaged over "
        "seeds): t(n − 1) · s/√n. Next: the interval for other seeds (each averaged over patients). Last: how many "
        "patients and seeds. A difference is clear if it is larger than both intervals. The best "
        f"{_MOST_PAIRED} methods.",
    )


def _in_full(comparison: Comparison) -> dict[str, str]:
    """Headings of the metrics of the whole range, by name. The files have those inside the HU window too."""
    return {name: title for name, title in comparison.titles.items() if name not in IN_WINDOW}


def _statistics(comparison: Comparison) -> list[list[Any]]:
    """The lines of comparison.csv, one for each method and metric."""
    lines: list[list[Any]] = [["method", "metric", "mean", "std_over_seeds", "std_over_patients", "seeds", "patients"]]
    for method, metric in product(comparison.methods, comparison.titles):
        if found := method.spread(metric):
            lines.append([method.name, metric, *astuple(found)])
    return lines


def _image_lines(comparison: Comparison) -> list[list[Any]]:
    lines: list[list[Any]] = [["method", "seed", "data_seed", "number", "slice", "patient", *comparison.titles]]
    for method in comparison.methods:
        for seeds, scores in method.measured.items():
            which = [method.name, *seeds]
            lines += [[*which, s.number, s.slice, s.patient, *map(s.values.get, comparison.titles)] for s in scores]
    return lines
