"""The figures of a bench as Markdown tables; as a command, those of all benches in a folder.

    python tests/benchmarks/report.py bench [--before OTHER_BENCH] [--output FILE]

A figure in brackets is a ratio. The title of the table says to what.
"""

import argparse
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from qnmixer.files import write_text

BENCHES = ("step", "data", "reconstruction", "memory", "strategies")


class Row(NamedTuple):
    """One figure: a cell of a table."""

    title: str  # of the table
    line: str
    column: str
    value: float | str  # a word where there is no figure
    unit: str = ""
    ratio: float | None = None


def options_of(text: str | None) -> argparse.ArgumentParser:
    """The parser of a bench with this docstring: with --json, and what the bench adds."""
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser


def finish(rows: Iterable[Row], output: Path | None) -> None:
    """Print the tables of a bench, and write its figures as JSON."""
    rows = list(rows)
    print(markdown(rows), end="")
    if output is not None:
        processor = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
        machine = f"{processor or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        write_text(output, json.dumps({"machine": machine, "rows": rows}, indent=1, ensure_ascii=False) + "\n")


def read(folder: Path) -> tuple[str, list[Row]]:
    """The machine and every figure of a folder. What was not run is missing."""
    machine, rows = "", []
    for path in (folder / f"{name}.json" for name in BENCHES):
        if path.exists():
            found = json.loads(path.read_text())
            machine = found["machine"]
            rows += [Row(*row) for row in found["rows"]]
    if not rows:
        raise SystemExit(f"error: {folder} holds nothing that make bench wrote: {', '.join(BENCHES)}.json")
    return machine, rows


def markdown(rows: list[Row], before: list[Row] | None = None) -> str:
    """A table for each title."""
    earlier = {row[:3]: row.value for row in before or []}
    lines = []
    for title in dict.fromkeys(row.title for row in rows):
        table = [row for row in rows if row.title == title]
        columns = dict.fromkeys(row.column for row in table)
        lines += ["", f"## {title}", "", f"| {' | '.join(['', *columns])} |", f"|{'---|' * (len(columns) + 1)}"]
        cells = {(row.line, row.column): cell(row, earlier.get(row[:3])) for row in table}
        for line in dict.fromkeys(row.line for row in table):
            lines.append(f"| {' | '.join([line, *(cells.get((line, column), '') for column in columns)])} |")
    return "\n".join(lines) + "\n"


def cell(row: Row, before: float | str | None) -> str:
    """The figure, its ratio, and what it is of the figure of before."""
    if isinstance(row.value, str):
        return row.value
    number = f"{row.value:.3g}" if row.value < 1000 else f"{row.value:,.0f}"
    ratio = f" ({row.ratio:.2f})" if row.ratio is not None else ""
    change = f"; {row.value / before:.2f} of before" if isinstance(before, float) and before else ""
    return f"{number} {row.unit}".strip() + ratio + change


def main() -> None:
    """Read, print, and write where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--before", type=Path, help="the same of another commit: each figure says what has changed")
    parser.add_argument("--output", type=Path, help="file to write to")
    arguments = parser.parse_args()
    machine, rows = read(arguments.folder)
    before = read(arguments.before)[1] if arguments.before else None
    text = f"`make bench` on one machine: {machine}. The figures of a table are of one run.\n{markdown(rows, before)}"
    print(text, end="")
    if arguments.output is not None:
        write_text(arguments.output, text)


if __name__ == "__main__":
    main()
