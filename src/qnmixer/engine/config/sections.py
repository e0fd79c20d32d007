"""The sections of a run without a target: each key with its type, bound and default. The values are in conf/."""

import math
import re
from os.path import expanduser
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    create_model,
    model_serializer,
    model_validator,
)

from qnmixer.engine.config.checking import Section

LONGEST_TAG = 64
"""Characters; W&B refuses longer tags."""
Count = Annotated[int, Ge(1)]
Length = Annotated[float, Gt(0)]
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
Accelerator = Literal["auto", "cpu", "gpu", "cuda"]
Precision = Literal["32", "16-mixed", "bf16-mixed"]
CheckpointName = Literal["best", "last"]
Symmetries = Literal[1, 2, 4, 8]
Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""One text, or several."""
File = Annotated[str, AfterValidator(expanduser)]


class GeometryConfig(Section):
    """Fan or parallel beam in mm and radians. pixel_size is field_of_view / data.image_size.

    name, beam and detector_offset have defaults: a user's own file may leave them out.
    """

    name: str = ""  # for the reader of a config; nothing depends on it
    field_of_view: Length
    n_views: Annotated[int, Ge(1), Le(8192)]
    n_detectors: Annotated[int, Ge(1), Le(8192)]
    detector_pitch: Length
    source_to_axis: Length
    axis_to_detector: float
    first_angle: float | None  # None: half a step between views
    angle_span: float
    fbp_filter: Literal["ramp", "shepp-logan", "cosine", "hamming", "hann"]
    beam: Literal["fan_flat", "fan_curved", "parallel"] = "fan_flat"
    detector_offset: float = 0.0  # bins


def _kind_of_scan(values: Any) -> str:
    return "changes" if isinstance(values, dict) and values.get("name", "") is None else "scan"


_CHANGES: dict[str, Any] = {
    key: (Annotated[field.annotation, key, *field.metadata] | None, ...)
    for key, field in GeometryConfig.model_fields.items()
}
GeometryChanges: Any = create_model("GeometryChanges", __base__=Section, **_CHANGES)
"""For a trained network: the scan of the run itself. Keys that are not None here replace the run's."""
ScanOrAsTrained = Annotated[
    Annotated[GeometryConfig, Tag("scan")] | Annotated[GeometryChanges, Tag("changes")], Discriminator(_kind_of_scan)
]
"""A scan, or changes of the run's."""


def scan_for(section: ScanOrAsTrained, trained: GeometryConfig) -> GeometryConfig:
    """The scan that a command with a trained network uses."""
    if isinstance(section, GeometryConfig):
        return section
    changes = {key: value for key, value in section.plain().items() if value is not None}
    return trained.changed(**changes) if changes else trained


class MemoryConfig(Section):
    """What happens to the graph of the iterations until the backward pass."""

    name: Literal["keep", "recompute", "offload"]


def check_window(window: list[float]) -> None:
    """Raise ValueError unless this is [low, high]."""
    if len(window) != 2 or not -math.inf < window[0] < window[1] < math.inf:
        raise ValueError(f"window={window} is not [low, high] in HU: give for example [-160,240]")


class EvaluationConfig(Section):
    """The scores of an evaluation, and its pictures."""

    window: list[float]  # HU, [low, high]
    n_pictures: Count
    tv_weight: Annotated[float, Ge(1e-9), Le(1e9)] | None = None  # None: without total variation
    tv_noise_weight: Annotated[float, Ge(0), Le(1e9)] = 0.0
    first_order: bool = False  # also the network with H = I, if it is of second order

    @model_validator(mode="after")
    def _rising(self) -> Self:
        check_window(self.window)
        return self


class DebugConfig(Section):
    """A debug mode without settings."""

    name: Literal["off", "overfit", "anomaly"]


class FewBatchesConfig(Section):
    """Only the first slices of each split."""

    name: Literal["few_batches"] = "few_batches"
    batches: Count


class ProfileConfig(Section):
    """torch's profiler over some optimizer steps."""

    name: Literal["profile"] = "profile"
    warm_up: Count
    steps: Count


Debug = Annotated[DebugConfig | FewBatchesConfig | ProfileConfig, Field(discriminator="name")]


class StrategyConfig(Section):
    """How a run uses several devices.

    Attributes:
        planned_as: what the plan counts on a device: a `replica` of the whole network, one of its `shards`, or a part
            of a `pipeline`.
    """

    planned_as: ClassVar[str] = "replica"
    name: str

    def devices_per_replica(self, trainer: "TrainerConfig") -> int:
        """The number of devices that work on the same samples."""
        return 1


