"""The schema of every config, and all checks that one config must pass before anything is started.

The values live in `conf/`; here are their types, their bounds and the rules between them. No torch import: a
wrong override is answered in a moment.
"""

import difflib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from qnmixer.data.config import (
    AsTrained,
    CustomData,
    DataConfig,
    DeepLesionData,
    DicomData,
    FolderData,
    NumpyData,
    PhantomData,
)
from qnmixer.errors import ConfigError
from qnmixer.files import check_there
from qnmixer.plugins import check_plugin
from qnmixer.schema import check_bounds, number, one_of, suggest
from qnmixer.weights import SUFFIX

CONF = Path(__file__).resolve().parents[2] / "conf"

MAX_SEED = 2**32 - 1
"""The largest that numpy takes."""


@dataclass(kw_only=True)
class GeometryConfig:
    """Fan-beam scan, mm and radians; pixel_size follows as field_of_view / data.image_size."""

    name: str
    field_of_view: float = number(above=0)
    n_views: int = number(at_least=1)
    n_detectors: int = number(at_least=1)
    detector_pitch: float = number(above=0)
    source_to_axis: float = number(above=0)
    axis_to_detector: float
    first_angle: float | None  # None: half a step between views
    angle_span: float
    fbp_filter: str = one_of("ramp", "shepp-logan", "cosine", "hamming", "hann")


@dataclass(kw_only=True)
class NoNoiseConfig:
    """Noise-free sinograms."""

    name: str


@dataclass(kw_only=True)
class FieldNoiseConfig:
    """The mild, scale-free noise of the field's papers."""

    name: str
    photons: float = number(above=0, at_most=1e15)
    sigma: float = number(at_least=0)


@dataclass(kw_only=True)
class PhysicalNoiseConfig:
    """Counts behind a body of real attenuation."""

    name: str
    photons: float = number(above=0, at_most=1e15)
    water_attenuation: float = number(above=0)  # 1/mm
    electronic_sigma: float = number(at_least=0)  # counts


@dataclass(kw_only=True)
class MixedNoiseConfig(PhysicalNoiseConfig):
    """The field's noise for some samples, counts for the rest."""

    physical_share: float = number(at_least=0, at_most=1)
    field_photons: float = number(above=0, at_most=1e15)
    field_sigma: float = number(at_least=0)


NoiseConfig = NoNoiseConfig | FieldNoiseConfig | PhysicalNoiseConfig


@dataclass(kw_only=True)
class ModelConfig:
    """Arguments of a network of `qnmixer.models`."""

    name: str

    @property
    def T(self) -> int:
        """Iterations of the network."""
        return 0

    def divisors(self) -> dict[str, int]:
        """What the image's size must be a multiple of, by the key that says so."""
        return {}


@dataclass(kw_only=True)
class FBPConfig(ModelConfig):
    """`qnmixer.models.FBP`; its filter is geometry.fbp_filter."""


@dataclass(kw_only=True)
class TVConfig(ModelConfig):
    """`qnmixer.models.TotalVariation`."""

    n_iterations: int = number(at_least=1)
    weight: float = number(above=0)

    @property
    def T(self) -> int:
        """As configured."""
        return self.n_iterations


@dataclass(kw_only=True)
class LearnedConfig(ModelConfig):
    """A network with weights."""

    channels: int = number(at_least=1)


@dataclass(kw_only=True)
class FBPConvNetConfig(LearnedConfig):
    """`qnmixer.models.FBPConvNet`."""

    channels: int = number(at_least=4)
    depth: int = number(at_least=1)

    @property
    def T(self) -> int:
        """One, always."""
        return 1

    def divisors(self) -> dict[str, int]:
        """It is halved at each level down."""
        return {"depth": 2**self.depth}


@dataclass(kw_only=True)
class UnrolledConfig(LearnedConfig):
    """A network whose T can be chosen; memory grows evenly by `period` iterations at a time."""

    period: ClassVar[int] = 1

    n_iterations: int = number(at_least=1)

    @property
    def T(self) -> int:
        """As configured."""
        return self.n_iterations


@dataclass(kw_only=True)
class CustomConfig(UnrolledConfig):
    """A user's own `qnmixer.models.UnrolledNetwork`, which takes projector, n_iterations, channels and `arguments`."""

    target: str  # module.Class
    arguments: dict[str, Any]


