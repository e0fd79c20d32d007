"""Schema of `evaluation`: which scores are computed, and what is drawn."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qnmixer.engine.config.option import number
from qnmixer.errors import ConfigError

if TYPE_CHECKING:
    from qnmixer.engine.config.run import Config


@dataclass(kw_only=True)
class EvaluationConfig:
    """The scores of an evaluation, and its pictures."""

    window: list[float]  # HU, [low, high]
    n_pictures: int = number(at_least=1)
    tv_weight: float | None = number(above=0, default=None)  # None: without total variation
    tv_noise_weight: float = number(at_least=0, default=0.0)

    def check(self, run: "Config | None" = None) -> None:
        """Check that a window is two numbers."""
        check_window("evaluation.window", self.window)


def check_window(key: str, window: list[float]) -> None:
    """Raise ConfigError unless this is [low, high]."""
    if len(window) != 2 or not -math.inf < window[0] < window[1] < math.inf:
        raise ConfigError(f"{key}={window} is not [low, high] in HU: give for example [-160,240]")
