"""Schemas of the other six commands."""

import math
from dataclasses import dataclass, fields
from os.path import expanduser
from typing import Any

from omegaconf import DictConfig

from qnmixer.config.data import AsTrained, DataConfig
from qnmixer.config.evaluation import EvaluationConfig, check_window
from qnmixer.config.groups import NoiseConfig
from qnmixer.config.option import number, one_of
from qnmixer.config.run import (
    MAX_SEED,
    Config,
    check_targets,
    fill_roots,
    parse,
    schema_of,
    targets_of,
)
from qnmixer.config.section import parse_section, plain_values
from qnmixer.config.target import TARGET, keys_of_options, values_of_option
from qnmixer.errors import ConfigError, suggest
from qnmixer.files import check_there
from qnmixer.weights import SUFFIX

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
class EvaluateRootConfig:
    """The root keys of `qnmixer.evaluate`."""

    run: str
    checkpoint: str = one_of("best", "last")
    split: str = one_of("train", "val", "test")
    accelerator: str = one_of("auto", "cpu", "gpu", "cuda")
    trust: list[str]  # modules of the user's own that a run may name


@dataclass(kw_only=True)
class EvaluateConfig(EvaluateRootConfig):
    """The checked config of one evaluation."""

    data: DataConfig | AsTrained
    noise: NoiseConfig | None  # None: the noise of training
    evaluation: EvaluationConfig


@dataclass(kw_only=True)
class CompareRootConfig:
    """The root keys of `qnmixer.compare`."""

    sweep: list[str]  # folders; several count as one
    tests: list[str] | None  # names in sets; None: all that need no folder, or whose folder is given
    root: str | None
    sets: dict[str, list[str]]  # name of a test → its overrides of the training config
    split: str = one_of("val", "test")
    checkpoint: str = one_of("best", "last")
    seed: int = number(at_least=0, at_most=MAX_SEED)  # of test phantoms and noise
    accelerator: str = one_of("auto", "cpu", "gpu", "cuda")
    output: str | None
    trust: list[str]  # modules of the user's own that runs may name


@dataclass(kw_only=True)
class CompareConfig(CompareRootConfig):
    """The checked config of one comparison; `sets` has only the chosen tests."""

    evaluation: EvaluationConfig


@dataclass(kw_only=True)
class PlanRootConfig:
    """The root keys of `qnmixer.plan`, beside those of a training run."""

    format: str = one_of("table", "json", "levers")
    device: str | None  # None: all known devices


@dataclass(kw_only=True)
class PlanConfig(PlanRootConfig):
    """The checked config of one plan."""

    run: Config


@dataclass(kw_only=True)
class DoctorRootConfig:
    """The root keys of `qnmixer.doctor`, beside those of a training run."""

    format: str = one_of("table", "json")


@dataclass(kw_only=True)
class DoctorConfig(DoctorRootConfig):
    """The checked config of one checkup."""

    run: Config


@dataclass(kw_only=True)
class ReconstructConfig:
    """The config of `qnmixer.reconstruct`."""

    run: str
    input: str
    output: str
    kind: str = one_of("auto", "slices", "sinograms")
    formats: list[str]
    window: list[float] | None  # HU; None: chosen by the input
    unit: str = one_of("attenuation", "value")
    water_attenuation: float = number(above=0)  # 1/mm
    detector_pitch: float | None = number(above=0)  # mm, of the scan; None: the run's
    angle_span: float | None = number(above=0)  # radians, of the scan; None: the run's
    checkpoint: str = one_of("best", "last")
    accelerator: str = one_of("auto", "cpu", "gpu", "cuda")
    batch_size: int | None = number(at_least=1)  # None: chosen by the device
    precision: str = one_of("32", "16-mixed", "bf16-mixed")
    trust: list[str]  # modules of the user's own that the run may name


@dataclass(kw_only=True)
class ExportConfig:
    """The config of `qnmixer.export`."""

    run: str
    output: str
    sources: str | None
    trust: list[str]  # modules of the user's own that the run may name


def _with_lists(values: dict[str, Any]) -> dict[str, Any]:
    """The values with `trust` and `sweep` as lists, also if one module or folder was given."""
    return values | {key: [values[key]] for key in ("trust", "sweep") if isinstance(values.get(key), str)}


