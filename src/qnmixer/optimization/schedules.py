"""Learning-rate schedules by name."""

import math
from collections.abc import Callable

from qnmixer.config import CustomScheduleConfig, ScheduleConfig, StepScheduleConfig
from qnmixer.errors import ConfigError, PluginError
from qnmixer.plugins import Kind, check_call, load_plugin

_FUNCTION = Kind("a function (step, n_steps)", lambda it: callable(it) and not isinstance(it, type))


def learning_rate_factor(config: ScheduleConfig, n_steps: float) -> Callable[[int], float]:
    """Factor on the learning rate at optimizer step k of a run of n_steps (may be infinite for a constant one).

    Raises PluginError for a schedule of the user's own that does not fit.
    """
    n_warmup = round(config.warmup * n_steps) if config.warmup and math.isfinite(n_steps) else 0
    after_warmup = _after_warmup(config, n_steps, n_warmup)

    def factor(step: int) -> float:  # no object: LambdaLR would write its attributes into checkpoints
        return (step + 1) / (n_warmup + 1) if step < n_warmup else after_warmup(step)

    return factor


def _after_warmup(config: ScheduleConfig, n_steps: float, n_warmup: int) -> Callable[[int], float]:
    if isinstance(config, CustomScheduleConfig):
        return _custom(config, n_steps)
    if isinstance(config, StepScheduleConfig):
        return lambda step: config.factor if step >= config.at * n_steps else 1.0
    if config.name == "cosine":

        def cosine(step: int) -> float:
            progress = min(1.0, (step - n_warmup) / max(1, n_steps - n_warmup))
            return 0.5 * (1 + math.cos(math.pi * progress))

        return cosine
    if config.name == "constant":
        return lambda step: 1.0
    raise ConfigError(f"schedule={config.name} has a schema, but nothing here builds it")


def _custom(config: CustomScheduleConfig, n_steps: float) -> Callable[[int], float]:
    key, target = "schedule._target_", config._target_
    function = load_plugin(key, target, _FUNCTION)
    check_call(key, target, function, (0, n_steps), {}, config.arguments)

    def factor(step: int) -> float:
        value = function(step, n_steps, **config.arguments)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise PluginError(f"{key}={target} gives {value} at step {step}: it must give a finite number")
        return number

    return factor
