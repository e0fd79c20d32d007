"""What tests on a GPU measure, as the tables that `make test-gpu` asks for."""

import os
from pathlib import Path

from qnmixer.files import write_text

from ..benchmarks.measuring import Row, machine, markdown


def asked_for() -> Path | None:
    """The file to write."""
    path = os.environ.get("QNMIXER_GPU_RESULTS")
    return None if path is None else Path(path)


def write(path: Path, passed: dict[str, bool], rows: list[Row]) -> None:
    """Write which tests passed, and a table for each title."""
    failed = [name for name, its in passed.items() if not its]
    text = f"`make test-gpu` on {machine()}: {len(passed) - len(failed)} of {len(passed)} tests passed.\n"
    write_text(path, text + "".join(f"\nFailed: `{name}`.\n" for name in failed) + markdown(rows))
