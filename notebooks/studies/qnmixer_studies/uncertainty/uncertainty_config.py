"""The config of `qnmixer.evaluate evaluation=uncertainty`."""

from typing import Annotated, Self

from annotated_types import Gt, Len, Lt
from omegaconf import DictConfig

from qnmixer.errors import ConfigError
from qnmixer.evaluation.evaluate_config import RunEvaluationConfig
from qnmixer.settings.validation import Section


class UncertaintyConfig(Section):
    """How far the deviation over symmetries is an uncertainty."""

    levels: Annotated[list[Annotated[float, Gt(0), Lt(1)]], Len(1)]
    least_hu: float


class EvaluateUncertaintyConfig(RunEvaluationConfig):
    """The checked config of one evaluation of the deviation over symmetries."""

    evaluator = "qnmixer_studies.uncertainty.evaluate_uncertainty.evaluate_uncertainty"
    evaluation: UncertaintyConfig

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """As for every scoring. One image has no deviation. Raises ConfigError."""
        config = super().parse(cfg)
        if config.symmetries == 1:
            raise ConfigError("evaluation=uncertainty is the deviation over symmetries: give symmetries=8")
        return config
