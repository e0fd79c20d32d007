"""The limits that a container or a job of a cluster sets for this process (Linux control groups, version 2).

No torch import.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cpu_limit() -> float:
    """The number of cores that may be busy at a time, as by `docker --cpus=2`; infinite without a limit."""
    return min([math.inf, *(busy / period for busy, period in _numbers("cpu.max"))])


def memory_limit() -> float:
    """Bytes of memory, as by `docker --memory=8g` or SLURM's --mem, in control groups of version 2."""
    return min([math.inf, *(found[0] for found in _numbers("memory.max"))])


def _numbers(name: str) -> Iterator[list[float]]:
    """The numbers in a file of this process's control group, and of the groups around it, whose limits hold too."""
    with suppress(OSError):  # no Linux
        for line in _GROUPS.read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                group = _ROOT / line.removeprefix("0::").strip("/")
                for folder in (group, *group.parents):
                    with suppress(OSError, ValueError):  # no such file, or "max"
                        yield [float(word) for word in (folder / name).read_text(encoding="utf-8").split()]
