"""What `schedule` may say: how the learning rate goes over a run."""

from dataclasses import dataclass

from qnmixer.config.custom import Custom
from qnmixer.config.option import number


@dataclass(kw_only=True)
class ScheduleConfig:
    """How the learning rate goes over the run; fractions are of all optimizer steps."""

    name: str
    warmup: float = number(at_least=0, at_most=1)


@dataclass(kw_only=True)
class StepScheduleConfig(ScheduleConfig):
    """× factor once, at `at` of the run."""

    at: float = number(above=0, at_most=1)
    factor: float = number(above=0)


@dataclass(kw_only=True)
class CustomScheduleConfig(ScheduleConfig, Custom):
    """A user's own function `(step, n_steps, **arguments)` → factor on the learning rate."""