@dataclass(kw_only=True)
class LEARNConfig(UnrolledConfig):
    """`qnmixer.models.LEARN`."""

    data_term: str = one_of("adjoint", "fbp")


@dataclass(kw_only=True)
class LearnedPrimalDualConfig(UnrolledConfig):
    """`qnmixer.models.LearnedPrimalDual`."""

    n_primal: int = number(at_least=2)
    n_dual: int = number(at_least=1)


@dataclass(kw_only=True)
class RegFormerConfig(UnrolledConfig):
    """`qnmixer.models.RegFormer`."""

    period: ClassVar[int] = 2  # two kinds of block, by turns

    n_heads: int = number(at_least=1)
    window_size: int = number(at_least=2)

    def divisors(self) -> dict[str, int]:
        """It is cut into windows."""
        return {"window_size": self.window_size}


@dataclass(kw_only=True)
class QNMixerConfig(UnrolledConfig):
    """`qnmixer.models.QNMixer`."""

    channels: int = number(at_least=4)
    patch_size: int = number(at_least=1)
    n_mixer_layers: int = number(at_least=1)
    mlp_ratio: float = number(above=0)
    inception: bool
    detail_channels: int = number(at_least=0)
    regularizer: str | None  # module.Class of a user's own
    codec: str = one_of("orthonormal", "strided")
    codec_kernel: int = number(at_least=1, at_most=3)
    latent_factor: int = number(at_least=1)
    latent_channels: int = number(at_least=1)
    shared_regularizer: bool
    shared_step_size: bool
    data_term: str = one_of("fbp", "adjoint")
    data_steps: int = number(at_least=1)
    nonnegative: bool
    hessian: str = one_of("bfgs", "identity", "momentum")
    hessian_gradient: str = one_of("full", "detach")
    learned_trust: bool

    def divisors(self) -> dict[str, int]:
        """It is cut into patches and into latent cells."""
        return {"patch_size": self.patch_size, "latent_factor": self.latent_factor}


@dataclass(kw_only=True)
class LossConfig:
    """What training minimises between x_T and the slice."""

    name: str = one_of("mse", "l1", "ssim_mix")


@dataclass(kw_only=True)
class SSIMMixConfig(LossConfig):
    """(1 − weight) · L1 + weight · (1 − SSIM)."""

    ssim_weight: float = number(at_least=0, at_most=1)


@dataclass(kw_only=True)
class OptimizerConfig:
    """What all optimizers take; the scalars λ_t learn at lr · step_size_lr_factor."""

    name: str
    lr: float = number(above=0)
    weight_decay: float = number(at_least=0)
    step_size_lr_factor: float = number(above=0)


@dataclass(kw_only=True)
class AdamWConfig(OptimizerConfig):
    """torch.optim.AdamW."""

    betas: list[float]


@dataclass(kw_only=True)
class SGDConfig(OptimizerConfig):
    """torch.optim.SGD."""

    momentum: float = number(at_least=0, below=1)


@dataclass(kw_only=True)
class ScheduleConfig:
    """How the learning rate goes over the run; fractions are of all optimizer steps."""

    name: str
    warmup: float = number(at_least=0, at_most=1)


@dataclass(kw_only=True)
class StepScheduleConfig(ScheduleConfig):
    """× factor once, at `at` of the run."""

    at: float = number(above=0, at_most=1)
    factor: float = number(above=0)


@dataclass(kw_only=True)
class MemoryConfig:
    """Where the graph of the iterations stays until backward."""

    name: str


@dataclass(kw_only=True)
class RecomputeConfig(MemoryConfig):
    """Built again in backward."""

    segment: int = number(at_least=1)


@dataclass(kw_only=True)
class StrategyConfig:
    """How a run is spread over devices."""

    name: str


@dataclass(kw_only=True)
class DDPConfig(StrategyConfig):
    """The whole network on every device, the batch shared out."""

    static_graph: bool


@dataclass(kw_only=True)
class FSDPConfig(StrategyConfig):
    """As ddp, with weights, gradients and optimizer state in shards."""

    reshard_after_forward: bool
    sharded_checkpoint: bool


@dataclass(kw_only=True)
class PipelineConfig(StrategyConfig):
    """The T iterations in stages, one after the other on the devices."""

    schedule: str = one_of("1f1b", "gpipe", "interleaved", "sequential")
    microbatch_size: int = number(at_least=1)
    devices_per_pipeline: int | None = number(at_least=2)  # None: all of a node
    stages_per_device: int = number(at_least=1)
    cut: list[int] | None  # iterations of each stage; None: balanced by measured cost


