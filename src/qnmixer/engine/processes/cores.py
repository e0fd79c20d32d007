"""Share the CPU cores with other programs. No torch import.

PyTorch starts a thread for each core. A waiting thread spins, so the thread that it waits for may get no core. Beside
one busy program on two cores, a step of the demo took twenty times as long.
"""

import os
import sys
from pathlib import Path

from qnmixer.engine.processes.limits import cpu_limit

THREADS = "OMP_NUM_THREADS"
_SPINS = "GOMP_SPINCOUNT"
_SET_BY_USER = {_SPINS, "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY"}


def n_cores() -> int:
    """The CPU cores that this process may use: those of its container or of its job on a cluster."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(there, cpu_limit())))


def threads_each(n_processes: int) -> int:
    """Threads for each of some processes that share these cores."""
    return max(1, n_cores() // n_processes)


def wait_briefly() -> None:
    """Let threads of GNU OpenMP sleep after ten microseconds of waiting, unless the user has set how they wait.

    It must be called before torch is loaded. If threads sleep at once, a quiet demo step takes twice as long.
    """
    if _SET_BY_USER.isdisjoint(os.environ):
        os.environ[_SPINS] = "10000"


class CoreUse:
    """Measures how many cores other programs leave free. Starts to measure when it is made."""

    def __init__(self) -> None:
        self._before = _seconds()

    def free(self) -> float | None:
        """The mean number of cores that other programs have left free since then; None if the system does not say.

        Cores that this process may not use do not count, because on a cluster they belong to others.
        """
        now = _seconds()
        if now is None or self._before is None or now[2] <= self._before[2]:
            return None
        everybody, own, wall = (after - before for after, before in zip(now, self._before, strict=True))
        idle = len(os.sched_getaffinity(0)) - (everybody - own) / wall
        return min(n_cores(), max(0.0, idle))


def _seconds() -> tuple[float, float, float] | None:
    """Seconds that our cores were busy, that this process and its children used, and that passed. On Linux only."""
    if sys.platform != "linux":
        return None
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return None
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    # user, nice, system, idle, iowait, irq, softirq, steal
    ticks = sum(sum(map(int, words[1:9])) - int(words[4]) - int(words[5]) for words in lines if words[0] in ours)
    times = os.times()
    return ticks / os.sysconf("SC_CLK_TCK"), sum(times[:4]), times.elapsed
