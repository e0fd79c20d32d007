"""The config of `qnmixer.evaluate`, and the keys of all commands that score trained networks."""

from typing import ClassVar, Literal, Self

from omegaconf import DictConfig
from pydantic import Field

from qnmixer.data.folders import check_data
from qnmixer.files import check_there
from qnmixer.reconstruction.sections import (
    AsTrained,
    CheckpointName,
    ScanOrAsTrained,
    SourceOrAsTrained,
    Symmetries,
    WithCures,
    WithNoise,
)
from qnmixer.settings.data import DataConfig
from qnmixer.settings.parts import Loggers
from qnmixer.settings.sections import Accelerator, Count, EvaluationConfig, Texts


class ScoringConfig(WithNoise):
    """What trained networks are scored on."""

    checkpoint: CheckpointName
    split: Literal["train", "val", "test"]
    accelerator: Accelerator
    trust: Texts  # modules of the user's own that a run may name
    data: SourceOrAsTrained

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """With the arguments of its targets checked. Raises ConfigError or PluginError."""
        config = super().parse(cfg)
        if isinstance(config.data, DataConfig):
            config.data = config.data.checked()
        return config


class RunEvaluationConfig(ScoringConfig, WithCures):
    """What every kind of evaluation of `qnmixer.evaluate` has. Each adds its own section `evaluation`."""

    command: ClassVar[str] = "evaluate"
    evaluator: ClassVar[str]  # the function (config, folder, overrides) that evaluates. It loads torch

    run: str
    geometry: ScanOrAsTrained
    n_slices: Count | None = None
    symmetries: Symmetries
    logger: Loggers = Field(default_factory=dict)


class EvaluateConfig(RunEvaluationConfig):
    """The checked config of one evaluation slice by slice."""

    evaluator = "qnmixer.evaluation.evaluate_run.evaluate_run"
    evaluation: EvaluationConfig


def check_slices(data: DataConfig | AsTrained) -> None:
    """Raise UserError if the slices of an evaluation do not exist."""
    if isinstance(data, DataConfig):
        check_data(data)
    elif data.root is not None:
        check_there("data.root", data.root, "the folder with the run's slices")
