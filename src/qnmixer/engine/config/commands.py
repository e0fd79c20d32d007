"""The configs of the commands beside training: their keys, types and bounds."""

import math
from collections.abc import Mapping
from os.path import expanduser
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le, Len
from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from qnmixer.engine.config.checking import Section, plain_values, unknown_key, validated
from qnmixer.engine.config.data import AsTrained, DataConfig, SourceOrAsTrained, check_data
from qnmixer.engine.config.files import TARGET, options
from qnmixer.engine.config.run import Config, check_targets, parse
from qnmixer.engine.config.sections import (
    Accelerator,
    AnyEvaluation,
    Count,
    EvaluationConfig,
    GeometryConfig,
    Length,
    Seed,
    TaskConfig,
    check_window,
)
from qnmixer.engine.config.targets import Loggers, NoiseConfig
from qnmixer.errors import ConfigError, suggest
from qnmixer.files import check_there
from qnmixer.weights import SUFFIX

CheckpointName = Literal["best", "last"]
Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""One text, or several."""
Trust = Texts
"""Modules of the user's own that a run may name."""
File = Annotated[str, AfterValidator(expanduser)]

DEVICES = {
    "V100-16": 16160.0,
    "V100-32": 32510.0,
    "A100-40": 40536.0,
    "A100-80": 81251.0,
    "H100": 81559.0,
    "RTX4090": 24564.0,
    "RTX5090": 32607.0,
}
"""MiB, as the driver reports it."""


def _noise_of_run(section: Any) -> Any:
    return None if isinstance(section, Mapping) and section.get(TARGET, "") is None else section


class ScoringConfig(Section):
    """What trained networks are scored on."""

    checkpoint: CheckpointName
    split: Literal["train", "val", "test"]
    accelerator: Accelerator
    trust: Trust
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


class EvaluateConfig(ScoringConfig):
    """The checked config of one evaluation."""

    evaluation: AnyEvaluation
    run: str
    logger: Loggers = Field(default_factory=dict)

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """As for every scoring. An evaluation by task has phantoms and noise of its own. Raises ConfigError."""
        config = super().parse(cfg)
        if not isinstance(config.evaluation, TaskConfig):
            return config
        chosen = isinstance(config.data, DataConfig) or any(value is not None for value in config.data.plain().values())
        if chosen or config.split != "test":
            raise ConfigError(f"evaluation=task draws its own phantoms: leave out {'data' if chosen else 'split'}=…")
        if config.noise is not None:
            raise ConfigError(
                f"evaluation=task draws photon counts: give doses, as evaluation.photons=[1e5], not {config.noise.name}"
            )
        return config


class RobustnessConfig(ScoringConfig):
    """The checked config of one table of robustness."""

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
        known = [option for option in options("noise") if option not in ("as_trained", "custom")]
        if stray := next((option for option in self.noises if option not in known), None):
            raise ConfigError(f"noises={stray} does not exist: choose {', '.join(known)}")
        return self


class CompareConfig(ScoringConfig):
    """The checked config of one comparison."""

    evaluation: EvaluationConfig
    sweep: Texts  # folders; several count as one
    seed: Seed  # of test phantoms and noise
    output: str | None

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """As for an evaluation, without total variation, which is one of the networks."""
        config = super().parse(cfg)
        if config.evaluation.tv_weight is not None:  # of evaluation=default
            raise unknown_key("evaluation.tv_weight")
        return config


class WithRunConfig(Section):
    """Keys of a command beside those of a run, which has a training step."""

    run: Config

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """Raises ConfigError."""
        values = plain_values(cfg)
        command_values = {key: values.pop(key) for key in cls.model_fields if key != "run"}
        run = parse(values)
        if not run.model.has_weights:
            raise ConfigError(
                f"model={run.model.name} has no weights, so it has no training step: choose another model"
            )
        config: Self = validated(cls, command_values | {"run": run})
        return config