@dataclass(kw_only=True)
class TrainerConfig:
    """What goes to Lightning's Trainer."""

    accelerator: str = one_of("auto", "cpu", "gpu", "cuda")
    devices: int | None = number(at_least=1)  # of a node; None: all GPUs, or one where the strategy is single
    num_nodes: int = number(at_least=1)
    precision: str = one_of("32", "16-mixed", "bf16-mixed")
    max_steps: int = number(at_least=-1)
    max_epochs: int | None = number(at_least=1)
    accumulate_grad_batches: int = number(at_least=1)
    gradient_clip_val: float | None = number(above=0)
    val_every_n_steps: int | None = number(at_least=1)
    save_every_n_steps: int | None = number(at_least=1)
    limit_val_batches: int | None = number(at_least=1)
    log_every_n_steps: int = number(at_least=1)
    deterministic: bool


@dataclass(kw_only=True)
class LoggerConfig:
    """Where metrics go beside metrics.csv."""

    name: str


@dataclass(kw_only=True)
class WandbConfig(LoggerConfig):
    """Weights & Biases."""

    mode: str = one_of("offline", "online", "disabled")
    project: str
    entity: str | None
    run_name: str | None  # None: the overrides that are this job's alone, or the time
    group: str | None  # None: the sweep
    log_checkpoint: bool


@dataclass(kw_only=True)
class DebugConfig:
    """A look at a run that is not as it should be."""

    name: str


@dataclass(kw_only=True)
class FewBatchesConfig(DebugConfig):
    """The first slices of each part only."""

    batches: int = number(at_least=1)


@dataclass(kw_only=True)
class ProfileConfig(DebugConfig):
    """torch's profiler over some optimizer steps."""

    warm_up: int = number(at_least=1)
    steps: int = number(at_least=1)


@dataclass(kw_only=True)
class EvaluationConfig:
    """What is measured on a split, and what is drawn."""

    window: list[float]  # HU, [low, high]
    n_pictures: int = number(at_least=1)


GROUPS: dict[str, dict[str, type]] = {
    "geometry": {"fan_beam": GeometryConfig},
    "noise": {
        "none": NoNoiseConfig,
        "field": FieldNoiseConfig,
        "physical": PhysicalNoiseConfig,
        "mixed": MixedNoiseConfig,
    },
    "model": {
        "qn_mixer": QNMixerConfig,
        "fbp": FBPConfig,
        "tv": TVConfig,
        "fbpconvnet": FBPConvNetConfig,
        "learn": LEARNConfig,
        "learned_primal_dual": LearnedPrimalDualConfig,
        "regformer": RegFormerConfig,
        "custom": CustomConfig,
    },
    "data": {
        "phantoms": PhantomData,
        "dicom": DicomData,
        "deeplesion": DeepLesionData,
        "numpy": NumpyData,
        "custom": CustomData,
    },
    "loss": {"mse": LossConfig, "l1": LossConfig, "ssim_mix": SSIMMixConfig},
    "optimizer": {"adamw": AdamWConfig, "sgd": SGDConfig, "adafactor": OptimizerConfig},
    "schedule": {"constant": ScheduleConfig, "cosine": ScheduleConfig, "step": StepScheduleConfig},
    "memory": {"keep": MemoryConfig, "recompute": RecomputeConfig, "offload": MemoryConfig},
    "strategy": {"single": StrategyConfig, "ddp": DDPConfig, "fsdp": FSDPConfig, "pipeline": PipelineConfig},
    "logger": {"wandb": WandbConfig, "csv": LoggerConfig},
    "debug": {
        "off": DebugConfig,
        "overfit": DebugConfig,
        "few_batches": FewBatchesConfig,
        "profile": ProfileConfig,
        "anomaly": DebugConfig,
    },
}


DEVICES = {
    "V100-16": 16160.0,
    "V100-32": 32510.0,
    "A100-40": 40536.0,
    "A100-80": 81251.0,
    "H100": 81559.0,
    "RTX4090": 24564.0,
    "RTX5090": 32607.0,
}
"""MiB that the driver reports."""


SECTIONS: dict[str, type] = {"trainer": TrainerConfig, "evaluation": EvaluationConfig}


