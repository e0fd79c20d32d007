"""The config of `qnmixer.robustness`."""

from typing import Annotated, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le
from pydantic import model_validator

from qnmixer.errors import ConfigError
from qnmixer.evaluation.evaluate_config import ScoringConfig
from qnmixer.reconstruction.sections import Symmetries, WithCures
from qnmixer.settings.options import options
from qnmixer.settings.parts import Loggers
from qnmixer.settings.sections import Count, EvaluationConfig, Length

Fraction = Annotated[float, Gt(0), Le(1)]


class RobustnessConfig(ScoringConfig, WithCures):
    """The checked config of one table of robustness."""

    command: ClassVar[str] = "robustness"

    evaluation: EvaluationConfig
    run: str
    n_slices: Count | None  # None: all of the split
    symmetries: Symmetries
    photons: list[Length]
    noises: list[str]
    views: tuple[Fraction, Annotated[float, Ge(1), Le(64)]] | None  # times those of training
    arc: list[Literal["short"] | Annotated[float, Gt(0), Le(360)]]  # degrees
    patient_size: list[Length]
    detector_offset: list[float]
    source_distance: list[float]
    tube_kv: list[Literal[120]]
    scatter: list[Fraction]
    smooth_scatter: list[Fraction]
    crosstalk: list[Annotated[float, Gt(0), Le(0.5)]]
    motion: list[float]
    truncation: list[Annotated[float, Gt(1), Le(4)]]
    metal: list[Length]
    logger: Loggers

    @model_validator(mode="after")
    def _known_noises(self) -> Self:
        if stray := next((option for option in self.noises if option not in options("noise")), None):
            raise ConfigError(f"noises={stray} does not exist: choose {', '.join(options('noise'))}")
        return self
