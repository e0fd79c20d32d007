"""The sections of a run without a target, and callbacks, loggers and metrics, of which a run may have several.

The values are in conf/. Here are their keys, types and bounds, and the rules inside each.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from qnmixer.engine.config.groups import FUNCTION_OR_MODULE, Group, parse_section
from qnmixer.engine.config.logged import LOSS, taken_names
from qnmixer.engine.config.options import TARGET, check_names, converted_arguments, options, values_of_option
from qnmixer.engine.plugins import Kind, subclass_of
from qnmixer.errors import ConfigError

_MOST_VIEWS = 8192
LONGEST_TAG = 64
"""Characters; W&B refuses longer tags."""
METRICS_FILE = "qnmixer.engine.tracking.loggers.MetricsFile"
"""The target of logger=csv. Every run has this logger."""

_CUSTOM = "custom"
"""The name of a logger that the group itself describes."""
_WANDB = "qnmixer.engine.tracking.loggers.WandbRun"
_MEAN_WEIGHTS = "qnmixer.engine.training.callbacks.MeanWeights"
Count = Annotated[int, Ge(1)]
Length = Annotated[float, Gt(0)]
Accelerator = Literal["auto", "cpu", "gpu", "cuda"]
Precision = Literal["32", "16-mixed", "bf16-mixed"]


@dataclass(kw_only=True)
class GeometryConfig:
    """Fan or parallel beam in mm and radians. pixel_size is field_of_view / data.image_size.

    name, beam and detector_offset have defaults: a user's own file may leave them out.
    """

    name: str = ""  # for the reader of a config; nothing depends on it
    field_of_view: Length
    n_views: Annotated[int, Ge(1), Le(_MOST_VIEWS)]
    n_detectors: Annotated[int, Ge(1), Le(8192)]
    detector_pitch: Length
    source_to_axis: Length
    axis_to_detector: float
    first_angle: float | None  # None: half a step between views
    angle_span: float
    fbp_filter: Literal["ramp", "shepp-logan", "cosine", "hamming", "hann"]
    beam: Literal["fan_flat", "fan_curved", "parallel"] = "fan_flat"
    detector_offset: float = 0.0  # bins


@dataclass(kw_only=True)
class MemoryConfig:
    """What happens to the graph of the iterations until the backward pass; `name` is the mode."""

    name: str


@dataclass(kw_only=True)
class EvaluationConfig:
    """The scores of an evaluation, and its pictures."""

    window: list[float]  # HU, [low, high]
    n_pictures: Count
    tv_weight: Annotated[float, Ge(1e-9), Le(1e9)] | None = None  # None: without total variation
    tv_noise_weight: Annotated[float, Ge(0), Le(1e9)] = 0.0

    def __post_init__(self) -> None:
        check_window("evaluation.window", self.window)


def check_window(key: str, window: list[float]) -> None:
    """Raise ConfigError unless this is [low, high]."""
    if len(window) != 2 or not -math.inf < window[0] < window[1] < math.inf:
        raise ConfigError(f"{key}={window} is not [low, high] in HU: give for example [-160,240]")


@dataclass(kw_only=True)
class DebugConfig:
    """A debug mode."""

    name: str


@dataclass(kw_only=True)
class FewBatchesConfig(DebugConfig):
    """Only the first slices of each split."""

    name: str = "few_batches"
    batches: Count


@dataclass(kw_only=True)
class ProfileConfig(DebugConfig):
    """torch's profiler over some optimizer steps."""

    name: str = "profile"
    warm_up: Count
    steps: Count


@dataclass(kw_only=True)
class StrategyConfig:
    """How a run uses several devices.

    Attributes:
        planned_as: what the plan counts on a device: a `replica` of the whole network, one of its `shards`, or a part
            of a `pipeline`.
    """

    planned_as: ClassVar[str | None] = "replica"

    name: str

    def devices_per_replica(self, trainer: "TrainerConfig") -> int:
        """The number of devices that work on the same samples."""
        return 1