@dataclass(kw_only=True)
class RunConfig:
    """What stands at the root of the config."""

    seed: int = number(at_least=0, at_most=MAX_SEED)
    monitor: str = one_of("val/psnr", "val/ssim", "val/loss")
    finetune: str | None
    resume: str | None
    compile: bool
    test_after_training: bool


@dataclass(kw_only=True)
class Config(RunConfig):
    """One training run, checked."""

    geometry: GeometryConfig
    noise: NoiseConfig
    model: ModelConfig
    data: DataConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    memory: MemoryConfig
    strategy: StrategyConfig
    trainer: TrainerConfig
    logger: LoggerConfig
    evaluation: EvaluationConfig
    debug: DebugConfig


@dataclass(kw_only=True)
class EvaluateRootConfig:
    """What stands at the root of the config of `qnmixer.evaluate`."""

    run: str
    checkpoint: str = one_of("best", "last")
    split: str = one_of("train", "val", "test")
    accelerator: str = one_of("auto", "cpu", "gpu", "cuda")


@dataclass(kw_only=True)
class EvaluateConfig(EvaluateRootConfig):
    """One evaluation, checked."""

    data: DataConfig | AsTrained
    noise: NoiseConfig | None  # None: as the run was trained
    evaluation: EvaluationConfig


@dataclass(kw_only=True)
class CompareRootConfig:
    """What stands at the root of the config of `qnmixer.compare`."""

    sweep: str
    tests: list[str] | None  # names in sets; None: all of them that need no folder, or have it
    root: str | None
    sets: dict[str, list[str]]  # name of a test → its overrides of what the runs were trained with
    split: str = one_of("val", "test")
    checkpoint: str = one_of("best", "last")
    seed: int = number(at_least=0, at_most=MAX_SEED)  # of test phantoms and noise
    accelerator: str = one_of("auto", "cpu", "gpu", "cuda")
    output: str | None


@dataclass(kw_only=True)
class CompareConfig(CompareRootConfig):
    """One comparison, checked; `sets` holds the chosen tests only."""

    evaluation: EvaluationConfig


@dataclass(kw_only=True)
class PlanRootConfig:
    """What `qnmixer.plan` takes beside the config of a training run."""

    format: str = one_of("table", "json", "levers")
    device: str | None  # None: all that are known


@dataclass(kw_only=True)
class PlanConfig(PlanRootConfig):
    """One plan, checked."""

    run: Config


@dataclass(kw_only=True)
class DoctorRootConfig:
    """What `qnmixer.doctor` takes beside the config of a training run."""

    format: str = one_of("table", "json")


@dataclass(kw_only=True)
class DoctorConfig(DoctorRootConfig):
    """One checkup, checked."""

    run: Config


@dataclass(kw_only=True)
class ReconstructConfig:
    """One call of `qnmixer.reconstruct`."""

    run: str
    input: str
    output: str
    kind: str = one_of("auto", "slices", "sinograms")
    formats: list[str]
    window: list[float]  # HU
    unit: str = one_of("attenuation", "value")
    water_attenuation: float = number(above=0)  # 1/mm
    detector_pitch: float | None = number(above=0)  # mm, of the scan; None: the run's
    angle_span: float | None = number(above=0)  # radians, of the scan; None: the run's
    checkpoint: str = one_of("best", "last")
    accelerator: str = one_of("auto", "cpu", "gpu", "cuda")
    batch_size: int | None = number(at_least=1)  # None: as suits the device
    precision: str = one_of("32", "16-mixed", "bf16-mixed")


@dataclass(kw_only=True)
class ExportConfig:
    """One call of `qnmixer.export`."""

    run: str
    output: str
    sources: str | None


def parse(cfg: DictConfig | Mapping[str, Any]) -> Config:
    """Typed and checked config from a composed one (or from the plain one kept in a checkpoint).

    Raises ConfigError, naming the key and the mend.
    """
    values = _plain(cfg)
    root = {f.name for f in fields(RunConfig)}
    sections = {f.name for f in fields(Config)} - root
    for key in sections - values.keys():
        raise ConfigError(f"the config has no {key}: pick one with {key}=…")
    parsed = {key: _parse(key, _schema(key, values[key]), values[key], values) for key in sorted(sections)}
    rest = _parse("", RunConfig, {k: v for k, v in values.items() if k not in sections}, values)
    config = Config(**{key: getattr(rest, key) for key in root}, **parsed)
    validate(config)
    return config


