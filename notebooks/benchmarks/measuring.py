"""What the benches share: the time of calls that take turns, the memory of a process of its own, and tables."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol

import torch
from torch import nn

from qnmixer.parallel.device_memory import read_usage

MIB = 2**20
SHORT = 0.2
"""Seconds of a call that no cache matters to."""
# glibc otherwise keeps what is freed, up to twice what is in use.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"}


class Step(Protocol):
    """A training step, ready to be run again and again."""

    module: nn.Module

    def __call__(self) -> None: ...


def medians(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each call. The calls take turns, so that a slow minute slows all; the first round is left out.

    A short call is repeated, and the repetition counts: what ran before would decide its time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            taken = seconds_of(call)
            seconds[name].append(taken if taken > SHORT else seconds_of(call))
    return {name: median(values[1:]) for name, values in seconds.items()}


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of one call, until the device has done its work."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_mib(build: Callable[[], Step], device: torch.device) -> float:
    """Peak of a second step: by what it and the first made this process grow, with weights and matrices.

    On a CPU from resident memory, whatever allocated it. Pages of files are left out: matrices may be mapped.
    """
    step = build()
    held = sum(tensor.nbytes for tensor in [*step.module.parameters(), *step.module.buffers()])
    before = read_usage(device)
    step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) / MIB
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the highest resident memory, starts again (man 5 proc)
    step()
    after, status = read_usage(device), Path("/proc/self/status").read_text()
    highest = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    files = after.reserved - after.allocated
    return (highest - files - before.allocated + held) / MIB


def in_own_process(script: str, *arguments: str) -> str:
    """What a bench prints when it measures memory in a fresh process."""
    command = [sys.executable, str(Path(script).resolve()), *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **GIVE_BACK}
    ).stdout


class Row(NamedTuple):
    """One figure: a cell of a table."""

    title: str  # of the table
    line: str
    column: str
    value: float | str  # a word where there is no figure
    unit: str = ""
    ratio: float | None = None  # in brackets; the title says to what


def machine() -> str:
    """What the figures are of."""
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    processor = f"{len(gpus)} × {gpus[0]}" if gpus else platform.processor() or platform.machine()
    return f"{processor}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"


def markdown(rows: Iterable[Row]) -> str:
    """A table for each title."""
    tables: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        tables.setdefault(row.title, {}).setdefault(row.line, {})[row.column] = _cell(row)
    text = ""
    for title, lines in tables.items():
        columns = dict.fromkeys(column for cells in lines.values() for column in cells)
        text += f"\n## {title}\n\n| {' | '.join(['', *columns])} |\n|{'---|' * (len(columns) + 1)}\n"
        for line, cells in lines.items():
            text += f"| {' | '.join([line, *(cells.get(column, '') for column in columns)])} |\n"
    return text


def _cell(row: Row) -> str:
    if isinstance(row.value, str):
        return row.value
    number = f"{row.value:.3g}" if row.value < 1000 else f"{row.value:,.0f}"
    return f"{number} {row.unit}".strip() + (f" ({row.ratio:.2f})" if row.ratio is not None else "")
