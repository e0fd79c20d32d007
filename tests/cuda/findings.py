"""The figures that tests on a GPU measure: a table for people, and a JSON file with the same figures."""

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import lightning
import torch

from qnmixer.files import write_text

FILE = "QNMIXER_GPU_RESULTS"
"""Environment variable with the JSON file to write; the table goes beside it, as .md."""


@dataclass
class Finding:
    """One figure."""

    what: str
    setting: str
    value: float
    unit: str = ""
    of_floor: float | None = None  # times the floor: the bytes that must be moved, at the speed of a copy


@dataclass
class Findings:
    """All figures of a session of tests, and how many of its tests passed."""

    found: list[Finding] = field(default_factory=list)
    passed: int = 0
    failed: list[str] = field(default_factory=list)

    def add(self, what: str, setting: str, value: float, unit: str = "", of_floor: float | None = None) -> None:
        """Take in a figure."""
        self.found.append(Finding(what, setting, value, unit, of_floor))

    def write(self, path: Path) -> None:
        """Write JSON and table."""
        record = {"machine": machine(), **asdict(self)}
        write_text(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        write_text(path.with_suffix(".md"), markdown(record))


def machine() -> dict[str, str]:
    """What the figures are of."""
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    names = f"{len(gpus)} × {gpus[0]}" if gpus else platform.processor() or platform.machine()
    versions = {"torch": torch.__version__, "CUDA": str(torch.version.cuda), "Lightning": lightning.__version__}
    return {"device": names} | versions | {"Python": platform.python_version()}


def markdown(record: dict[str, Any]) -> str:
    """The table of a JSON file, which may have a "note" in words, and "notes" by name of a failed test."""
    it = ", ".join(f"{name} {value}" for name, value in record["machine"].items() if name != "device")
    n = record["passed"] + len(record["failed"])
    lines = [f"`make test-gpu` on {record['machine']['device']} ({it}): {record['passed']} of {n} tests passed."]
    for name, cases in groupby(record["failed"], key=lambda name: name.partition("[")[0]):
        note = record.get("notes", {}).get(name.rpartition("::")[2], "")
        of = " and ".join(f"[{case.partition('[')[2]}" for case in cases)
        lines += ["", f"Failed: `{name}{of}`. {note}".strip()]
    lines += ["", record["note"]] if "note" in record else []
    lines += ["", "× floor: times as long as the bytes take that must be moved, at the speed of the copy.", ""]
    lines += ["| | setting | measured | × floor |", "|---|---|---|---|"]
    for row in _shorter(record["found"]):
        floor = "" if row["of_floor"] is None else f"{row['of_floor']:,.0f}"
        value = row["value"]
        measured = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        lines.append(f"| {row['what']} | {row['setting']} | {measured} {row['unit']}".rstrip() + f" | {floor} |")
    return "\n".join(lines) + "\n"


def _shorter(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, of several gradients in one precision and of several copies the largest only."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        many = row["what"].startswith("gradient")
        alike.setdefault(f"{row['what']} {row['setting'].split(', ')[-1] if many else row['setting']}", []).append(row)
    for rows in alike.values():
        largest = max(rows, key=lambda row: row["value"])
        yield largest | {"setting": largest["setting"] + f" (largest of {len(rows)})" * (len(rows) > 1)}


def asked_for() -> Path | None:
    """The file that `make test-gpu` asks for."""
    path = os.environ.get(FILE)
    return None if path is None else Path(path)