def parse_evaluate(cfg: DictConfig) -> EvaluateConfig:
    """Typed and checked config of `qnmixer.evaluate`; raises ConfigError."""
    values = _plain(cfg)
    data, noise = values["data"], values["noise"]
    of_data = AsTrained if data["name"] == "as_trained" else _schema("data", data)
    sections: dict[str, Any] = {
        "data": _parse("data", of_data, data, values),
        "noise": None if noise["name"] == "as_trained" else _parse("noise", _schema("noise", noise), noise, values),
    }
    sections["evaluation"] = _parse("evaluation", EvaluationConfig, values["evaluation"], values)
    rest = _parse("", EvaluateRootConfig, {k: v for k, v in values.items() if k not in sections}, values)
    check_window("evaluation.window", sections["evaluation"].window)
    return EvaluateConfig(**vars(rest), **sections)


def parse_compare(cfg: DictConfig) -> CompareConfig:
    """Typed and checked config of `qnmixer.compare`; raises ConfigError."""
    values = _plain(cfg)
    evaluation: EvaluationConfig = _parse("evaluation", EvaluationConfig, values.pop("evaluation"), values)
    check_window("evaluation.window", evaluation.window)
    root: CompareRootConfig = _parse("", CompareRootConfig, values, values)
    wanted = root.sets if root.tests is None else root.tests
    for name in wanted:
        if name not in root.sets:
            raise ConfigError(f"tests: {name} is not known: {suggest(name, root.sets)}, or give it to sets.{name}=[…]")
        if root.root is None and root.tests is not None and needs_root(root.sets[name]):
            raise ConfigError(f"tests: {name} needs a folder of slices: give it as root=/path/to/slices")
    root.sets = {name: root.sets[name] for name in wanted if root.root is not None or not needs_root(root.sets[name])}
    if not root.sets:
        raise ConfigError("no tests are left: give tests=[as_trained], or leave it out")
    return CompareConfig(**vars(root), evaluation=evaluation)


def needs_root(overrides: list[str]) -> bool:
    """Whether the overrides of a test choose slices from a folder that they do not name."""
    chosen = dict(override.split("=", 1) for override in overrides if "=" in override)
    return issubclass(GROUPS["data"].get(chosen.get("data", ""), object), FolderData) and "data.root" not in chosen


def parse_plan(cfg: DictConfig) -> PlanConfig:
    """Typed and checked config of `qnmixer.plan`; raises ConfigError."""
    if isinstance(cfg.get("data"), DictConfig) and OmegaConf.is_missing(cfg.data, "root"):
        cfg = OmegaConf.merge(cfg, {"data": {"root": "."}})  # type: ignore[assignment]  # a plan reads no data
    values = _plain(cfg)
    own = {f.name: values.pop(f.name) for f in fields(PlanRootConfig) if f.name in values}
    root: PlanRootConfig = _parse("", PlanRootConfig, own, own)
    if root.device is not None:
        device_memory(root.device)
    return PlanConfig(**vars(root), run=_parse_training(values, "plan"))


def parse_doctor(cfg: DictConfig) -> DoctorConfig:
    """Typed and checked config of `qnmixer.doctor`; raises ConfigError."""
    values = _plain(cfg)
    own = {f.name: values.pop(f.name) for f in fields(DoctorRootConfig) if f.name in values}
    root: DoctorRootConfig = _parse("", DoctorRootConfig, own, own)
    return DoctorConfig(**vars(root), run=_parse_training(values, "try"))


def _parse_training(values: dict[str, Any], what: str) -> Config:
    """The config of a run that has training steps."""
    config = parse(values)
    if not isinstance(config.model, LearnedConfig):
        raise ConfigError(
            f"model={config.model.name} has no weights, so there is no training step to {what}: choose another model"
        )
    return config


def device_memory(name: str) -> float:
    """Memory of a named device, or of "24" or "24GB", in MiB. Raises ConfigError for neither."""
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
    """Typed and checked config of `qnmixer.reconstruct`; raises ConfigError."""
    values = _plain(cfg)
    config: ReconstructConfig = _parse("", ReconstructConfig, values, values)
    if not config.formats:
        raise ConfigError("formats=[] would write nothing: give some of dicom, npy, png")
    for name in config.formats:
        if name not in ("dicom", "npy", "png"):
            raise ConfigError(f"formats: {name} is not known: {suggest(name, ('dicom', 'npy', 'png'))}")
    check_window("window", config.window)
    return config


