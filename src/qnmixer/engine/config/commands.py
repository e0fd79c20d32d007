"""The configs of the commands beside training: their keys, types and bounds."""

import math
from dataclasses import dataclass
from os.path import expanduser
from typing import Any, Literal, TypeVar

from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.config.data import AsTrained, DataConfig, check_data
from qnmixer.engine.config.groups import NoiseConfig, parse_section
from qnmixer.engine.config.options import TARGET, plain_values, unknown_key
from qnmixer.engine.config.run import Config, Seed, check_targets, parse, require_sections, schema_of
from qnmixer.engine.config.sections import Accelerator, Count, EvaluationConfig, Length, check_window
from qnmixer.errors import ConfigError, suggest
from qnmixer.files import check_there
from qnmixer.weights import SUFFIX

_T = TypeVar("_T")
_Measuring = TypeVar("_Measuring", bound="MeasuringConfig")
Which = Literal["best", "last"]
_OF_RUN = ("data", "noise")
"""Sections of an evaluation that may be those of the run: their target is null."""

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


@dataclass(kw_only=True)
class MeasuringConfig:
    """What trained networks are measured on."""

    checkpoint: Which
    split: Literal["train", "val", "test"]
    accelerator: Accelerator
    trust: list[str]  # modules of the user's own that a run may name
    data: DataConfig | AsTrained
    noise: NoiseConfig | None  # None: the noise of training
    evaluation: EvaluationConfig


@dataclass(kw_only=True)
class EvaluateConfig(MeasuringConfig):
    """The checked config of one evaluation."""

    run: str


@dataclass(kw_only=True)
class CompareConfig(MeasuringConfig):
    """The checked config of one comparison."""

    sweep: list[str]  # folders; several count as one
    seed: Seed  # of test phantoms and noise
    output: str | None


@dataclass(kw_only=True)
class PlanConfig:
    """The checked config of one plan."""

    format: Literal["table", "json", "levers"]
    device: str | None  # None: all known devices
    run: Config


@dataclass(kw_only=True)
class DoctorConfig:
    """The checked config of one checkup."""

    format: Literal["table", "json"]
    run: Config


@dataclass(kw_only=True)
class ReconstructConfig:
    """The config of `qnmixer.reconstruct`."""

    run: str
    input: str
    output: str
    kind: Literal["auto", "slices", "sinograms"]
    formats: list[Literal["dicom", "npy", "png"]]
    window: list[float] | None  # HU; None: chosen by the input
    unit: Literal["attenuation", "value"]
    water_attenuation: Length  # 1/mm
    detector_pitch: Length | None  # mm, of the scan; None: the run's
    angle_span: Length | None  # radians, of the scan; None: the run's
    checkpoint: Which
    accelerator: Accelerator
    batch_size: Count | None  # None: chosen by the device
    trust: list[str]  # modules of the user's own that the run may name


@dataclass(kw_only=True)
class ExportConfig:
    """The config of `qnmixer.export`."""

    run: str
    output: str
    trust: list[str]  # modules of the user's own that the run may name


def _parsed(schema: type[_T], values: dict[str, Any], **sections: Any) -> _T:
    """The config of a command from its values, and from sections that are parsed already. Raises ConfigError."""
    lists = {key: [values[key]] for key in ("trust", "sweep") if isinstance(values.get(key), str)}  # one of them
    config: _T = parse_section("", schema, values | lists, **sections)
    return config


def parse_evaluate(cfg: DictConfig) -> EvaluateConfig:
    """Parse and check the config of `qnmixer.evaluate`. Raises ConfigError."""
    return _parsed_measuring(EvaluateConfig, cfg)


def parse_compare(cfg: DictConfig) -> CompareConfig:
    """Parse and check the config of `qnmixer.compare`. Raises ConfigError."""
    config = _parsed_measuring(CompareConfig, cfg)
    if config.evaluation.tv_weight is not None:  # of evaluation=default
        raise unknown_key("evaluation.tv_weight")
    return config


def _parsed_measuring(schema: type[_Measuring], cfg: DictConfig) -> _Measuring:
    values = plain_values(cfg)
    require_sections(values, (*_OF_RUN, "evaluation"))
    data, noise = (
        None if isinstance(values[key], dict) and values[key].get(TARGET, "") is None else schema_of(key, values[key])
        for key in _OF_RUN
    )
    config = _parsed(
        schema,
        values,
        data=parse_section("data", data or AsTrained, values["data"]),
        noise=noise and parse_section("noise", noise, values["noise"]),
        evaluation=parse_section("evaluation", EvaluationConfig, values["evaluation"]),
    )
    check_targets(config)
    if isinstance(config.data, DataConfig):
        config.data = config.data.checked()
    if config.noise is not None:
        config.noise = config.noise.checked()
    return config


def check_slices(data: DataConfig | AsTrained) -> None:
    """Raise UserError if the slices of an evaluation do not exist."""
    if isinstance(data, DataConfig):
        check_data(data)
    elif data.root is not None:
        check_there("data.root", data.root, "the folder with the run's slices")


def parse_plan(cfg: DictConfig) -> PlanConfig:
    """Parse and check the config of `qnmixer.plan`, which reads no slices. Raises ConfigError."""
    for key in OmegaConf.missing_keys(cfg):
        if key.startswith("data.") and key.endswith(".root"):
            OmegaConf.update(cfg, key, ".")
    values = plain_values(cfg)
    config = _parsed(PlanConfig, {name: values.pop(name) for name in ("format", "device")}, run=None)
    config.run = _with_training_step(values)
    if config.device is not None:
        device_memory(config.device)
    return config


def parse_doctor(cfg: DictConfig) -> DoctorConfig:
    """Parse and check the config of `qnmixer.doctor`. Raises ConfigError."""
    values = plain_values(cfg)
    config = _parsed(DoctorConfig, {"format": values.pop("format")}, run=None)
    config.run = _with_training_step(values)
    return config


def _with_training_step(values: dict[str, Any]) -> Config:
    run = parse(values)
    if not run.model.has_weights:
        raise ConfigError(f"model={run.model.name} has no weights, so it has no training step: choose another model")
    return run


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


def parse_reconstruct(cfg: DictConfig) -> ReconstructConfig:
    """Parse and check the config of `qnmixer.reconstruct`. Raises ConfigError."""
    config = _parsed(ReconstructConfig, plain_values(cfg))
    config.input, config.output = map(expanduser, (config.input, config.output))
    if not config.formats:
        raise ConfigError("formats=[] would write nothing: give some of dicom, npy, png")
    if config.window is not None:
        check_window("window", config.window)
    return config


def parse_export(cfg: DictConfig) -> ExportConfig:
    """Parse and check the config of `qnmixer.export`. Raises ConfigError."""
    config = _parsed(ExportConfig, plain_values(cfg))
    if not config.output.endswith(SUFFIX):
        raise ConfigError(f"output={config.output} does not name a weights file: give a name that ends in {SUFFIX}")
    return config
