"""The config of `qnmixer.evaluate`, and the keys of all commands that score trained networks."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from omegaconf import DictConfig
from pydantic import BeforeValidator, Field

from qnmixer.data.folders import check_data
from qnmixer.files import check_there
from qnmixer.reconstruction.sections import AsTrained, CheckpointName, ScanOrAsTrained, SourceOrAsTrained, Symmetries
from qnmixer.settings.data import DataConfig
from qnmixer.settings.options import TARGET
from qnmixer.settings.parts import Loggers, NoiseConfig
from qnmixer.settings.run import check_targets
from qnmixer.settings.sections import Accelerator, EvaluationConfig, Texts
from qnmixer.settings.validation import Section


def _noise_of_run(section: Any) -> Any:
    return None if isinstance(section, Mapping) and section.get(TARGET, "") is None else section


class ScoringConfig(Section):
    """What trained networks are scored on."""

    checkpoint: CheckpointName
    split: Literal["train", "val", "test"]
    accelerator: Accelerator
    trust: Texts  # modules of the user's own that a run may name
    data: SourceOrAsTrained
    noise: Annotated[NoiseConfig | None, BeforeValidator(_noise_of_run)]  # None: the noise of training

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """With the arguments of its targets checked. Raises ConfigError or PluginError."""
        config = super().parse(cfg)
        check_targets(config)
        if isinstance(config.data, DataConfig):
            config.data = config.data.checked()
        if config.noise is not None:
            config.noise = config.noise.checked()
        return config


class RunEvaluationConfig(ScoringConfig):
    """What every kind of evaluation of `qnmixer.evaluate` has. Each adds its own section `evaluation`."""

    command: ClassVar[str] = "evaluate"

    run: str
    geometry: ScanOrAsTrained
    symmetries: Symmetries
    logger: Loggers = Field(default_factory=dict)


class EvaluateConfig(RunEvaluationConfig):
    """The checked config of one evaluation slice by slice."""

    evaluation: EvaluationConfig


def check_slices(data: DataConfig | AsTrained) -> None:
    """Raise UserError if the slices of an evaluation do not exist."""
    if isinstance(data, DataConfig):
        check_data(data)
    elif data.root is not None:
        check_there("data.root", data.root, "the folder with the run's slices")
