"""The report of a comparison: tables (terminal, CSV, Markdown), a picture, and one HTML page."""

from collections.abc import Collection, Sequence
from dataclasses import astuple, replace
from itertools import combinations, product
from pathlib import Path
from statistics import mean
from typing import Any

from rich.box import SIMPLE_HEAD

from qnmixer.data.slices import shortlist
from qnmixer.data.splits import Overlap
from qnmixer.evaluation.page import write_page
from qnmixer.evaluation.pictures import draw_slices
from qnmixer.evaluation.scores import Conditions, used_in_training
from qnmixer.files import write_text
from qnmixer.runs.loggers import without_folders
from qnmixer.runs.records import duration
from qnmixer.runs.tables import NOTHING, Table, in_digits
from qnmixer.runs.terminal import Console
from qnmixer.settings.logged_names import COLUMNS_OF_COMPARISON, IN_WINDOW
from qnmixer_studies.comparison.methods import ComparedMethod, Comparison

_COLUMNS_OF_STATISTICS = (
    "method", "metric", "mean", "std_over_seeds", "std_over_patients", "seeds", "patients", "test",
)  # fmt: skip
_MOST_PAIRED = 8  # a table of pairs has room for so many methods


def write_comparison(folder: Path, comparison: Comparison, console: Console) -> None:
    """Print the tables and write comparison.{csv,md,png,html} and images.csv into a folder."""
    groups, warning = comparison.tables, comparison.warning
    tables = []
    for number, methods in enumerate(groups, 1):
        of_test = f" of test {number}" if warning else ""
        tables += [_methods(comparison, methods, of_test), _pairs(comparison, methods, of_test)]
    tables = [table for table in tables if table.rows]
    title = f"Comparison of {shortlist([source.name for source in comparison.sources])}"
    parts = [f"# {title}"]
    if warning:
        parts.append(f"**{warning}**")
        console.warn(warning, style="bold red")
    for table in tables:
        parts.append(table.markdown("## {}"))
        console.print(table.terminal(1 + ("minus" in table.headings), box=SIMPLE_HEAD, caption=None))
        console.print(f"{table.note}\n", soft_wrap=not console.is_terminal, highlight=False)
    write_text(folder / "comparison.csv", _statistics(comparison).csv())
    write_text(folder / "images.csv", _images(comparison).csv())
    write_text(folder / "comparison.md", without_folders("\n\n".join(parts)) + "\n")
    slices = [
        replace(slice_, name=f"{slice_.name}{_place(groups, test)}" if warning else slice_.name)
        for (test, _), slice_ in comparison.slices.items()
    ]
    draw_slices(folder / "comparison.png", slices)
    write_page(folder / "comparison.html", title, tables, slices, subtitle=warning or tables[0].title)
    written = "comparison.html, comparison.md, comparison.csv, comparison.png, images.csv"
    console.lines(f"comparison: {folder} ({written})")


def _place(groups: list[list[ComparedMethod]], test: Conditions | None) -> str:
    """Which test a slice belongs to."""
    number = next(n for n, methods in enumerate(groups, 1) if test in methods[0].tests)
    return f", test {number}"


def _methods(comparison: Comparison, methods: list[ComparedMethod], of_test: str) -> Table:
    """The table of the methods of a test. `of_test`: its number, if there are several."""
    metrics = _in_full(comparison)
    n_patients = max(statistic.n_patients for method in methods if (statistic := method.spread("psnr")))
    title = next(job.title for method in methods for job in method.jobs)
    return Table(
        ["method", "seeds", *metrics.values(), "parameters", "steps", "training", "step, MiB"],
        [_row(method, metrics) for method in methods],
        f"{title}{of_test and ' –' + of_test.removeprefix(' of')}: {n_patients} patients",
        "Mean over seeds of the mean over patients, each the mean of its slices, ± standard deviation over seeds. A "
        "slice whose patient is not known, as a phantom, counts as a patient. The data range is 1; on LoDoPaB-CT and "
        "2DeteCT it is that of each reference. Training: a whole job, mean over seeds. Step: the most bytes in the "
        "tensors of an optimizer step, the highest of the seeds."
        + "".join(f"\nWarning: {line}." for line in _warnings(methods)),
    )


