"""The report of a sweep: one table (terminal, CSV, Markdown), and a picture of the result over numeric overrides."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qnmixer.engine.reports.tables import NOTHING, Console, csv_table, markdown_table, terminal_table
from qnmixer.engine.tracking.results import best_of, duration, read_results
from qnmixer.engine.tracking.sweep_file import as_number, read_sweep, readable
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


def jobs_of(sweep: Path) -> dict[Path, list[str]]:
    """The folders of a sweep's jobs with their overrides, in their order. Raises DataError for a damaged sweep.json."""
    return _folders(sweep, read_sweep(sweep)["jobs"])


def _folders(sweep: Path, jobs: Mapping[str, list[str]] | None) -> dict[Path, list[str]]:
    """The same. `jobs`: overrides by folder; None: all folders with a results.json."""
    if jobs is not None:
        return {sweep / name: overrides for name, overrides in jobs.items()}
    paths = [path.parent for path in sweep.glob("**/results.json")]
    return {
        path: read_results(path).get("overrides", []) for path in sorted(paths, key=lambda it: (len(str(it)), str(it)))
    }


def rows_of(folder: Path, jobs: Mapping[str, list[str]] | None, varying: list[str]) -> list[JobRow]:
    """The jobs of a sweep in their order. `jobs`: overrides by folder; None: all folders with a results.json."""
    rows = []
    for path, overrides in _folders(folder, jobs).items():
        results, given = read_results(path), dict(o.lstrip("+").split("=", 1) for o in overrides if "=" in o)
        monitor, best = best_of(results)
        rows.append(
            JobRow(
                name=str(path.relative_to(folder)),
                values={key: given.get(key, "") for key in varying},
                status=results.get("status", "not begun"),
                monitor=monitor,
                best=best,
                seconds=results.get("seconds"),
                peak_mib=results.get("memory", {}).get("measured_step"),
                error=first_line(results.get("error", "")),
            )
        )
    return rows


def write_report(folder: Path, rows: list[JobRow]) -> None:
    """Print the table. Write sweep.csv and sweep.md, and sweep.png if an override is a number, into the folder."""
    if not rows:
        return
    monitor = next((row.monitor for row in rows if row.best is not None), "best")
    varying = [*rows[0].values]
    lines = [[r.name, *r.values.values(), r.status, r.best, r.seconds, r.peak_mib, r.error] for r in rows]
    write_text(
        folder / "sweep.csv", csv_table([["job", *varying, "status", monitor, "seconds", "peak_mib", "error"], *lines])
    )
    headings = ["job", *varying, "status", monitor, "time", "peak MiB"]
    cells = []
    for row in rows:
        best = NOTHING if row.best is None else f"{row.best:.4g}"
        time = NOTHING if row.seconds is None else duration(row.seconds)
        peak = NOTHING if row.peak_mib is None else f"{row.peak_mib:,.0f}"
        cells.append([row.name, *map(readable, row.values.values()), row.status, best, time, peak])
    errors = [f"job {row.name}: {row.error}" for row in rows if row.error]
    listed = "\n".join(f"- {error}" for error in errors)
    write_text(folder / "sweep.md", f"{markdown_table(headings, cells)}\n\n{listed}".rstrip() + "\n")
    drawn = _draw(folder / "sweep.png", [row for row in rows if row.best is not None], monitor)

    console = Console()
    console.print(terminal_table(headings, cells, words=len(headings) - 3))
    files = ["sweep.csv", "sweep.md", *["sweep.png"] * drawn]
    console.print("\n".join([*errors, f"sweep folder: {folder} ({', '.join(files)})"]), soft_wrap=True, highlight=False)


def _draw(path: Path, rows: list[JobRow], monitor: str) -> bool:
    """Draw the best value over each numeric override. Returns False, and draws nothing, if none takes two values."""
    points = {
        key: [(x, row.best) for row in rows if (x := as_number(row.values[key])) is not None]
        for key in (rows[0].values if rows else ())
    }
    numeric = {key: its for key, its in points.items() if len({x for x, _ in its}) > 1}
    if not numeric:
        return False
    from matplotlib.figure import Figure  # imported here, because it takes half a second

    figure = Figure(figsize=(5 * len(numeric), 4), layout="constrained")
    for axes, (key, its) in zip(figure.subplots(1, len(numeric), squeeze=False)[0], numeric.items(), strict=True):
        axes.plot(*zip(*its, strict=True), "o")
        xs = [x for x, _ in its]
        axes.set(xlabel=key, ylabel=monitor, xscale="log" if 0 < 10 * min(xs) <= max(xs) else "linear")
        axes.grid(alpha=0.3)
    with atomic_file(path) as stream:
        figure.savefig(stream, format="png", dpi=150)
    return True