def parse_evaluate(cfg: DictConfig) -> EvaluateConfig:
    """Parse and check the config of `qnmixer.evaluate`. Raises ConfigError."""
    values = _with_lists(plain_values(cfg))
    data, noise = values["data"], values["noise"]
    of_data = AsTrained if _is_as_trained(data) else schema_of("data", data)
    sections: dict[str, Any] = {
        "data": parse_section("data", of_data, data, values),
        "noise": None if _is_as_trained(noise) else parse_section("noise", schema_of("noise", noise), noise, values),
    }
    sections["evaluation"] = parse_section("evaluation", EvaluationConfig, values["evaluation"], values)
    rest = parse_section("", EvaluateRootConfig, {k: v for k, v in values.items() if k not in sections}, values)
    sections["evaluation"].check()
    config = EvaluateConfig(**vars(rest), **sections)
    check_targets(targets_of(config))
    if config.noise is not None:
        config.noise = config.noise.checked()
    return config


def _is_as_trained(section: Any) -> bool:
    """Whether a section takes its target from the run."""
    return isinstance(section, dict) and section.get(TARGET, "") is None


def parse_compare(cfg: DictConfig) -> CompareConfig:
    """Parse and check the config of `qnmixer.compare`. Raises ConfigError."""
    values = _with_lists(plain_values(cfg))
    evaluation: EvaluationConfig = parse_section("evaluation", EvaluationConfig, values.pop("evaluation"), values)
    evaluation.check()
    usual = values_of_option("evaluation", "default")
    for key in ("tv_weight", "tv_noise_weight"):
        if (value := getattr(evaluation, key)) != usual[key]:
            raise ConfigError(
                f"evaluation.{key}={value:g} has no effect in compare: leave it out, and train model=tv in the sweep "
                "for total variation"
            )
    root: CompareRootConfig = parse_section("", CompareRootConfig, values, values)
    wanted = root.sets if root.tests is None else root.tests
    for name in wanted:
        if name not in root.sets:
            raise ConfigError(f"tests={name} is not known: {suggest(name, root.sets)}, or give it to sets.{name}=[…]")
        if root.root is None and root.tests is not None and needs_root(root.sets[name]):
            raise ConfigError(f"tests={name} needs a folder of slices: give it as root=/path/to/slices")
    root.sets = {name: root.sets[name] for name in wanted if root.root is not None or not needs_root(root.sets[name])}
    if not root.sets:
        raise ConfigError("no tests are left: give tests=[as_trained], or leave it out")
    return CompareConfig(**vars(root), evaluation=evaluation)


def needs_root(overrides: list[str]) -> bool:
    """Whether a test needs a folder of slices that its overrides do not name."""
    chosen = dict(override.split("=", 1) for override in overrides if "=" in override)
    return "root" in keys_of_options("data").get(chosen.get("data", ""), ()) and "data.root" not in chosen


def parse_plan(cfg: DictConfig) -> PlanConfig:
    """Parse and check the config of `qnmixer.plan`. Raises ConfigError."""
    fill_roots(cfg)
    values = plain_values(cfg)
    own = {f.name: values.pop(f.name) for f in fields(PlanRootConfig) if f.name in values}
    root: PlanRootConfig = parse_section("", PlanRootConfig, own, own)
    if root.device is not None:
        device_memory(root.device)
    return PlanConfig(**vars(root), run=_parse_training(values, "plan"))


def parse_doctor(cfg: DictConfig) -> DoctorConfig:
    """Parse and check the config of `qnmixer.doctor`. Raises ConfigError."""
    values = plain_values(cfg)
    own = {f.name: values.pop(f.name) for f in fields(DoctorRootConfig) if f.name in values}
    root: DoctorRootConfig = parse_section("", DoctorRootConfig, own, own)
    return DoctorConfig(**vars(root), run=_parse_training(values, "try"))


def _parse_training(values: dict[str, Any], what: str) -> Config:
    """The config of a run that has training steps."""
    config = parse(values)
    if not config.model.has_weights:
        raise ConfigError(
            f"model={config.model.name} has no weights, so it has no training step to {what}: choose another model"
        )
    return config


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
    values = _with_lists(plain_values(cfg))
    config: ReconstructConfig = parse_section("", ReconstructConfig, values, values)
    config.input, config.output = map(expanduser, (config.input, config.output))
    if not config.formats:
        raise ConfigError("formats=[] would write nothing: give some of dicom, npy, png")
    for name in config.formats:
        if name not in ("dicom", "npy", "png"):
            raise ConfigError(f"formats={name} is not known: {suggest(name, ('dicom', 'npy', 'png'))}")
    if config.window is not None:
        check_window("window", config.window)
    return config


def parse_export(cfg: DictConfig) -> ExportConfig:
    """Parse and check the config of `qnmixer.export`. Raises ConfigError."""
    values = _with_lists(plain_values(cfg))
    config: ExportConfig = parse_section("", ExportConfig, values, values)
    if not config.output.endswith(SUFFIX):
        raise ConfigError(f"output={config.output} does not name a weights file: give a name that ends in {SUFFIX}")
    if config.sources is not None:
        check_there("sources", config.sources, "a Markdown file on the slices, for the card")
    return config
