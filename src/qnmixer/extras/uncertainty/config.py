"""The config of `qnmixer.evaluate evaluation=uncertainty`."""

from typing import Annotated, ClassVar, Self

from annotated_types import Gt, Len, Lt
from omegaconf import DictConfig
from pydantic import Field

from qnmixer.engine.config.checking import Section
from qnmixer.engine.config.sections import ScanOrAsTrained, Symmetries
from qnmixer.engine.config.targets import Loggers
from qnmixer.engine.evaluation.config import ScoringConfig
from qnmixer.errors import ConfigError


class UncertaintyConfig(Section):
    """How far the deviation over symmetries is an uncertainty."""

    levels: Annotated[list[Annotated[float, Gt(0), Lt(1)]], Len(1)]
    least_hu: float


class EvaluateUncertaintyConfig(ScoringConfig):
    """The checked config of one evaluation of the deviation over symmetries."""

    command: ClassVar[str] = "evaluate"

    evaluation: UncertaintyConfig
    run: str
    geometry: ScanOrAsTrained
    symmetries: Symmetries
    logger: Loggers = Field(default_factory=dict)

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """As for every scoring. One image has no deviation. Raises ConfigError."""
        config = super().parse(cfg)
        if config.symmetries == 1:
            raise ConfigError("evaluation=uncertainty is the deviation over symmetries: give symmetries=8")
        return config
