"""Learning-rate schedules: functions (step, n_steps, **arguments) → factor on the learning rate, after the warm-up."""

import math
from collections.abc import Callable
from typing import Annotated

from annotated_types import Gt, Le

from qnmixer.config.groups import ScheduleConfig
from qnmixer.errors import PluginError


def warm_up_steps(config: ScheduleConfig, n_steps: int) -> int:
    """The steps of the warm-up. n_steps is the length of the run."""
    return round(config.warmup * n_steps)


def learning_rate_factor(config: ScheduleConfig, n_steps: int) -> Callable[[int], float]:
    """The function from an optimizer step to the factor on the learning rate. n_steps is the length of the run.

    Raises PluginError for a schedule that does not fit.
    """
    n_warmup = warm_up_steps(config, n_steps)
    schedule = config.bound(offered={"n_warmup": n_warmup})

    def factor(step: int) -> float:  # no object: LambdaLR writes an object's attributes into checkpoints
        if step < n_warmup:
            return (step + 1) / (n_warmup + 1)
        value = schedule(step, n_steps)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise PluginError(
                f"schedule._target_={config._target_} gives {value} at step {step}: it must give a finite number"
            )
        return number

    return factor


def constant(step: int, n_steps: int) -> float:
    """The same learning rate in all steps."""
    return 1.0


def cosine(step: int, n_steps: int, n_warmup: int) -> float:
    """A cosine from 1, after the n_warmup steps of the warm-up, to 0 at the end."""
    progress = min(1.0, (step - n_warmup) / max(1, n_steps - n_warmup))
    return 0.5 * (1 + math.cos(math.pi * progress))


def step(step: int, n_steps: int, at: Annotated[float, Gt(0), Le(1)], factor: Annotated[float, Gt(0)]) -> float:
    """1, then `factor` after the share `at` of the run."""
    return factor if step >= at * n_steps else 1.0
