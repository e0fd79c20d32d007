"""Limits on time and memory of a process that reads a damaged file."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from qnmixer.engine.memory.usage import read_usage, reset_peak

SECONDS, MEMORY = 20, 2 * 2**30  # bytes


@contextmanager
def within_limits(memory: int = MEMORY) -> Iterator[None]:
    """Fail the test where the block takes longer than `SECONDS`, or more memory beyond what was there before.

    It fails by an exception that `except Exception` does not catch: the code here would take others for a bad file.
    """

    def too_late(*_: object) -> None:
        pytest.fail(f"no end within {SECONDS} s")

    cpu, handler = torch.device("cpu"), signal.signal(signal.SIGALRM, too_late)
    reset_peak(cpu)
    before = read_usage(cpu).peak
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    taken = read_usage(cpu).peak - before
    assert taken < memory, f"{taken / 2**30:.1f} GB"