def _row(method: ComparedMethod, metrics: Collection[str]) -> list[str]:
    """The cells of a method: its seeds, its scores, and what its training took."""
    results = [job.results for job in method.jobs]
    spreads = [method.spread(metric) for metric in metrics]
    # Seeds may differ in their steps. Records of jobs on a CPU, or of an earlier version, lack some entries.
    steps = {f"{record['steps']:,}" for record in results if record.get("steps")}
    seconds = [record["seconds"] for record in results if "seconds" in record]
    memory = [mib for record in results if (mib := record.get("memory", {}).get("measured_step")) is not None]
    return [
        method.name,
        str(method.n_seeds) if len(results) == method.n_seeds else f"{len(results)} of {method.n_seeds}",
        *(NOTHING if spread is None else in_digits(spread.mean, spread.over_seeds) for spread in spreads),
        f"{method.n_parameters:,}",
        ", ".join(sorted(steps)) or NOTHING,
        duration(mean(seconds)) if seconds else NOTHING,
        f"{max(memory):,.0f}" if memory else NOTHING,
    ]


def _warnings(methods: Sequence[ComparedMethod]) -> list[str]:
    """What makes the numbers of a table less sure than they look."""
    lines = used_in_training(Overlap(*map(max, zip(*(method.trained for method in methods), strict=True))))
    for method in methods:
        if method.repeats:
            jobs = shortlist([job.name for job in method.repeats])
            lines.append(f"jobs {jobs} of {method.name} repeat a seed, which counts once")
    # Methods of a table have equal tests, so those of the first are those of all.
    if len(tests := methods[0].tests) > 1:
        by_test = [[job.folder.name for method in methods for job in method.jobs if job.test == test] for test in tests]
        listing = "; ".join(sorted(map(shortlist, by_test)))
        lines.append(
            f"the test slices of jobs {listing} differ, as they follow data.seed, so ± has both. With data.seed=1 in "
            "the sweep all are tested on the same"
        )
    return lines


def _pairs(comparison: Comparison, methods: list[ComparedMethod], of_test: str) -> Table:
    shown, rows = _in_full(comparison), []
    measured_methods = [method for method in methods if method.measured][:_MOST_PAIRED]
    for method, rival in combinations(measured_methods, 2):  # the better first
        if (psnr := method.minus(rival, "psnr")) is None:
            continue  # they have no patient in common
        row = [method.name, rival.name]
        for metric in shown:
            difference, level = method.minus(rival, metric), method.spread(metric)
            if difference is None or level is None:
                row += [NOTHING] * 2
            else:
                size = level.mean  # a difference of 0.12 dB has two digits, as the values have
                row += [
                    in_digits(difference.mean, difference.over_patients, size),
                    in_digits(difference.over_seeds, reference=size),
                ]
        rows.append([*row, f"{psnr.n_patients}, {psnr.n_seeds}"])
    return Table(
        ["method", "minus", *(head for title in shown.values() for head in (title, "± seeds")), "patients, seeds"],
        rows,
        f"Differences{of_test}",
        "Mean difference on the same patients, ± half of its 95 % interval for other patients (each averaged over "
        "seeds): t(n − 1) · s/√n. Next: the interval for other seeds (each averaged over patients). Last: how many "
        "patients and seeds. A difference is clear if it is larger than both intervals. The best "
        f"{_MOST_PAIRED} methods.",
    )


def _in_full(comparison: Comparison) -> dict[str, str]:
    """Headings of the metrics of the whole range, by name. The files have those inside the HU window too."""
    return {name: title for name, title in comparison.titles.items() if name not in IN_WINDOW}


def _statistics(comparison: Comparison) -> Table:
    """The table of comparison.csv, a row for each method and metric."""
    rows: list[list[Any]] = []
    for number, methods in enumerate(comparison.tables, 1):
        for method, metric in product(methods, comparison.titles):
            if statistic := method.spread(metric):
                rows.append([method.name, metric, *astuple(statistic), number])
    return Table(_COLUMNS_OF_STATISTICS, rows)


def _images(comparison: Comparison) -> Table:
    rows: list[list[Any]] = []
    for number, methods in enumerate(comparison.tables, 1):
        for method in methods:
            for seeds, scores in method.measured.items():
                cells = [method.name, *seeds, number]
                rows += [[*cells, s.number, s.slice, s.patient, *map(s.values.get, comparison.titles)] for s in scores]
    return Table([*COLUMNS_OF_COMPARISON, *comparison.titles], rows)
