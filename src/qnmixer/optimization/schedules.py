"""Learning-rate schedules by name."""

import math
from collections.abc import Callable

from qnmixer.config import ScheduleConfig, StepScheduleConfig


def learning_rate_factor(config: ScheduleConfig, n_steps: float) -> Callable[[int], float]:
    """Factor on the learning rate at optimizer step k of a run of n_steps (may be infinite for a constant one)."""
    n_warmup = round(config.warmup * n_steps) if config.warmup and math.isfinite(n_steps) else 0

    def factor(step: int) -> float:
        if step < n_warmup:
            return (step + 1) / (n_warmup + 1)
        if isinstance(config, StepScheduleConfig):
            return config.factor if step >= config.at * n_steps else 1.0
        if config.name == "cosine":
            progress = min(1.0, (step - n_warmup) / max(1, n_steps - n_warmup))
            return 0.5 * (1 + math.cos(math.pi * progress))
        return 1.0

    return factor
