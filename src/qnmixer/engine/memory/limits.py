"""The memory that a process can use, and whether an error means that an allocation failed."""

import os

import torch

from qnmixer.engine.memory.footprint import MIB
from qnmixer.engine.processes.limits import memory_limit

_SURE = (
    "out of memory",
    "can't allocate memory",
    "could not create a primitive",  # a CPU's convolutions
    "alloc_failed",  # cuBLAS, cuDNN, cuSPARSE, cuFFT
    "unable to find a valid cudnn algorithm",  # none whose workspace fits
    "insufficient_resources",  # cuSPARSE
    "insufficient resources when calling",
    "failed to cuda calloc",  # NCCL
)
# Texts of errors that mean too little memory, but can have other causes too.
_UNSURE = (
    "cufft_internal_error",
    "cublas_status_not_initialized",
    "unable to find an engine to execute this computation",
    "no execution plans support the graph",
)
_LITTLE = 0.05
"""Below this free share of a GPU, an unsure text counts as out of memory."""


def is_out_of_memory(error: BaseException, free: float | None = None) -> bool:
    """Whether an error means that an allocation failed, on a GPU (torch's, CUDA's or a library's) or on the host.

    Args:
        error: the exception.
        free: free share of the GPU's memory; None: it is read if the text of the error leaves it open.
    """
    said = str(error).lower()
    if isinstance(error, MemoryError) or any(words in said for words in _SURE):
        return True
    if not any(words in said for words in _UNSURE):
        return False
    return (_free_share() if free is None else free) < _LITTLE


def _free_share() -> float:
    """Free share of the current GPU, including the cache that torch could free; 1 without a GPU."""
    if not torch.cuda.is_available():
        return 1.0
    free, total = torch.cuda.mem_get_info()
    # torch frees its cache before it gives up, so memory in the cache was not missing.
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return (free + cached) / total


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