class SingleConfig(StrategyConfig):
    """One device."""

    name: Literal["single"] = "single"


class DDPConfig(StrategyConfig):
    """The whole network on every device; each gets a part of the batch."""

    name: Literal["ddp"] = "ddp"
    find_unused_parameters: bool = False  # older files lack the key


class FSDPConfig(StrategyConfig):
    """As ddp, with weights, gradients and optimizer state in shards."""

    planned_as = "shards"
    name: Literal["fsdp"] = "fsdp"


class PipelineConfig(StrategyConfig):
    """The T iterations in stages, which run one after the other on the devices."""

    planned_as = "pipeline"
    name: Literal["pipeline"] = "pipeline"
    schedule: Literal["1f1b", "sequential"]
    microbatch_size: Count
    devices_per_pipeline: Annotated[int, Ge(2)] | None  # None: all of a node

    def devices_per_replica(self, trainer: "TrainerConfig") -> int:
        """The devices of one pipeline."""
        return self.devices_per_pipeline or trainer.devices or 1


Strategy = Annotated[SingleConfig | DDPConfig | FSDPConfig | PipelineConfig, Field(discriminator="name")]


class PassedOn(Section):
    """Arguments of Lightning's Trainer that are not in conf/: `+trainer.NAME=…` sets one."""

    benchmark: bool | None = None
    enable_autolog_hparams: bool | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    inference_mode: bool | None = None
    limit_train_batches: Annotated[float, Gt(0), Le(1)] | Count | None = None  # a share, or a number
    max_time: str | None = None  # DAYS:HOURS:MINUTES:SECONDS
    min_epochs: Count | None = None
    min_steps: Count | None = None
    sync_batchnorm: bool | None = None

    @model_validator(mode="after")
    def _time(self) -> Self:
        if not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", self.max_time or "00:00:00:00"):
            raise ValueError(
                f"max_time={self.max_time} is not DAYS:HOURS:MINUTES:SECONDS: give for example 00:12:00:00"
            )
        return self


_PASSED_ON = PassedOn.model_fields.keys()


class TrainerConfig(PassedOn):
    """The arguments of Lightning's Trainer, and when a run validates and saves."""

    accelerator: Accelerator
    devices: Count | None  # of a node; None: all GPUs, or one with strategy=single
    num_nodes: Count
    precision: Annotated[Precision, BeforeValidator(lambda value: "32" if value == 32 else value)]
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

    @model_validator(mode="before")
    @classmethod
    def _of_older_files(cls, values: Any) -> Any:
        """Files of before had the arguments that are passed on under `extra`."""
        if not isinstance(values, dict) or not isinstance(values.get("extra"), dict):
            return values
        return {key: value for key, value in values.items() if key != "extra"} | values["extra"]

    @model_serializer(mode="wrap")
    def _without_unset(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the arguments that nobody has set."""
        return {
            name: value for name, value in serialize(self).items() if name in self.passed_on or name not in _PASSED_ON
        }

    @property
    def n_devices(self) -> int:
        """The number of devices on all nodes, with one on each if `devices` is open."""
        return (self.devices or 1) * self.num_nodes

    @property
    def passed_on(self) -> dict[str, Any]:
        """The arguments for Lightning's Trainer that are not in conf/, without those that are None."""
        values = {name: getattr(self, name) for name in _PASSED_ON}
        return {name: value for name, value in values.items() if value is not None}


class WandbConfig(Section):
    """The settings of Weights & Biases."""

    target: str = Field(alias="_target_")
    mode: Literal["offline", "online", "disabled"]
    project: str
    entity: str | None
    run_name: str | None  # None: in a sweep the overrides of this job only, else setting and run folder
    group: str | None  # None: the sweep
    notes: str | None = None

    @model_validator(mode="after")
    def _project_of_wandb(self) -> Self:
        entity, _, name = self.project.rpartition("/")
        better = re.sub(r"[/\\#?%:]", "-", name or entity)[:128]
        if self.project != better:
            account = f"logger.wandb.entity={entity} " if re.fullmatch(r"[\w-]+", entity, re.ASCII) else ""
            raise ValueError(
                f"project={self.project} (or WANDB_PROJECT) has more than 128 letters, or one of / \\ # ? % :, "
                f"which W&B refuses: write {account}logger.wandb.project={better}"
            )
        return self