def parse_export(cfg: DictConfig) -> ExportConfig:
    """Typed and checked config of `qnmixer.export`; raises ConfigError."""
    values = _plain(cfg)
    config: ExportConfig = _parse("", ExportConfig, values, values)
    if not config.output.endswith(SUFFIX):
        raise ConfigError(f"output={config.output} is no weights file: give a name that ends in {SUFFIX}")
    if config.sources is not None:
        check_there("sources", config.sources, "a Markdown file on the slices, for the card")
    return config


def _plain(cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    try:
        composed = cfg if isinstance(cfg, DictConfig) else OmegaConf.create(dict(cfg))
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value: give one with {error.full_key}=…") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _schema(section: str, value: Any) -> type:
    if section in SECTIONS:
        return SECTIONS[section]
    name = str(value.get("name")) if isinstance(value, dict) else str(value)
    if name not in GROUPS[section]:
        raise ConfigError(f"{section}={name} is not known: {suggest(name, GROUPS[section])}")
    return GROUPS[section][name]


def _parse(section: str, schema: type, value: Any, values: Mapping[str, Any]) -> Any:
    prefix = f"{section}." if section else ""
    try:
        typed = OmegaConf.merge(OmegaConf.structured(schema), value)
        parsed = OmegaConf.to_object(typed)
    except ConfigKeyError as error:
        raise unknown_key(f"{prefix}{error.full_key}", list(flat_keys(values))) from error
    except MissingMandatoryValue as error:
        raise ConfigError(f"{prefix}{error.full_key} has no value: give one with {prefix}{error.full_key}=…") from error
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{prefix}{error.full_key or ''}: {reason}") from error
    check_bounds(prefix, parsed)
    return parsed


def validate(config: Config) -> None:
    """The rules between keys. Raises ConfigError."""
    trainer = config.trainer
    check_model(config.model, config.data.image_size)
    if isinstance(config.data, CustomData):
        check_plugin("data.target", config.data.target)
    check_strategy(config)
    if config.finetune is not None and config.resume is not None:
        raise ConfigError("finetune takes the weights of a run, resume goes on with it: give one of them")
    if trainer.max_steps == -1 and trainer.max_epochs is None:
        raise ConfigError("training would never end: give trainer.max_steps=… or trainer.max_epochs=…")
    debug = config.debug
    if isinstance(debug, ProfileConfig) and -1 < trainer.max_steps < debug.warm_up + debug.steps:
        raise ConfigError(
            f"debug.warm_up={debug.warm_up} and debug.steps={debug.steps} are more steps than trainer.max_steps="
            f"{trainer.max_steps}: nothing would be profiled; raise trainer.max_steps or lower the two"
        )
    check_window("evaluation.window", config.evaluation.window)
    if isinstance(config.optimizer, AdamWConfig):
        betas = config.optimizer.betas
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"optimizer.betas={betas} is not two numbers from 0 to below 1: give [0.9,0.999]")
    check_noise(config.noise, config.data.scaling)


def check_model(model: ModelConfig, size: int) -> None:
    """The rules between the keys of a network and the image's size. Raises ConfigError."""
    for key, part in model.divisors().items():
        if size % part:
            given = f"model.{key}={getattr(model, key)}"
            needed = given if part == getattr(model, key) else f"{part}, as {given} needs"
            raise ConfigError(
                f"data.image_size={size} is not divisible by {needed}: "
                f"choose data.image_size={size - size % part or part} or another model.{key}"
            )
    if isinstance(model, CustomConfig):
        check_plugin("model.target", model.target)
    if isinstance(model, QNMixerConfig):
        _check_qn_mixer(model)
    if isinstance(model, RegFormerConfig) and (model.channels % 2 or model.channels % model.n_heads):
        unit = math.lcm(2, model.n_heads)
        raise ConfigError(
            f"model.channels={model.channels} is not a multiple of {unit}: half of them are handed on, and "
            f"model.n_heads={model.n_heads} share them; choose model.channels={-(-model.channels // unit) * unit}"
        )


