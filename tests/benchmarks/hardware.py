"""What this machine can do: the benches compare their times with it, and show how quiet it was."""

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

ROUNDS = 7
COPIED = 2**28
"""Bytes copied at a time: many times any cache."""
SIDE = 2048
"""Rows and columns of the matrices multiplied."""


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy of a large tensor moves, read and written ones, by torch's threads."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / _median_seconds(lambda: target.copy_(source), device)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations (multiplications and additions) per second of a large matrix product, by torch's threads."""
    a, b = (torch.rand(SIDE, SIDE, device=device).to(dtype) for _ in range(2))
    return 2 * SIDE**3 / _median_seconds(lambda: a @ b, device)


def slowdown_beside_busy_core() -> float:
    """How many times as long a loop takes while this machine has another busy core.

    1: the cores are independent. More: they are two threads of one core, or other programs need them.
    """
    alone, beside = [], []
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            for _ in range(ROUNDS):  # in turns, as neighbours come and go
                other.send_signal(signal.SIGSTOP)
                alone += _loops()
                other.send_signal(signal.SIGCONT)
                beside += _loops()
        finally:
            other.kill()  # after Ctrl-C too, or the block would wait for it for ever
    return statistics.median(beside) / statistics.median(alone)


def _loops() -> list[float]:
    """Durations of loops that need no memory."""
    times = []
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(100_000):
            pass
        times.append(time.perf_counter() - start)
    return times


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median duration of a call, the first left out. On CUDA (untested) up to when the device is done."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
