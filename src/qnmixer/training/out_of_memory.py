"""The line that a training run ends with when its step does not fit: what it needs, what there was, what would fit."""

import resource

import torch

from qnmixer.config import Config, override
from qnmixer.training.planning import MIB, Planner


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def memory_of(device: torch.device) -> float:
    """MiB that this process could have had: CUDA: what others leave; CPU: the machine's, or the process's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return (free + torch.cuda.memory_reserved(device)) / MIB
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return (total if limit == resource.RLIM_INFINITY else min(total, limit)) / MIB


def advice(planner: Planner, config: Config, available: float) -> str:
    """One line with the three mildest changes that fit by the plan into `available` MiB, or else come nearest to it."""
    needed = planner.estimate(config).peak / MIB
    peaks: dict[str, float] = {}
    for change in changes(config):
        peaks[change] = planner.estimate(override(config, change)).peak / MIB
        if sum(peak <= available for peak in peaks.values()) == 3:
            break
    chosen = sorted(peaks, key=lambda change: max(peaks[change], available))[:3]
    options = ", or ".join(f"{change} ({peaks[change]:,.0f} MiB)" for change in chosen)
    return (
        f"out of memory: a step of this run needs {needed:,.0f} MiB by the plan, and there were {available:,.0f} MiB "
        f"for all of the process: try {options}"
    )


def changes(config: Config) -> list[str]:
    """What makes a step smaller, mildest first; nothing that the config has already."""
    batch, accumulate = config.data.batch_size, config.trainer.accumulate_grad_batches
    recompute = "" if config.memory.name == "recompute" else "memory=recompute"
    half = "" if config.trainer.precision != "32" else "trainer.precision=16-mixed"
    smaller = (
        f"data.batch_size={batch // 2} trainer.accumulate_grad_batches={accumulate * batch // (batch // 2)}"
        if batch > 1
        else ""
    )
    single = f"data.batch_size=1 trainer.accumulate_grad_batches={accumulate * batch}" if batch > 2 else ""
    fewer = f"model.n_iterations={config.model.n_iterations // 2}" if config.model.n_iterations > 1 else ""
    thinner = f"model.channels={config.model.channels // 8 * 4}" if config.model.channels >= 8 else ""
    wanted = [recompute, smaller, half, f"{recompute} {half}", f"{recompute} {single}", f"{recompute} {half} {single}"]
    wanted += [fewer, thinner, f"{recompute} {half} {single} {thinner}"]
    return list(dict.fromkeys(change for change in (" ".join(c.split()) for c in wanted) if change))
