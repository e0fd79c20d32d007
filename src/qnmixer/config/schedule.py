"""Schema of `schedule`: the learning rate over a run."""

from dataclasses import dataclass
from typing import Any, ClassVar

from qnmixer.config.option import number
from qnmixer.config.target import Target, schema


@schema()
@dataclass(kw_only=True)
class ScheduleConfig(Target):
    """A function `(step, n_steps, **arguments)` → factor on the learning rate, after a warm-up.

    Attributes:
        warmup: share of all optimizer steps in which the rate rises to lr.
    """

    group: ClassVar[str] = "schedule"

    warmup: float = number(at_least=0, at_most=1)

    def keywords(self) -> dict[str, Any]:
        """All arguments but the warm-up, which every schedule has."""
        return {key: value for key, value in super().keywords().items() if key != "warmup"}


@schema("qnmixer.optimization.schedules.step")
@dataclass(kw_only=True)
class StepScheduleConfig(ScheduleConfig):
    """Multiply the rate by `factor` once, after the share `at` of the run."""

    at: float = number(above=0, at_most=1)
    factor: float = number(above=0)
