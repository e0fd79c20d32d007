"""The cores and the memory that this process may use: those of the machine, of a container, or of a job on a cluster.

Limits are read from Linux control groups of version 2. No torch import.
"""

import atexit
import gc
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

THREADS = "OMP_NUM_THREADS"
_SPINS = "GOMP_SPINCOUNT"
_SET_BY_USER = {_SPINS, "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY"}


# PyTorch starts a thread for each core. A waiting thread spins, so the thread that it waits for may get no core. Beside
# busy programs on two cores, a step took six times as long as with one thread. With short waits it took 8 % more.
def wait_briefly() -> None:
    """Let threads of GNU OpenMP sleep after ten microseconds of waiting, unless the user has set how they wait.

    It must be called before torch is loaded. If threads sleep at once, a quiet demo step takes twice as long.
    """
    if _SET_BY_USER.isdisjoint(os.environ):
        os.environ[_SPINS] = "10000"


_earlier_thresholds: list[tuple[int, int, int]] = []


# The libraries are 700,000 objects. To look for garbage in them, while they load and at the end, took 2 of 4 seconds.
def collect_garbage_rarely() -> None:
    """Let this process, a command, look for garbage after 50,000 new objects instead of 700, and not at its end."""
    _earlier_thresholds.append(gc.get_threshold())
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)


def collect_garbage_as_before() -> None:
    """Undo that once all is loaded: garbage of a training may hold memory of the GPU. What is loaded is left out."""
    if _earlier_thresholds:  # else a program trains, which may have garbage of its own
        gc.freeze()
        gc.set_threshold(*_earlier_thresholds[0])
        _earlier_thresholds.clear()


def n_cores() -> int:
    """The CPU cores that this process may use: those of its container or of its job on a cluster."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy_at_a_time = (busy / period for busy, period in _limits("cpu.max"))  # as by `docker --cpus=2`
    return max(1, int(min([cores, *busy_at_a_time])))


def threads_each(n_processes: int) -> int:
    """Threads for each of some processes that share these cores."""
    return max(1, n_cores() // n_processes)


_OWN_GROUP, _ALL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory() -> float:
    """Bytes of memory, also as by `docker --memory=8g` or SLURM's --mem; infinite where no system says it (Windows)."""
    n_bytes = math.inf
    with suppress(AttributeError, ValueError):
        n_bytes = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min([n_bytes, *(numbers[0] for numbers in _limits("memory.max"))])


def _limits(name: str) -> Iterator[list[float]]:
    """The numbers in a file of this process's control group, and of the groups around it, whose limits hold too."""
    with suppress(OSError):  # no Linux
        for line in _OWN_GROUP.read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                group = _ALL_GROUPS / line.removeprefix("0::").strip("/")
                for folder in (group, *group.parents):
                    with suppress(OSError, ValueError):  # no such file, or "max"
                        yield [float(word) for word in (folder / name).read_text(encoding="utf-8").split()]
