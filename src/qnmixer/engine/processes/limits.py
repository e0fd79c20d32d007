"""The limits that a container or a job of a cluster sets for this process (Linux control groups). No torch import."""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cpu_limit() -> float:
    """The number of cores that may be busy at a time, as by `docker --cpus=2`; infinite without a limit."""
    limits = [math.inf]
    for group in _groups("cpu"):  # version 2 has both numbers in one file
        found = _numbers(group / "cpu.max") or [
            number for name in ("quota", "period") for number in _numbers(group / f"cpu.cfs_{name}_us")
        ]
        if len(found) == 2 and min(found) > 0:
            limits.append(found[0] / found[1])
    return min(limits)


def memory_limit() -> float:
    """Bytes of memory, as by `docker --memory=8g` or SLURM's --mem; infinite without a limit."""
    limits = [math.inf]
    for group in _groups("memory"):
        limits += _numbers(group / "memory.max") or _numbers(group / "memory.limit_in_bytes")
    return min(limits)


def _groups(controller: str) -> Iterator[Path]:
    """The control group of this process, and the groups around it, whose limits hold too."""
    with suppress(OSError, ValueError):  # no Linux
        for line in _GROUPS.read_text().splitlines():
            _, names, path = line.split(":", 2)
            if not names or controller in names.split(","):  # version 2 has one tree without a name
                root = _ROOT / controller if names else _ROOT
                group = root / path.strip("/")
                yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _numbers(path: Path) -> list[float]:
    """The numbers in a file; [] if there is no file, or no limit."""
    with suppress(OSError, ValueError):
        return [float(word) for word in path.read_text().split()]
    return []
