"""The memory that a process can use, and whether an error means that an allocation failed."""

import os

import torch

from qnmixer.engine.memory.footprint import MIB
from qnmixer.engine.processes.cores import memory_limit

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
