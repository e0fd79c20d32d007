"""The configs of the commands beside training: their keys, types and bounds."""

import math
from dataclasses import dataclass
from os.path import expanduser
from typing import Any, Literal, TypeVar

from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.config.data import AsTrained, DataConfig
from qnmixer.engine.config.groups import NoiseConfig, parse_section
from qnmixer.engine.config.options import TARGET, plain_values, unknown_key, values_of_option
from qnmixer.engine.config.run import Config, Seed, check_targets, parse, require_sections, schema_of
from qnmixer.engine.config.sections import Accelerator, Count, EvaluationConfig, Length, check_window
from qnmixer.errors import ConfigError, suggest
from qnmixer.files import check_there
from qnmixer.weights import SUFFIX, check_repository

_T = TypeVar("_T")
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
class EvaluateConfig:
    """The checked config of one evaluation."""

    run: str
    checkpoint: Which
    split: Literal["train", "val", "test"]
    accelerator: Accelerator
    trust: list[str]  # modules of the user's own that a run may name
    data: DataConfig | AsTrained
    noise: NoiseConfig | None  # None: the noise of training
    evaluation: EvaluationConfig


@dataclass(kw_only=True)
class CompareConfig:
    """The checked config of one comparison; `sets` has only the chosen tests."""

    sweep: list[str]  # folders; several count as one
    tests: list[str] | None  # names in sets; None: all that need no folder, or whose folder is given
    root: str | None
    sets: dict[str, list[str]]  # name of a test → its overrides of the training config
    split: Literal["val", "test"]
    checkpoint: Which
    seed: Seed  # of test phantoms and noise
    accelerator: Accelerator
    output: str | None
    trust: list[str]  # modules of the user's own that runs may name
    evaluation: EvaluationConfig


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
    kind: Literal["slices", "sinograms"]
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
    output: str | None
    push: str | None  # OWNER/NAME on a hub
    sources: str | None
    trust: list[str]  # modules of the user's own that the run may name


def _parsed(schema: type[_T], values: dict[str, Any], **sections: Any) -> _T:
    """The config of a command from its values, and from sections that are parsed already. Raises ConfigError."""
    lists = {key: [values[key]] for key in ("trust", "sweep") if isinstance(values.get(key), str)}  # one of them
    config: _T = parse_section("", schema, values | lists, **sections)
    return config


def parse_evaluate(cfg: DictConfig) -> EvaluateConfig:
    """Parse and check the config of `qnmixer.evaluate`. Raises ConfigError."""
    values = plain_values(cfg)
    require_sections(values, (*_OF_RUN, "evaluation"))
    data, noise = (None if values[key].get(TARGET, "") is None else schema_of(key, values[key]) for key in _OF_RUN)
    config = _parsed(
        EvaluateConfig,
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


def parse_compare(cfg: DictConfig) -> CompareConfig:
    """Parse and check the config of `qnmixer.compare`. Raises ConfigError."""
    values = plain_values(cfg)
    require_sections(values, ["evaluation"])
    evaluation: EvaluationConfig = parse_section("evaluation", EvaluationConfig, values["evaluation"])
    if evaluation.tv_weight is not None:  # of evaluation=default
        raise unknown_key("evaluation.tv_weight")
    config = _parsed(CompareConfig, values, evaluation=evaluation)
    sets, wanted = config.sets, config.tests
    for name in wanted or []:
        if name not in sets:
            raise ConfigError(f"tests={name} is not known: {suggest(name, sets)}, or give it as +sets.{name}=[…]")
        if config.root is None and needs_root(sets[name]):
            raise ConfigError(f"tests={name} needs a folder of slices: give it as root=/path/to/slices")
    chosen = sets if wanted is None else wanted
    config.sets = {name: sets[name] for name in chosen if config.root is not None or not needs_root(sets[name])}
    if not config.sets:
        raise ConfigError("no tests are left: give tests=[as_trained], or leave it out")
    return config


def needs_root(overrides: list[str]) -> bool:
    """Whether a test needs a folder of slices that its overrides do not name."""
    chosen = dict(override.split("=", 1) for override in overrides if "=" in override)
    return "root" in values_of_option("data", chosen.get("data", "")) and "data.root" not in chosen


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
    if config.output is None and config.push is None:
        raise ConfigError("nothing would be written: give output=my.safetensors, or push=OWNER/NAME")
    if config.push is not None:
        check_repository(f"push={config.push}", config.push)
    if config.output is not None and not config.output.endswith(SUFFIX):
        raise ConfigError(f"output={config.output} does not name a weights file: give a name that ends in {SUFFIX}")
    if config.sources is not None:
        check_there("sources", config.sources, "a Markdown file on the slices, for the card")
    return config
