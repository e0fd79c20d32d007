"""The config of `qnmixer.robustness`."""

from typing import ClassVar, Self

from pydantic import model_validator

from qnmixer.engine.config.files import options
from qnmixer.engine.config.sections import Count, EvaluationConfig, Length
from qnmixer.engine.config.targets import Loggers
from qnmixer.engine.evaluation.config import ScoringConfig
from qnmixer.errors import ConfigError


class RobustnessConfig(ScoringConfig):
    """The checked config of one table of robustness."""

    command: ClassVar[str] = "robustness"

    evaluation: EvaluationConfig
    run: str
    n_slices: Count | None  # None: all of the split
    photons: list[Length]
    noises: list[str]
    views: list[int]
    field_of_view: list[Length]
    detector_offset: list[float]
    source_distance: list[float]
    logger: Loggers

    @model_validator(mode="after")
    def _known_noises(self) -> Self:
        if stray := next((option for option in self.noises if option not in options("noise")), None):
            raise ConfigError(f"noises={stray} does not exist: choose {', '.join(options('noise'))}")
        return self