def _check_qn_mixer(model: QNMixerConfig) -> None:
    if model.channels % 4:
        raise ConfigError(f"model.channels={model.channels} is not a multiple of 4: the inception has four branches")
    if model.codec == "orthonormal" and model.latent_channels > model.latent_factor**2:
        raise ConfigError(
            f"model.latent_channels={model.latent_channels} is more than latent_factor² = {model.latent_factor**2}: "
            "an orthonormal codec cannot have more; lower it or raise model.latent_factor"
        )
    if model.codec_kernel % 2 == 0:
        raise ConfigError(f"model.codec_kernel={model.codec_kernel} has no middle: choose 1 or 3")
    if model.regularizer is not None:
        check_plugin("model.regularizer", model.regularizer)
        if model.detail_channels:
            raise ConfigError("model.regularizer takes the place of the details too: set model.detail_channels=0")


def check_strategy(config: Config) -> None:
    """The rules between strategy, trainer, batch and T. Raises ConfigError."""
    strategy, trainer = config.strategy, config.trainer
    if strategy.name != "single" and not isinstance(config.model, LearnedConfig):
        raise ConfigError(
            f"strategy={strategy.name} trains over several devices, and model={config.model.name} has no weights to "
            "train: use strategy=single"
        )
    if strategy.name == "single" and (trainer.devices not in (None, 1) or trainer.num_nodes > 1):
        given = (
            f"trainer.num_nodes={trainer.num_nodes}" if trainer.num_nodes > 1 else f"trainer.devices={trainer.devices}"
        )
        raise ConfigError(f"{given} and strategy=single do not go together: choose strategy=ddp, fsdp or pipeline")
    if isinstance(strategy, DDPConfig) and strategy.static_graph and trainer.accumulate_grad_batches > 1:
        raise ConfigError(
            "strategy.static_graph=true fails with trainer.accumulate_grad_batches above 1 (in torch): set one of them "
            "back"
        )
    if isinstance(strategy, FSDPConfig) and config.optimizer.name == "adafactor":
        raise ConfigError(
            "optimizer=adafactor does not work on weights in shards (in torch): choose optimizer=adamw or strategy=ddp"
        )
    if isinstance(strategy, PipelineConfig):
        _check_pipeline(config, strategy)


