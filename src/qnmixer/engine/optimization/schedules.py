"""Learning-rate schedules: functions (step, n_steps, **arguments) → factor on the learning rate, after the warm-up."""

import math
from collections.abc import Callable

from qnmixer.engine.config.groups import ScheduleConfig
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
