"""All results of `make bench` as Markdown tables, and the changes since earlier results.

    python tests/benchmarks/report.py bench [--before OTHER_BENCH] [--output FILE]

"× the floor" is how many times longer it takes than the memory or the arithmetic of this machine allows.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from qnmixer.files import write_text

MACHINE = ("processor", "cores", "threads", "torch")


class Row(NamedTuple):
    """One figure: a cell of a table."""

    title: str  # of the table
    line: str
    column: str
    value: float
    unit: str
    faster: float | None = None  # × as fast as what the title names
    floor: float | None = None  # × the floor


def step_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Of bench_step."""
    for kind, title in (("steps", "A training step"), ("inference", "An inference")):
        for size in found["sizes"]:
            of = f"{title} of QN-Mixer, T = {size['T']}, batch 1: × as fast as the plain network"
            for name, row in size[kind].items():
                yield Row(of, name, f"{size['size']}²", row["seconds"], "s", row["times_as_fast"])
    for size in found["sizes"]:
        for row in size["parts"]:
            of = "The parts of that training step: × as fast as those of the plain network, (× the floor)"
            yield Row(of, row["part"], f"{size['size']}²", row["seconds"] * 1e3, "ms", row["ratio"], row["over_floor"])
    for size in found["sizes"]:
        of = "The machine meanwhile (quiet: a loop takes as long beside a busy core as alone)"
        column = f"{size['size']}²"
        yield Row(of, "a large copy", column, size["bandwidth"] / 1e9, "GB/s")
        yield Row(of, "a large product of matrices", column, size["matrix_rate"] / 1e9, "GFLOP/s")
        yield Row(of, "a loop beside a busy core : alone", column, size["slowdown_beside_busy_core"], "")


def operator_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Of bench_operator."""
    of = "An image of 256 × 256 pixels, 512 bins, one core: × as fast as ASTRA, (× the floor)"
    for row in found["rows"]:
        line = f"{row['beam']}, {row['views']} views, batch {row['batch']}"
        yield Row(of, line, row["operator"], row["ms_per_image"], "ms", row["times_faster"], row["times_floor"])
        if row["operator"] == "A":
            yield Row(of, line, "A, bytes : those of a kernel without a matrix", row["times_bytes"], "")


def data_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Of bench_data."""
    for row in found["loader"]:
        line = f"{row['source']}, {row['image_size']}²"
        yield Row("The loader alone", line, f"{row['workers']} workers", row["slices_per_second"], "slices/s")
    for row in found["training"]:
        line = f"{row['training']}, {row['image_size']}², T = {row['iterations']}, batch {row['batch']}"
        yield Row("Waiting for data", line, "of a step", 100 * row["waiting_share"], "%")
    yield Row("The start of python", "train --help", "until its end", found["start"]["help_s"], "s")
    for name, seconds in found["start"]["first_step_s"].items():
        yield Row("The start of python", f"train, {name}", "until the first step", seconds, "s")


def reconstruction_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Of bench_reconstruction."""
    for row in found["series"]:
        of, line = f"reconstruct, {found['network']}", f"{row['slices']:,} {row['input']}"
        yield Row(of, line, "speed", row["slices_per_second"], "slices/s")
        yield Row(of, line, "memory, last tenth : first", row["ratio"], "")
    for row in found["large"]:
        of, line = "A slice of 512 × 512 pixels, 512 views, 1,024 bins", f"batch {row['batch']}"
        yield Row(of, line, row["operator"], row["ms_per_slice"], "ms")
        yield Row(of, line, f"{row['operator']}, memory", row["mib_per_slice"], "MiB")


def memory_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Of bench_memory."""
    for row in found["plan"]:
        yield Row("The plan of memory", row["overrides"], "plan : measured", row["ratio"], "")


def strategy_rows(found: list[dict[str, Any]]) -> Iterator[Row]:
    """Of bench_strategies."""
    for row in found:
        of = "A training step on all devices: × as fast as ddp"
        yield Row(of, row["variant"], "step", row["seconds"], "s", 1 / row["ratio"])


READERS = {
    "step": step_rows,
    "operator": operator_rows,
    "data": data_rows,
    "reconstruction": reconstruction_rows,
    "memory": memory_rows,
    "strategies": strategy_rows,
}


def read(folder: Path) -> tuple[list[Row], str]:
    """Every figure of a folder, and the machine that they are of; what was not run is missing."""
    rows: list[Row] = []
    machine: dict[str, Any] = {}
    for name, reader in READERS.items():
        path = folder / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            machine = (found.get("machine") or {} if isinstance(found, dict) else {}) | machine
            rows += reader(found)
    if not rows:
        raise SystemExit(f"error: {folder} holds nothing that make bench wrote: {', '.join(READERS)}.json")
    return rows, ", ".join(f"{key} {machine[key]}" for key in MACHINE if key in machine)


def markdown(rows: list[Row], machine: str, before: list[Row] | None) -> str:
    """A table for each title."""
    earlier = {row[:3]: row.value for row in before or []}
    lines = [f"`make bench` on one machine: {machine}. The ratios of a table are of one run."]
    for title in dict.fromkeys(row.title for row in rows):
        table = [row for row in rows if row.title == title]
        columns = dict.fromkeys(row.column for row in table)
        lines += ["", f"## {title}", "", f"| {' | '.join(['', *columns])} |", f"|{'---|' * (len(columns) + 1)}"]
        cells = {(row.line, row.column): cell(row, earlier.get(row[:3])) for row in table}
        for line in dict.fromkeys(row.line for row in table):
            lines.append(f"| {' | '.join([line, *(cells.get((line, column), '') for column in columns)])} |")
    return "\n".join(lines) + "\n"


def cell(row: Row, before: float | None) -> str:
    """The figure, its ratios, and what it is of the figure of before."""
    number = f"{row.value:.3g}" if row.value < 1000 else f"{row.value:,.0f}"
    faster = f", {row.faster:.2f} ×" if row.faster is not None else ""
    floor = f" ({row.floor:.1f})" if row.floor is not None else ""
    change = f"; {row.value / before:.2f} of before" if before else ""
    return f"{number} {row.unit}".strip() + faster + floor + change


def main() -> None:
    """Read, and print or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--before", type=Path, help="the same of another commit: each figure says what has changed")
    parser.add_argument("--output", type=Path, help="file to write to")
    arguments = parser.parse_args()
    rows, machine = read(arguments.folder)
    before = read(arguments.before)[0] if arguments.before else None
    text = markdown(rows, machine, before)
    print(text, end="")
    if arguments.output is not None:
        write_text(arguments.output, text)


if __name__ == "__main__":
    main()