def _check_pipeline(config: Config, strategy: PipelineConfig) -> None:
    T, size = config.model.T, strategy.microbatch_size
    if not isinstance(config.model, UnrolledConfig):
        raise ConfigError(
            f"strategy=pipeline cuts the iterations of a network into stages, and model={config.model.name} has {T}: "
            "use strategy=ddp or fsdp"
        )
    if (strategy.schedule == "interleaved") != (strategy.stages_per_device > 1):
        raise ConfigError(
            f"strategy.schedule={strategy.schedule} does not go with strategy.stages_per_device="
            f"{strategy.stages_per_device}: interleaved takes 2 or more, every other schedule 1"
        )
    if strategy.cut is not None and (sum(strategy.cut) != T or min(strategy.cut, default=0) < 1):
        raise ConfigError(
            f"strategy.cut={strategy.cut} is not the iterations of each stage: they must be at least 1 and add up to "
            f"model.n_iterations={T}"
        )
    if config.trainer.devices is None:
        return  # the rest is checked when they have been counted
    devices = devices_per_replica(config)
    if devices == 1:
        raise ConfigError("strategy=pipeline needs at least two devices: give trainer.devices=…, or strategy=single")
    if config.trainer.devices % devices:
        raise ConfigError(
            f"strategy.devices_per_pipeline={devices} does not divide trainer.devices={config.trainer.devices}: "
            "a pipeline stays on one node"
        )
    stages = devices * strategy.stages_per_device
    if stages > T:
        raise ConfigError(
            f"{stages} stages are more than model.n_iterations={T}: lower strategy.devices_per_pipeline or "
            "strategy.stages_per_device, or raise model.n_iterations"
        )
    if strategy.cut is not None and len(strategy.cut) != stages:
        raise ConfigError(f"strategy.cut={strategy.cut} has {len(strategy.cut)} stages, the devices make {stages}")
    batch = batch_of_replica(config)
    if batch % size:
        raise ConfigError(
            f"the batch of a pipeline, data.batch_size={config.data.batch_size} × {devices} devices, does not divide "
            f"into strategy.microbatch_size={size}: choose data.batch_size={size}"
        )
    n = batch // size
    if strategy.schedule == "1f1b" and n < devices:
        raise ConfigError(
            f"strategy.schedule=1f1b needs as many micro-batches as devices, {devices}, and has {n}: "
            f"set data.batch_size={size} or strategy.microbatch_size={config.data.batch_size}"
        )
    if strategy.schedule == "interleaved" and n % max(1, n // devices):
        raise ConfigError(
            f"strategy.schedule=interleaved takes micro-batches in equal rounds of at least {devices}, not {n}: "
            f"make data.batch_size={config.data.batch_size} a multiple of strategy.microbatch_size={size}"
        )


def devices_per_replica(config: Config) -> int:
    """Devices that work on the same samples: those of a pipeline, or one."""
    if isinstance(config.strategy, PipelineConfig):
        return config.strategy.devices_per_pipeline or config.trainer.devices or 1
    return 1


def batch_of_replica(config: Config) -> int:
    """Samples that such devices get at once: data.batch_size counts for each device."""
    return config.data.batch_size * devices_per_replica(config)


def effective_batch(config: Config) -> int:
    """Samples of one optimizer step."""
    t = config.trainer
    return config.data.batch_size * (t.devices or 1) * t.num_nodes * t.accumulate_grad_batches


def with_iterations(config: Config, T: int) -> Config:
    """The same run with another T; of a network whose T is fixed, the run itself."""
    if not isinstance(config.model, UnrolledConfig):
        return config
    return replace(config, model=replace(config.model, n_iterations=T))


def override(config: Config, overrides: str) -> Config:
    """The config with overrides as on a command line: keys, and groups ("memory=recompute") of options that exist.

    An option that is made of others (it has a defaults list) will not do.
    """
    values = to_plain(config)
    for item in overrides.split():
        key, _, value = item.partition("=")
        if key in GROUPS:
            values[key] = OmegaConf.to_container(OmegaConf.load(CONF / key / f"{value}.yaml"))
        else:
            values = OmegaConf.to_container(OmegaConf.merge(values, OmegaConf.from_dotlist([item])))  # type: ignore[assignment]  # a dict
    return parse(values)


def check_noise(noise: NoiseConfig, scaling: str) -> None:
    """Raise ConfigError unless this noise has a meaning for slices scaled so."""
    if scaling == "minmax" and isinstance(noise, PhysicalNoiseConfig):
        raise ConfigError(
            f"noise={noise.name} needs an attenuation scale that slices share: use data.scaling=attenuation, or "
            "noise=field"
        )


def check_window(key: str, window: list[float]) -> None:
    """Raise ConfigError unless this is [low, high]."""
    if len(window) != 2 or window[0] >= window[1]:
        raise ConfigError(f"{key}={window} is not [low, high] in HU: give for example [-160,240]")


def to_plain(config: Config) -> dict[str, Any]:
    """Numbers, strings, lists and dicts only: what a checkpoint may hold; `parse` reads it back."""
    return asdict(config)


def unknown_key(key: str, known: Collection[str]) -> ConfigError:
    """The error for a key that does not exist, with where it belongs or the nearest that does."""
    section, _, name = key.partition(".")
    owners = [owner for owner, schema in GROUPS.get(section, {}).items() if name in {f.name for f in fields(schema)}]
    if owners:
        return ConfigError(f"{key} goes with {section}={' or '.join(owners)} only: choose that, or leave {key} out")
    everything = {*known, *(f"{group}.{key}" for group in GROUPS for key in _keys_of(group))} - {key}
    leaf = key.rpartition(".")[2]
    same = sorted(k for k in everything if "." in k and k.rpartition(".")[2] == leaf)
    if same:
        return ConfigError(f"unknown key {key}: did you mean {' or '.join(same)}?")
    siblings = {k.partition(".")[2]: k for k in everything if name and k.startswith(f"{section}.")}
    if near := difflib.get_close_matches(name, siblings, n=1):
        return ConfigError(f"unknown key {key}: did you mean {siblings[near[0]]}?")
    return ConfigError(f"unknown key {key}: {suggest(key, [k for k in everything if ('.' in k) == ('.' in key)])}")


def _keys_of(group: str) -> set[str]:
    """Keys of all variants of a group."""
    return {f.name for schema in GROUPS[group].values() for f in fields(schema)} - {"name"}


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys, groups included."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat_keys(value, f"{prefix}{key}.")
