"""The config of `qnmixer.compare`."""

from typing import ClassVar, Self

from omegaconf import DictConfig

from qnmixer.evaluation.evaluate_config import ScoringConfig
from qnmixer.reconstruction.sections import Symmetries
from qnmixer.settings.sections import EvaluationConfig, Seed, Texts
from qnmixer.settings.validation import unknown_key


class CompareConfig(ScoringConfig):
    """The checked config of one comparison."""

    command: ClassVar[str] = "compare"

    evaluation: EvaluationConfig
    sweep: Texts | None  # folders; several count as one; None: the latest, if there are no runs
    runs: Texts
    seed: Seed  # of test phantoms and noise
    output: str | None
    symmetries: Symmetries

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """As for an evaluation, without total variation, which is one of the networks."""
        config = super().parse(cfg)
        if config.evaluation.tv_weight is not None:  # of evaluation=default
            raise unknown_key("evaluation.tv_weight")
        return config
