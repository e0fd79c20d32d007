"""Learning-rate schedules: functions (step, n_steps, **arguments) → factor on the learning rate, after the warm-up."""

import math
from typing import Annotated

from annotated_types import Gt, Le


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
