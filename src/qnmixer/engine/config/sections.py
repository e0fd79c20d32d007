"""The sections of a run without a target: their keys, types and bounds, and the rules inside each.

The values are in conf/.
"""

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from annotated_types import Ge, Gt, Le

from qnmixer.engine.config.values import converted
from qnmixer.errors import ConfigError, first_line, suggest

_MOST_VIEWS = 8192
LONGEST_TAG = 64
"""Characters; W&B refuses longer tags."""
Count = Annotated[int, Ge(1)]
Length = Annotated[float, Gt(0)]
Accelerator = Literal["auto", "cpu", "gpu", "cuda"]
Precision = Literal["32", "16-mixed", "bf16-mixed"]


@dataclass(kw_only=True)
class GeometryConfig:
    """Fan or parallel beam in mm and radians. pixel_size is field_of_view / data.image_size.

    name, beam, detector_offset and angles have defaults: a user's own file may leave them out.

    Attributes:
        angles: of the views in radians, or a .npy or text file of them, whose content the config then has. They replace
            n_views, first_angle and angle_span.
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
    angles: list[float] | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.angles, str):
            self.angles = _angles_of(self.angles)
        if self.angles is not None:
            if not 1 <= len(self.angles) <= _MOST_VIEWS:
                raise ConfigError(f"geometry.angles has {len(self.angles)} angles: give 1 to {_MOST_VIEWS}")
            self.n_views = len(self.angles)


def _angles_of(file: str) -> list[float]:
    """The numbers of a .npy or text file. Raises ConfigError."""
    import numpy as np

    path = Path(file).expanduser()
    try:
        if not path.is_file() or path.stat().st_size > 2**20:  # opening a pipe would not end
            raise ValueError("it is no file of at most 1 MiB")
        numbers = np.load(path) if path.suffix == ".npy" else np.loadtxt(path, ndmin=1)
        if numbers.ndim != 1 or not np.isfinite(numbers).all():
            raise ValueError(f"it has {numbers.dtype} {list(numbers.shape)}, not one finite number for each view")
        return [float(it) for it in numbers]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"geometry.angles={file} has no angles ({first_line(error)}): give a list such as [0.0,0.1,0.25] in "
            "radians, or a .npy or text file of them"
        ) from error


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

    planned_as: ClassVar[str | None] = None

    name: str

    def devices_per_replica(self, trainer: "TrainerConfig") -> int:
        """The number of devices that work on the same samples."""
        return 1


@dataclass(kw_only=True)
class SingleConfig(StrategyConfig):
    """One device."""

    planned_as: ClassVar[str | None] = "replica"

    name: str = "single"


@dataclass(kw_only=True)
class DDPConfig(StrategyConfig):
    """The whole network on every device; each gets a part of the batch."""

    planned_as: ClassVar[str | None] = "replica"

    name: str = "ddp"
    static_graph: bool


@dataclass(kw_only=True)
class FSDPConfig(StrategyConfig):
    """As ddp, with weights, gradients and optimizer state in shards."""

    planned_as: ClassVar[str | None] = "shards"

    name: str = "fsdp"
    reshard_after_forward: bool
    sharded_checkpoint: bool


@dataclass(kw_only=True)
class PipelineConfig(StrategyConfig):
    """The T iterations in stages, which run one after the other on the devices."""

    planned_as: ClassVar[str | None] = "pipeline"

    name: str = "pipeline"
    schedule: Literal["1f1b", "gpipe", "interleaved", "sequential"]
    microbatch_size: Count
    devices_per_pipeline: Annotated[int, Ge(2)] | None  # None: all of a node
    stages_per_device: Count
    cut: list[int] | None  # iterations of each stage; None: as equal as possible

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
    max_steps: Annotated[int, Ge(-1)]
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
        hints = get_type_hints(PassedOn, include_extras=True)
        for name in self.extra:
            if name not in hints:
                raise ConfigError(f"trainer.extra.{name} is not known: {suggest(name, hints)}")
        self.extra = {name: converted(f"trainer.{name}", value, hints[name]) for name, value in self.extra.items()}
        time = self.extra.get("max_time")
        if time is not None and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", time):
            raise ConfigError(
                f"trainer.max_time={time} is not DAYS:HOURS:MINUTES:SECONDS: give for example 00:01:30:00"
            )
        limit = self.extra.get("limit_train_batches")
        if isinstance(limit, float) and limit > 1:
            raise ConfigError(f"trainer.limit_train_batches={limit} is too large for a share: give at most 1.0")
        if isinstance(limit, int) and limit % self.accumulate_grad_batches:
            raise ConfigError(
                f"trainer.limit_train_batches={limit} is no multiple of trainer.accumulate_grad_batches="
                f"{self.accumulate_grad_batches}: the last step of an epoch would be smaller"
            )


@dataclass(kw_only=True)
class PassedOn:
    """Arguments of Lightning's Trainer that are not in conf/: `+trainer.NAME=…` sets one."""

    benchmark: bool | None = None
    enable_autolog_hparams: bool | None = None
    enable_progress_bar: bool | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    inference_mode: bool | None = None
    limit_train_batches: Annotated[float, Gt(0)] | Annotated[int, Gt(0)] | None = None
    max_time: str | None = None  # DAYS:HOURS:MINUTES:SECONDS
    min_epochs: Count | None = None
    min_steps: Count | None = None
    profiler: Literal["simple", "advanced", "pytorch"] | None = None
    sync_batchnorm: bool | None = None


PASSED_ON = frozenset(f.name for f in fields(PassedOn))
