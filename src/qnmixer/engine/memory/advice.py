"""The last line of a run that is out of memory: the memory it needs, the free memory, and changes that would fit."""

import time

from qnmixer.engine.config import Config, override
from qnmixer.engine.memory.footprint import MIB
from qnmixer.engine.memory.plan import Planner
from qnmixer.errors import ConfigError

_SECONDS = 20.0


def advice(planner: Planner, config: Config, available: float) -> str:
    """One line with the three mildest changes that fit into `available` MiB by the plan, or the closest ones.

    Planning stops after `_SECONDS`, because other ranks are waiting for this rank. If nothing fits until then, the
    strongest change is planned too.
    """
    end = time.monotonic() + _SECONDS
    needed = planner.estimate(config).peak / MIB
    peaks: dict[str, float] = {}
    fitting: list[str] = []
    left = changes(config)
    while left and len(fitting) < 3:
        late = time.monotonic() > end
        if late and fitting:
            break
        change = left[-1] if late else left[0]
        left = [] if late else left[1:]
        peaks[change] = planner.estimate(override(config, change)).peak / MIB
        fitting += [change] * (peaks[change] <= available)
    chosen = fitting or sorted(peaks, key=peaks.__getitem__)[:3]
    options = ", or ".join(f"{change} ({peaks[change]:,.0f} MiB)" for change in chosen)
    # By the plan the step fits. So something that the plan does not count took the memory.
    why = "" if needed > available else " (gaps between tensors, validation or other programs took the rest)"
    return (
        f"out of memory: a step of this run needs {needed:,.0f} MiB by the plan, but {available:,.0f} MiB were free"
        f"{why}: {'try' if fitting else 'no simple change fits, the closest are'} {options}"
    )


def changes(config: Config) -> list[str]:
    """Changes that make a step smaller at the same effective batch, mildest first, except those already made."""
    batch = config.data.batch_size
    recompute = "" if config.memory.name == "recompute" else "memory=recompute"
    kind = "bf16" if config.trainer.accelerator == "cpu" else "16"  # fp16 is far slower on a CPU
    half = "" if config.trainer.precision != "32" else f"trainer.precision={kind}-mixed"
    smaller, single = (_with_batch(config, min(batch - 1, most)) for most in (batch, 1))
    model = config.model
    fewer = f"model.n_iterations={model.T // 2}" if model.T > 1 else ""
    thinner = f"model.channels={model.width // 8 * 4}" if model.width >= 8 else ""
    wanted = [recompute, smaller, half, f"{recompute} {half}", f"{recompute} {single}", f"{recompute} {half} {single}"]
    wanted += [_one_in_flight(config), fewer, thinner, f"{recompute} {half} {single} {thinner}"]
    changed = dict.fromkeys(change for change in (" ".join(c.split()) for c in wanted) if change)
    return [change for change in changed if changed_to(config, change) not in (None, config)]


def _one_in_flight(config: Config) -> str:
    """Overrides for a pipeline with one micro-batch at a time, if there are enough devices."""
    if (config.trainer.devices or 1) == 1:
        return ""
    group = "" if config.strategy.name == "pipeline" else "strategy=pipeline "
    return f"{group}strategy.schedule=sequential strategy.stages_per_device=1"


def changed_to(config: Config, overrides: str) -> Config | None:
    """The config with overrides; None if it refuses them."""
    try:
        return override(config, overrides)
    except ConfigError:
        return None


def _with_batch(config: Config, most: int) -> str:
    """Overrides for the largest batch of at most `most` that divides the batch, with more accumulation."""
    batch = config.data.batch_size
    for size in range(most, 0, -1):
        if batch % size == 0:
            accumulate = config.trainer.accumulate_grad_batches * batch // size
            return f"data.batch_size={size} trainer.accumulate_grad_batches={accumulate}"
    return ""
