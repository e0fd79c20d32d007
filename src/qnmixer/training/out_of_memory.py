"""The line that a training run ends with when its step does not fit: what it needs, what there was, what would fit."""

import os
import time

import torch

from qnmixer.config import Config, LearnedConfig, override
from qnmixer.errors import ConfigError
from qnmixer.training.planning import MIB, Planner

_SECONDS = 20.0

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


def advice(planner: Planner, config: Config, available: float) -> str:
    """One line with the three mildest changes that fit by the plan into `available` MiB, or else come nearest to it.

    Those that were planned within `_SECONDS`: other ranks are waiting for this one.
    """
    end = time.monotonic() + _SECONDS
    needed = planner.estimate(config).peak / MIB
    peaks: dict[str, float] = {}
    for change in changes(config):
        peaks[change] = planner.estimate(override(config, change)).peak / MIB
        if sum(peak <= available for peak in peaks.values()) == 3 or time.monotonic() > end:
            break
    fitting = [change for change, peak in peaks.items() if peak <= available]
    chosen = fitting or sorted(peaks, key=peaks.__getitem__)[:3]
    options = ", or ".join(f"{change} ({peaks[change]:,.0f} MiB)" for change in chosen)
    why = "" if needed > available else " (gaps between tensors, validation or other programs took the rest)"
    return (
        f"out of memory: a step of this run needs {needed:,.0f} MiB by the plan, and there were {available:,.0f} MiB"
        f"{why}: {'try' if fitting else 'nothing simple fits, nearest come'} {options}"
    )


def changes(config: Config) -> list[str]:
    """What makes a step smaller with the same effective batch, mildest first; nothing that the config has already."""
    batch = config.data.batch_size
    recompute = "" if config.memory.name == "recompute" else "memory=recompute"
    half = "" if config.trainer.precision != "32" else "trainer.precision=16-mixed"
    divisors = [size for size in range(batch - 1, 0, -1) if batch % size == 0]
    smaller, single = (_of_batches(config, sizes) for sizes in (divisors[:1], divisors[-1:]))
    model = config.model
    fewer = f"model.n_iterations={model.T // 2}" if model.T > 1 else ""
    channels = model.channels if isinstance(model, LearnedConfig) else 0
    thinner = f"model.channels={channels // 8 * 4}" if channels >= 8 else ""
    wanted = [recompute, smaller, half, f"{recompute} {half}", f"{recompute} {single}", f"{recompute} {half} {single}"]
    wanted += [_one_in_flight(config), fewer, thinner, f"{recompute} {half} {single} {thinner}"]
    changed = dict.fromkeys(change for change in (" ".join(c.split()) for c in wanted) if change)
    return [change for change in changed if _is_possible(config, change)]


def _one_in_flight(config: Config) -> str:
    """The overrides for a pipeline with one micro-batch at a time, where there are devices for one."""
    if (config.trainer.devices or 1) == 1:
        return ""
    group = "" if config.strategy.name == "pipeline" else "strategy=pipeline "
    return f"{group}strategy.schedule=sequential strategy.stages_per_device=1"


def _is_possible(config: Config, change: str) -> bool:
    try:
        return override(config, change) != config
    except ConfigError:
        return False


def _of_batches(config: Config, sizes: list[int]) -> str:
    """The overrides for a batch of the first of some sizes, more of them accumulated."""
    if not sizes:
        return ""
    accumulate = config.trainer.accumulate_grad_batches * config.data.batch_size // sizes[0]
    return f"data.batch_size={sizes[0]} trainer.accumulate_grad_batches={accumulate}"