@dataclass(kw_only=True)
class SingleConfig(StrategyConfig):
    """One device."""

    name: str = "single"


@dataclass(kw_only=True)
class DDPConfig(StrategyConfig):
    """The whole network on every device; each gets a part of the batch."""

    name: str = "ddp"


@dataclass(kw_only=True)
class FSDPConfig(StrategyConfig):
    """As ddp, with weights, gradients and optimizer state in shards."""

    planned_as = "shards"
    name: str = "fsdp"


@dataclass(kw_only=True)
class PipelineConfig(StrategyConfig):
    """The T iterations in stages, which run one after the other on the devices."""

    planned_as = "pipeline"
    name: str = "pipeline"
    schedule: Literal["1f1b", "sequential"]
    microbatch_size: Count
    devices_per_pipeline: Annotated[int, Ge(2)] | None  # None: all of a node

    def devices_per_replica(self, trainer: "TrainerConfig") -> int:
        """The devices of one pipeline."""
        return self.devices_per_pipeline or trainer.devices or 1


@dataclass(kw_only=True)
class TrainerConfig:
    """The arguments of Lightning's Trainer.

    Attributes:
        extra: those that are not in conf/, see `PassedOn`.
    """

    accelerator: Accelerator
    devices: Count | None  # of a node; None: all GPUs, or one with strategy=single
    num_nodes: Count
    precision: Precision
    max_steps: Annotated[int, Ge(-1), Le(10**9)]
    max_epochs: Count | None
    accumulate_grad_batches: Count
    gradient_clip_val: Length | None
    val_every_n_steps: Count | None
    save_every_n_steps: Count | None
    limit_val_batches: Count | None
    log_every_n_steps: Count
    deterministic: bool
    tf32: bool = False  # on GPUs that have it; older files lack the key
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names("trainer", "lightning.Trainer", PassedOn, self.extra)
        self.extra = converted_arguments("trainer.", PassedOn, self.extra)


@dataclass(kw_only=True)
class PassedOn:
    """Arguments of Lightning's Trainer that are not in conf/: `+trainer.NAME=…` sets one."""

    benchmark: bool | None = None
    enable_autolog_hparams: bool | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    inference_mode: bool | None = None
    limit_train_batches: Annotated[float, Gt(0), Le(1)] | Annotated[int, Gt(0)] | None = None  # a share, or a number
    max_time: str | None = None  # DAYS:HOURS:MINUTES:SECONDS
    min_epochs: Count | None = None
    min_steps: Count | None = None
    sync_batchnorm: bool | None = None


@dataclass(kw_only=True)
class Named(Group):
    """One of several sections of a group: a callback, a logger or a metric."""

    late: ClassVar[bool] = True


@dataclass(kw_only=True)
class MetricConfig(Named):
    """A function `(image, truth, **arguments)` → [B], or a class of torchmetrics, which gets the images one by one.

    Attributes:
        title: the heading of its column; None: its name.
        mode: max or min, the better value.
        in_hu: whether it gets image and truth in HU. Else these are in [0, 1].
    """

    group: ClassVar[str] = "metrics"
    kind: ClassVar[Kind] = FUNCTION_OR_MODULE
    n_ours: ClassVar[int] = 2

    title: str | None = None
    mode: Literal["max", "min"] = "max"
    in_hu: bool = False


@dataclass(kw_only=True)
class CallbackConfig(Named):
    """A Lightning callback. Only those of the command line are built; those in a checkpoint are dropped."""

    group: ClassVar[str] = "callbacks"
    kind: ClassVar[Kind] = subclass_of("lightning.pytorch.callbacks.Callback")


@dataclass(kw_only=True)
class LoggerConfig(Named):
    """A Lightning logger. metrics.csv is always written too."""

    group: ClassVar[str] = "logger"
    kind: ClassVar[Kind] = subclass_of("lightning.pytorch.loggers.Logger")


