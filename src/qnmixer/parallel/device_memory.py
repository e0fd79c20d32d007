"""The memory that a step takes, by kind, and that a process uses and may use."""

import os
from dataclasses import dataclass

import torch

from qnmixer.machine import memory

MIB = 2**20
WORKSPACE = 32 * MIB  # what torch holds for each handle of cuBLAS from an H100 on; 8.1 MiB on older GPUs


def on_a_gpu(n_bytes: float, workspace: float = WORKSPACE) -> float:
    """The peak that torch's allocator shows on a GPU, if tensors take `n_bytes`.

    The threads of the forward and of the backward pass have a handle of cuBLAS each. The 3 % are fitted: six settings
    on one H100 came within 3 % of the result. The likely cause is that the allocator rounds sizes up.
    """
    return 1.03 * n_bytes + 2 * workspace


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device at the peak of a training step, by kind.

    `strategy`: the copies that a strategy adds (messages, receive buffers, gathered weights); 0 for single.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    operator: float
    strategy: float = 0.0

    @property
    def peak(self) -> float:
        """The sum of all kinds on the device."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """The kinds whose sum is `peak`."""
        return dict(vars(self))


@dataclass(frozen=True)
class DevicePlan:
    """The plan of one device: its iterations, its footprint, and its most micro-batches in flight."""

    iterations: range
    in_flight: int
    footprint: Footprint


# What a process uses, from the device's own counters


@dataclass(frozen=True)
class Usage:
    """Bytes in use. A leak adds to `allocated`. Other programs cannot use bytes that are `reserved`."""

    allocated: int  # CUDA: in tensors; CPU: resident without file-backed pages, as mapped data comes and goes
    reserved: int  # CUDA: held by torch, its cache included; CPU: resident
    peak: int | None = None  # CUDA: highest of allocated since torch's last reset
    device_used: int | None = None  # CUDA: on the whole GPU, all processes together


def read_usage(device: torch.device) -> Usage:
    """Read the current use. It is cheap enough for every step."""
    if device.type != "cuda":
        return _cpu_usage()
    stats = torch.cuda.memory_stats(device)  # once: each of torch's three functions would collect all of it again
    free_bytes, total = torch.cuda.mem_get_info(device)
    names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak")
    allocated, reserved, peak = (stats.get(name, 0) for name in names)
    return Usage(allocated, reserved, peak, total - free_bytes)


def _cpu_usage() -> Usage:
    try:
        _, resident, file_backed = _pages_in_bytes()
        return Usage(resident - file_backed, resident)
    except OSError:  # no Linux
        import resource  # late, as in `memory_of`

        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
        return Usage(highest, highest)


def _pages_in_bytes() -> list[int]:
    """The address space of this process, what of it is resident, and what of that is backed by files (Linux only)."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return [int(n) * os.sysconf("SC_PAGE_SIZE") for n in file.read().split()[:3]]


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
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(words in message for words in _LACK_OF_MEMORY)


def memory_of(device: torch.device) -> float:
    """MiB that a process can use. On CUDA: the free memory. On a CPU: its share of all memory, or a lower limit.

    Such a limit is that of a container, of a job on a cluster, or of the shell (ulimit -v).
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / MIB
    import resource  # not on Windows, where reconstruct needs this file

    total = memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # A limit counts address space, of which the libraries have taken some.
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        total = min(total, limit - _pages_in_bytes()[0])
    return total / MIB
