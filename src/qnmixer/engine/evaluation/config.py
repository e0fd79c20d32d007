"""The config of `qnmixer.evaluate`, and the keys of all commands that score trained networks."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le, Len, Lt
from omegaconf import DictConfig
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from qnmixer.engine.config.checking import Section
from qnmixer.engine.config.data import AsTrained, DataConfig, SourceOrAsTrained, check_data
from qnmixer.engine.config.files import TARGET
from qnmixer.engine.config.run import check_targets
from qnmixer.engine.config.sections import (
    Accelerator,
    CheckpointName,
    EvaluationConfig,
    GeometryChanges,
    Length,
    ScanOrAsTrained,
    Seed,
    Symmetries,
    Texts,
)
from qnmixer.engine.config.targets import Loggers, NoiseConfig
from qnmixer.errors import ConfigError
from qnmixer.files import check_there


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


class TaskConfig(Section):
    """An evaluation by task: phantoms with inserts at several doses."""

    photons: Annotated[list[Annotated[float, Gt(0), Le(1e15)]], Len(1)]
    n_images: Annotated[int, Ge(3)]
    insert_hu: Annotated[float, Ge(-1000), Le(2000)]
    insert_diameter: Length  # mm
    edge_hu: Annotated[list[Annotated[float, Ge(-1000), Le(2000)]], Len(1)]
    tv_weight: Annotated[float, Ge(1e-9), Le(1e9)]
    tv_noise_weight: Annotated[float, Ge(0), Le(1e9)]
    seed: Seed

    @model_validator(mode="after")
    def _visible(self) -> Self:
        if 0 in self.edge_hu:
            raise ValueError(f"edge_hu={self.edge_hu} has a disc without contrast: give for example [50,200,800]")
        if self.insert_hu == 0:
            raise ValueError("insert_hu=0 is no insert: give for example 20")
        return self


class UncertaintyConfig(Section):
    """How far the deviation over symmetries is an uncertainty."""

    levels: Annotated[list[Annotated[float, Gt(0), Lt(1)]], Len(1)]
    least_hu: float


def kind_of_evaluation(values: Any) -> str:
    """Which class has the keys of an evaluation: `task`, `uncertainty` or `slices`."""
    keys = values if isinstance(values, dict) else getattr(values, "__dict__", {})
    return "task" if "photons" in keys else "uncertainty" if "levels" in keys else "slices"


AnyEvaluation = Annotated[
    Annotated[TaskConfig, Tag("task")]
    | Annotated[UncertaintyConfig, Tag("uncertainty")]
    | Annotated[EvaluationConfig, Tag("slices")],
    Discriminator(kind_of_evaluation),
]


class EvaluateConfig(ScoringConfig):
    """The checked config of one evaluation."""

    command: ClassVar[str] = "evaluate"

    evaluation: AnyEvaluation
    run: str
    geometry: ScanOrAsTrained
    symmetries: Symmetries
    logger: Loggers = Field(default_factory=dict)

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """As for every scoring. An evaluation by task has phantoms and noise of its own. Raises ConfigError."""
        config = super().parse(cfg)
        if isinstance(config.evaluation, UncertaintyConfig) and config.symmetries == 1:
            raise ConfigError("evaluation=uncertainty is the deviation over symmetries: give symmetries=8")
        if not isinstance(config.evaluation, TaskConfig):
            return config
        same_scan = isinstance(config.geometry, GeometryChanges) and not any(
            value is not None for value in config.geometry.plain().values()
        )
        if config.symmetries > 1 or not same_scan:
            key = "symmetries" if config.symmetries > 1 else "geometry"
            raise ConfigError(f"evaluation=task is of the network itself, on its own scan: leave out {key}=…")
        chosen = isinstance(config.data, DataConfig) or any(value is not None for value in config.data.plain().values())
        if chosen or config.split != "test":
            raise ConfigError(f"evaluation=task draws its own phantoms: leave out {'data' if chosen else 'split'}=…")
        if config.noise is not None:
            raise ConfigError(
                f"evaluation=task draws photon counts: give doses, as evaluation.photons=[1e5], not {config.noise.name}"
            )
        return config


def check_slices(data: DataConfig | AsTrained) -> None:
    """Raise UserError if the slices of an evaluation do not exist."""
    if isinstance(data, DataConfig):
        check_data(data)
    elif data.root is not None:
        check_there("data.root", data.root, "the folder with the run's slices")
