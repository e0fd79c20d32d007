"""The memory that a step takes, by kind; that a process uses and may use; and whether its use grows (a leak)."""

import gc
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from qnmixer.engine.processes.process import memory_limit

# What a step takes

MIB = 2**20
WORKSPACE = 32 * MIB
"""What torch holds for each handle of cuBLAS from an H100 on; 8.1 MiB on older GPUs."""


def on_a_gpu(n_bytes: float, workspace: float = WORKSPACE) -> float:
    """The peak that torch's allocator shows on a GPU, if tensors take `n_bytes`.

    The threads of the forward and of the backward pass have a handle of cuBLAS each. The 3 % are fitted: six settings
    on one H100 came within 3 % of the result. The likely cause is that the allocator rounds sizes up.
    """
    return 1.03 * n_bytes + 2 * workspace


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device at the peak of a training step, by kind. `host`: bytes that offloading moved to the host.

    `strategy`: the copies that a strategy adds (messages, receive buffers, gathered weights); 0 for single.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    operator: float
    strategy: float = 0.0
    host: float = 0.0

    @property
    def peak(self) -> float:
        """The sum of all kinds on the device."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """The kinds whose sum is `peak`."""
        return {name: value for name, value in vars(self).items() if name != "host"}


@dataclass(frozen=True)
class DevicePlan:
    """The plan of one device: the iterations of its stages, its footprint, and its most micro-batches in flight."""

    stages: tuple[range, ...]
    in_flight: int
    footprint: Footprint


# What a process uses, from the device's own counters

_FIELDS = re.compile(rb"^(VmHWM|VmRSS|RssAnon):\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    """Bytes in use. A leak adds to `allocated`. Other programs cannot use bytes that are `reserved`."""

    allocated: int  # CUDA: in tensors; CPU: resident without file-backed pages, as mapped data comes and goes
    peak: int  # CUDA: highest of allocated; CPU: highest of reserved; both since the last `reset_peak`
    reserved: int  # CUDA: held by torch, its cache included; CPU: resident
    device_used: int | None  # CUDA: on the whole GPU, all processes together; CPU: None


def read_usage(device: torch.device) -> Usage:
    """Read the current use. It is cheap enough for every step: 25 µs on a CPU, 150 if the caches are cold."""
    return _cuda_usage(device) if device.type == "cuda" else _cpu_usage()


def reset_peak(device: torch.device) -> None:
    """Start the peak again from the current use. If the system of a CPU does not allow a reset, the peak stays."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # 5 resets VmHWM alone (man 5 proc).
        with suppress(OSError), open("/proc/self/clear_refs", "wb", buffering=0) as file:
            file.write(b"5")


def _cuda_usage(device: torch.device) -> Usage:
    stats = torch.cuda.memory_stats(device)  # once: each of torch's three functions would collect all of it again
    free, total = torch.cuda.mem_get_info(device)
    return Usage(
        stats.get("allocated_bytes.all.current", 0),
        stats.get("allocated_bytes.all.peak", 0),
        stats.get("reserved_bytes.all.current", 0),
        total - free,
    )


def _cpu_usage() -> Usage:
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            kib = {name: int(value) for name, value in _FIELDS.findall(file.read())}
        return Usage(kib[b"RssAnon"] * 1024, kib[b"VmHWM"] * 1024, kib[b"VmRSS"] * 1024, None)
    except (OSError, KeyError):  # no such file, or one without these lines
        import resource  # late, as in `memory_of`

        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return Usage(highest, highest, highest, None)


# What it may use

_LACK_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "could not create a primitive",  # a CPU's convolutions
    "alloc_failed",  # cuBLAS, cuDNN, cuSPARSE, cuFFT
    "unable to find a valid cudnn algorithm",  # none whose workspace fits
    "insufficient_resources",  # cuSPARSE
    "insufficient resources when calling",
    "failed to cuda calloc",  # NCCL
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that an allocation failed, on a GPU (torch's, CUDA's or a library's) or on the host."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(words in said for words in _LACK_OF_MEMORY)


def memory_of(device: torch.device) -> float:
    """MiB that a process can use. On CUDA: the free memory. On a CPU: its share of all memory, or a lower limit.

    Such a limit is that of a container, of a job on a cluster, or of the shell (ulimit -v).
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / MIB
    import resource  # not on Windows, where reconstruct needs this file

    page = os.sysconf("SC_PAGE_SIZE")
    total = min(os.sysconf("SC_PHYS_PAGES") * page, memory_limit()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # A limit counts address space, of which the libraries have taken some.
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with open("/proc/self/statm", encoding="utf-8") as file:
            total = min(total, limit - int(file.read().split()[0]) * page)
    return total / MIB


# Growth


@dataclass(frozen=True)
class Leak:
    """Growth of the memory at the end of a step."""

    steps: int  # steps of growth that were seen; it may have started before
    first_bytes: int
    last_bytes: int

    @property
    def bytes_per_step(self) -> float:
        """Growth of one step."""
        return (self.last_bytes - self.first_bytes) / self.steps


@dataclass
class LeakWatch:
    """Detects a leak among the ups and downs of a healthy run, from the memory at the end of each step.

    It looks at the lowest value of each window of steps. A leak adds the same to every window. A jump (the first
    validation, a picture) adds to one window, and the noise after it can rise by chance. So the last windows must all
    rise above all earlier values, and evenly. Garbage in cycles grows like a leak until Python collects it. So a
    suspect makes it collect. If memory rises once more, it is a leak.
    """

    warm_up: int = 20  # first steps, left out: buffers, caches and the optimizer state are made in them
    window: int = 20  # steps
    n_windows: int = 4  # windows in a row that must rise
    floor: int = 8 * MIB  # their least rise together. On a CPU, healthy runs rose evenly by 0.5 MiB, unevenly by 19
    evenness: float = 0.5  # least rise of a window, as a share of the mean rise
    collect: Callable[[], Any] = gc.collect  # frees garbage that is in cycles

    _step: int = 0
    _held: list[int] = field(default_factory=list)  # in the steps of this window
    _minima: list[int] = field(default_factory=list)  # of all windows
    _suspected: bool = False
    _reported: bool = False

    def update(self, bytes_held: int) -> Leak | None:
        """Add the memory at the end of a step. Returns a leak once, when it is found."""
        self._step += 1
        if self._reported or self._step <= self.warm_up:
            return None
        self._held.append(bytes_held)
        if len(self._held) < self.window:
            return None
        self._minima.append(min(self._held))
        self._held.clear()
        if not self._rises_evenly():
            self._suspected = False
        elif not self._suspected:
            self._suspected = True
            self.collect()
        else:
            self._reported = True
            return Leak(self.window * self.n_windows, self._minima[-self.n_windows - 1], self._minima[-1])
        return None

    def _rises_evenly(self) -> bool:
        n, minima = self.n_windows, self._minima
        if len(minima) <= n:
            return False
        rises = [after - before for before, after in pairwise(minima[-n - 1 :])]
        growth = minima[-1] - max(minima[:-n])
        return growth >= self.floor and min(rises) >= self.evenness * sum(rises) / n
