"""The report of a sweep: one table (terminal, CSV, Markdown), and a picture of the result over numeric overrides."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qnmixer.engine.reports.tables import Console, csv_table, markdown_table, terminal_table
from qnmixer.engine.tracking.results import best_of, duration, read_results
from qnmixer.engine.tracking.sweep_file import as_number, readable
from qnmixer.errors import first_line
from qnmixer.files import atomic_file, write_text


@dataclass
class JobRow:
    """One job, as its results.json describes it."""

    name: str
    values: dict[str, str]  # values of the overrides that vary
    status: str
    monitor: str
    best: float | None
    seconds: float | None
    peak_mib: float | None
    error: str


def rows_of(folder: Path, jobs: Mapping[str, list[str]] | None, varying: list[str]) -> list[JobRow]:
    """The jobs of a sweep in their order. `jobs`: overrides by folder; None: all folders with a results.json."""
    if jobs is None:
        paths = [path.parent for path in folder.glob("**/results.json")]
        paths.sort(key=lambda path: (len(str(path)), str(path)))
        jobs = {str(path.relative_to(folder)): read_results(path).get("overrides", []) for path in paths}
    return [_row(folder / name, name, overrides, varying) for name, overrides in jobs.items()]


def _row(folder: Path, name: str, overrides: list[str], varying: list[str]) -> JobRow:
    results, given = read_results(folder), dict(o.lstrip("+").split("=", 1) for o in overrides if "=" in o)
    monitor, best = best_of(results)
    return JobRow(
        name=name,
        values={key: given.get(key, "") for key in varying},
        status=results.get("status", "not begun"),
        monitor=monitor,
        best=best,
        seconds=results.get("seconds"),
        peak_mib=results.get("memory", {}).get("measured_step"),
        error=first_line(results.get("error", "")),
    )


def write_report(folder: Path, rows: list[JobRow]) -> None:
    """Print the table. Write sweep.csv and sweep.md, and sweep.png if an override is a number, into the folder."""
    if not rows:
        return
    monitor = next((row.monitor for row in rows if row.best is not None), "best")
    columns = ["job", *rows[0].values, "status", monitor, "time", "peak MiB"]
    cells = [
        [row.name, *map(readable, row.values.values()), row.status, _text(row.best, "{:.4g}"),
         _text(row.seconds, duration),
         _text(row.peak_mib, "{:,.0f}")]
        for row in rows
    ]  # fmt: skip
    errors = [f"job {row.name}: {row.error}" for row in rows if row.error]
    listed = "\n".join(f"- {error}" for error in errors)
    write_text(folder / "sweep.md", f"{markdown_table(columns, cells)}\n\n{listed}".rstrip() + "\n")
    headings = ["job", *rows[0].values, "status", monitor, "seconds", "peak_mib", "error"]
    lines = [[r.name, *r.values.values(), r.status, r.best, r.seconds, r.peak_mib, r.error] for r in rows]
    write_text(folder / "sweep.csv", csv_table([headings, *lines]))
    drawn = _draw(folder / "sweep.png", [row for row in rows if row.best is not None], monitor)

    console = Console()
    console.print(terminal_table(columns, cells, words=len(columns) - 3))
    files = ["sweep.csv", "sweep.md", *["sweep.png"] * drawn]
    console.print("\n".join([*errors, f"sweep folder: {folder} ({', '.join(files)})"]), soft_wrap=True, highlight=False)


def _text(value: float | None, form: Any) -> str:
    if value is None:
        return "–"
    return form.format(value) if isinstance(form, str) else form(value)


def _draw(path: Path, rows: list[JobRow], monitor: str) -> bool:
    """Draw the best value over each numeric override, one line for each setting of the others. False: no points."""
    numeric = [
        key for key in (rows[0].values if rows else ()) if len({as_number(r.values[key]) for r in rows} - {None}) > 1
    ]
    if not numeric:
        return False
    from matplotlib.figure import Figure  # imported here, because it takes half a second

    figure = Figure(figsize=(5 * len(numeric), 4), layout="constrained")
    for column, key in enumerate(numeric):
        axes = figure.add_subplot(1, len(numeric), column + 1)
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            x = as_number(row.values[key])
            others = ", ".join(f"{name}={readable(value)}" for name, value in row.values.items() if name != key)
            if x is not None and row.best is not None:
                lines.setdefault(others, []).append((x, row.best))
        alone = all(len(points) == 1 for points in lines.values())  # a random search: no lines
        for others, points in lines.items():
            x_values, y_values = zip(*sorted(points), strict=True)
            axes.plot(x_values, y_values, "o" if alone else "o-", color="C0" if alone else None, label=others)
        x_all = sorted({x for points in lines.values() for x, _ in points})
        if x_all[0] > 0 and x_all[-1] >= 10 * x_all[0]:
            axes.set_xscale("log")
        elif len(x_all) <= 8:
            axes.set_xticks(x_all)
        axes.set(xlabel=key, ylabel=monitor if column == 0 else "")
        axes.grid(alpha=0.3)
        if not alone and any(lines):
            axes.legend(fontsize="small")
    with atomic_file(path) as stream:
        figure.savefig(stream, format="png", dpi=150)
    return True
