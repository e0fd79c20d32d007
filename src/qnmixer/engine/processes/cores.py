"""Share the CPU cores with other programs. No torch import.

PyTorch starts a thread for each core. A waiting thread spins, so the thread that it waits for may get no core. Beside
busy programs on two cores, a step took six times as long as with one thread. With short waits it took 8 % more.
"""

import os

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