class PlanConfig(WithRunConfig):
    """The checked config of one plan, which reads no slices."""

    format: Literal["table", "json", "levers"]
    device: Annotated[str, BeforeValidator(str)] | None  # None: all known devices

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """Folders of slices may be missing. Raises ConfigError."""
        for key in OmegaConf.missing_keys(cfg):
            if key.startswith("data.") and key.endswith(".root"):
                OmegaConf.update(cfg, key, ".")
        config = super().parse(cfg)
        if config.device is not None:
            device_memory(config.device)
        return config


class DoctorConfig(WithRunConfig):
    """The checked config of one checkup."""

    format: Literal["table", "json"]


class ReconstructConfig(Section):
    """The config of `qnmixer.reconstruct`."""

    run: str
    input: File
    output: File
    kind: Literal["auto", "slices", "sinograms"]
    formats: list[Literal["dicom", "npy", "png"]]
    window: list[float] | None  # HU; None: chosen by the input
    unit: Literal["attenuation", "value"]
    water_attenuation: Length  # 1/mm
    detector_pitch: Length | None  # mm, of the scan; None: the run's
    angle_span: Length | None  # radians, of the scan; None: the run's
    checkpoint: CheckpointName
    accelerator: Accelerator
    batch_size: Count | None  # None: chosen by the device
    trust: Trust

    @model_validator(mode="after")
    def _useful(self) -> Self:
        if not self.formats:
            raise ValueError("formats=[] would write nothing: give some of dicom, npy, png")
        if self.window is not None:
            check_window(self.window)
        return self


class ExportConfig(Section):
    """The config of `qnmixer.export`."""

    run: str
    output: str
    trust: Trust

    @model_validator(mode="after")
    def _weights_file(self) -> Self:
        if not self.output.endswith(SUFFIX):
            raise ValueError(f"output={self.output} does not name a weights file: give a name that ends in {SUFFIX}")
        return self


class CalibrateConfig(Section):
    """The config of `qnmixer.calibrate`."""

    input: File
    output: File
    unit: Literal["attenuation", "counts"]
    air: File | None  # None: the input is of air, or in attenuation
    electronic_sigma: Annotated[float, Ge(0)] | None  # counts; None: fitted
    region: Annotated[list[float], Len(3, 3)] | None  # x, y, radius in mm
    n_slices: Annotated[int, Ge(1), Le(64)]
    water_attenuation: Length  # 1/mm
    seed: Seed
    geometry: GeometryConfig

    @property
    def of_scans(self) -> bool:
        """Whether the input is of scans. Else it is of slices."""
        return self.input.endswith(".npy")

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if self.air is not None and self.unit != "counts":
            raise ValueError(f"air={self.air} divides counts: give unit=counts too, or leave air= out")
        if not self.of_scans and self.unit == "counts":
            raise ValueError("unit=counts is for scans in .npy, and slices are in HU: leave it out")
        if self.of_scans == (self.region is not None):
            way = "leave it out" if self.of_scans else "give a uniform disc in mm from the centre, region=[x,y,radius]"
            raise ValueError(f"region is for a series of slices: {way}")
        return self


CONFIGS: dict[str, type[Section]] = {
    "train": Config,
    "plan": PlanConfig,
    "doctor": DoctorConfig,
    "evaluate": EvaluateConfig,
    "robustness": RobustnessConfig,
    "compare": CompareConfig,
    "reconstruct": ReconstructConfig,
    "export": ExportConfig,
    "calibrate": CalibrateConfig,
}
"""The class of each command's config, by its file in conf/."""


def check_slices(data: DataConfig | AsTrained) -> None:
    """Raise UserError if the slices of an evaluation do not exist."""
    if isinstance(data, DataConfig):
        check_data(data)
    elif data.root is not None:
        check_there("data.root", data.root, "the folder with the run's slices")


def device_memory(name: str) -> float:
    """Memory in MiB of a named device, or of "24" or "24GB". Raises ConfigError for other texts."""
    if name in DEVICES:
        return DEVICES[name]
    try:
        size = float(name.lower().removesuffix("gb"))
    except ValueError:
        size = 0.0
    if not (0 < size < math.inf):
        raise ConfigError(f"device={name} is not known: {suggest(name, DEVICES)}, or give a size in GB (device=24)")
    return 1024 * size
