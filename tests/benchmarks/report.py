"""One Markdown table of all results of `make bench`, and the changes since earlier results.

    python tests/benchmarks/report.py bench [--before OTHER_BENCH] [--output FILE]

"× as fast" is against what the row names, measured in the same run; "× floor" is how many times longer than the memory
or the arithmetic of this machine allows.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from qnmixer.files import write_text

MACHINE = ("processor", "cores", "threads", "torch")


class Row(NamedTuple):
    """One figure."""

    what: str
    setting: str
    value: float
    unit: str
    faster: float | None = None  # × as fast as `than`
    than: str = ""
    floor: float | None = None  # × the floor


def step_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Of bench_step."""
    for size in found["sizes"]:
        setting = f"{size['size']}², T = {size['T']}, batch 1"
        for kind, what in (("steps", "training step"), ("inference", "inference")):
            for name, row in size[kind].items():
                yield Row(f"{what}: {name}", setting, row["seconds"], "s", row["times_as_fast"], "plain")
        for row in size["parts"]:
            name = f"of a step: {row['part']}"
            yield Row(name, setting, row["seconds"] * 1e3, "ms", row["ratio"], "plain", row["over_floor"])


def operator_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Of bench_operator."""
    for row in found["rows"]:
        setting = f"{row['beam']}, 256², {row['views']} views, batch {row['batch']}, one core"
        ms, floor = row["ms_per_image"], row["times_floor"]
        yield Row(f"{row['operator']}, an image", setting, ms, "ms", row["times_faster"], "ASTRA", floor)
        if "times_bytes" in row:  # older files have none
            yield Row(f"{row['operator']}, bytes : those of a kernel without matrix", setting, row["times_bytes"], "")


def data_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Of bench_data."""
    for row in found["loader"]:
        setting = f"{row['source']}, {row['image_size']}², {row['workers']} workers"
        yield Row("loader alone", setting, row["slices_per_second"], "slices/s")
    for row in found["training"]:
        setting = f"{row['training']}, {row['image_size']}², T = {row['iterations']}, batch {row['batch']}"
        yield Row("waiting for data, of a step", setting, 100 * row["waiting_share"], "%")
    yield Row("--help", "train", found["start"]["help_s"], "s")
    for name, seconds in found["start"]["first_step_s"].items():
        yield Row("start of python to first step", name, seconds, "s")


def reconstruction_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Of bench_reconstruction."""
    for row in found["series"]:
        setting = f"{row['slices']:,} {row['input']}, {found['network']}"
        yield Row("reconstruct", setting, row["slices_per_second"], "slices/s")
        yield Row("its memory, last tenth : first", setting, row["ratio"], "")
    for row in found["large"]:
        setting = f"512², 512 views, 1,024 bins, batch {row['batch']}"
        yield Row(f"{row['operator']}, a slice", setting, row["ms_per_slice"], "ms")
        yield Row(f"{row['operator']}, memory of a slice", setting, row["mib_per_slice"], "MiB")


def memory_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Of bench_memory."""
    for row in found["plan"]:
        yield Row("plan : measured memory", row["overrides"], row["ratio"], "")


def strategy_rows(found: list[dict[str, Any]]) -> Iterator[Row]:
    """Of bench_strategies."""
    for row in found:
        yield Row("training step", f"{row['variant']}, all devices", row["seconds"], "s", 1 / row["ratio"], "ddp")


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
    """The table."""
    earlier = {(row.what, row.setting): row.value for row in before or []}
    names = ["", "setting", "measured", "× as fast as", "× floor"] + (["of before"] if before else [])
    lines = [f"`make bench`, one run: {machine}.", "", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        faster = f"{row.faster:.2f} {row.than}" if row.faster is not None else ""
        floor = f"{row.floor:.1f}" if row.floor is not None else ""
        cells = [row.what, row.setting, f"{row.value:.3g} {row.unit}".strip(), faster, floor]
        if before:
            then = earlier.get((row.what, row.setting))
            cells.append(f"{row.value / then:.2f}" if then else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read, and print or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--before", type=Path, help="the same of another commit: a column of what has changed")
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
