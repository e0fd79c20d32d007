"""Limits on time and memory of a process that reads a damaged file."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SECONDS, MEMORY = 20, 2 * 2**30  # bytes


@contextmanager
def within_limits(memory: int = MEMORY) -> Iterator[None]:
    """Fail the test where the block takes longer than `SECONDS`, or more memory beyond what was there before.

    It fails by an exception that `except Exception` does not catch: the code here would take others for a bad file.
    """

    def too_late(*_: object) -> None:
        pytest.fail(f"no end within {SECONDS} s")

    before, handler = _forget_peak(), signal.signal(signal.SIGALRM, too_late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    taken = _peak() - before
    assert taken < memory, f"{taken / 2**30:.1f} GB"


def _forget_peak() -> int:
    """Begin the peak again from what this process has now, where the system can. Returns the peak."""
    if (path := Path("/proc/self/clear_refs")).exists():
        path.write_text("5")
    return _peak()


def _peak() -> int:
    """The most bytes that this process had at once."""
    if (path := Path("/proc/self/status")).exists():
        (line,) = [line for line in path.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes
