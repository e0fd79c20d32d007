"""How much memory there is to have, and how an allocation says that there was not enough."""

import os

import torch

from qnmixer.memory.footprint import MIB

# The last is how a CPU's convolutions say it.
_SAYS_SO = ("out of memory", "can't allocate memory", "alloc_failed", "could not create a primitive")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU (torch's, CUDA's or a library's) or on the host."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _SAYS_SO)


def memory_of(device: torch.device) -> float:
    """MiB that a process can have: on CUDA what is free, on a CPU its share of all, or what its limit leaves."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / MIB
    import resource  # not on Windows, where reconstruct needs this file

    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with open("/proc/self/statm") as file:
            total = min(total, limit - int(file.read().split()[0]) * page)
    return total / MIB