@dataclass(kw_only=True)
class WandbConfig:
    """The settings of Weights & Biases."""

    _target_: str
    mode: Literal["offline", "online", "disabled"]
    project: str
    entity: str | None
    run_name: str | None  # None: in a sweep the overrides of this job only, else setting and run folder
    group: str | None  # None: the sweep
    notes: str | None = None


def parse_callbacks(section: Any) -> dict[str, CallbackConfig]:
    """Callbacks by name, without those that are null. Raises ConfigError for one without a class."""
    named = _named("callbacks", section)
    return {name: parse_section(f"callbacks.{name}", CallbackConfig, it) for name, it in named.items()}


def parse_metrics(section: Any) -> dict[str, MetricConfig]:
    """Metrics by name, without those that are null. Raises ConfigError for a wrong name, or one without a target."""
    named = _named("metrics", section)
    taken = taken_names(named)
    for name in named:
        if name in taken:
            raise ConfigError(f"metrics.{name}: there is a column {name} already, give the metric another name")
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"metrics.{name}: a name has letters, digits, _ and -, give the metric such a name")
    return {name: parse_section(f"metrics.{name}", MetricConfig, it) for name, it in named.items()}


def parse_loggers(section: Any) -> dict[str, WandbConfig | LoggerConfig]:
    """Loggers by name.

    A `_target_` of the group itself, as in `logger=custom`, is one more logger. Settings of loggers that were not
    chosen are dropped, because conf/local may contain them. Raises ConfigError for a section that is no logger.
    """
    if isinstance(section, Mapping):
        inner = {name: it for name, it in section.items() if isinstance(it, Mapping) and TARGET in it}
        rest = {name: it for name, it in section.items() if name not in {*inner, *options("logger")}}
        section = inner | ({_CUSTOM: rest} if TARGET in section else rest)
    loggers = {}
    for name, it in _named("logger", section or {}).items():
        schema = WandbConfig if it[TARGET] == _WANDB else LoggerConfig
        loggers[name] = parse_section("logger" if name == _CUSTOM else f"logger.{name}", schema, it)
    return loggers


def _named(group: str, section: Any) -> dict[str, Mapping[str, Any]]:
    """The sections of a group by name, without those that are null. Raises ConfigError for one without a target."""
    if not isinstance(section, Mapping):
        raise ConfigError(f"{group}={section} is not a group of {group}: choose {group}=default")
    found = {str(name): it for name, it in section.items() if it is not None}
    for name, it in found.items():
        if not isinstance(it, Mapping) or not isinstance(it.get(TARGET), str):
            raise ConfigError(f"{group}.{name} names no class: give +{group}.{name}.{TARGET}=my_file.MyClass")
    return found


def averages_weights(callbacks: Mapping[str, CallbackConfig]) -> bool:
    """Whether a callback keeps a mean of the weights on the device, as callbacks=ema does."""
    return any(given._target_ == _MEAN_WEIGHTS for given in callbacks.values())


def default_metrics() -> dict[str, MetricConfig]:
    """Those of metrics=default: of a file without the section, such as an older checkpoint, and of each final table."""
    return parse_metrics(values_of_option("metrics", "default"))


def modes_of(metrics: Mapping[str, MetricConfig]) -> dict[str, str]:
    """The better value, max or min, of all that `monitor` can name: val/NAME of each metric, and val/loss."""
    return {f"val/{name}": str(metric.mode) for name, metric in metrics.items()} | {f"val/{LOSS}": "min"}


def check_monitor(monitor: str, metrics: Mapping[str, MetricConfig]) -> None:
    """Raise ConfigError if no validation gives the monitored metric."""
    if monitor not in (known := modes_of(metrics)):
        raise ConfigError(
            f"monitor={monitor} is not known: choose {', '.join(known)}, or add a metric: "
            f"+metrics.NAME.{TARGET}=my_file.my_metric"
        )
