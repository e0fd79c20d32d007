"""The sections of a run without a target: each key with its type, bound and default. The values are in conf/."""

import math
import re
from os.path import expanduser
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le, Len
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from qnmixer.settings.validation import Section

LONGEST_TAG, LONGEST_NAME = 64, 128  # characters; W&B refuses longer tags, and longer names, groups and ids
Count = Annotated[int, Ge(1)]
Length = Annotated[float, Gt(0)]
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]
Accelerator = Literal["auto", "cpu", "gpu", "cuda"]
Precision = Literal["32", "16-mixed", "bf16-mixed"]
RunTag = Annotated[str, Len(0, LONGEST_TAG)]
Name = Annotated[str, Len(0, LONGEST_NAME)]
RunID = Annotated[str, StringConstraints(pattern=rf"^[\w.-]{{1,{LONGEST_NAME}}}$")]
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


Share = Annotated[float, Gt(0), Le(1)] | Count  # a share, or a number
_Unit = Annotated[str, StringConstraints(pattern="^(days|hours|minutes|seconds)$")]
_Clock = Annotated[str, StringConstraints(strict=True, pattern=r"^\d+:\d\d:\d\d:\d\d$")]
Time = _Clock | dict[_Unit, Annotated[int, Ge(0)]]  # DAYS:HOURS:MINUTES:SECONDS, or a mapping, as Lightning takes it
_GROUP = "is a group of its own: give {0}=, as in {1}"
_OF_THE_RUN = "is set by the run itself, for "
REFUSED = {
    "trainer.strategy": _GROUP.format("strategy", "strategy=ddp"),
    "trainer.logger": _GROUP.format("logger", "logger=csv"),
    "trainer.callbacks": _GROUP.format("callbacks", "callbacks=none"),
    "trainer.plugins": _OF_THE_RUN + "precision and for checkpoints that a kill leaves whole: trainer.precision=",
    "trainer.use_distributed_sampler": _OF_THE_RUN + "an epoch in which no slice counts twice",
    "trainer.enable_checkpointing": "would leave nothing to resume: trainer.save_every_n_steps says how often",
    "trainer.barebones": "would leave no checkpoint and no metrics: qnmixer.doctor measures the speed",
    "trainer.default_root_dir": "is the folder of the run: give hydra.run.dir=FOLDER",
    "trainer.model_registry": "would send checkpoints away: qnmixer.export writes weights for others",
    "trainer.limit_predict_batches": "has nothing to limit: qnmixer.reconstruct takes the files that you give",
}
"""Arguments of Lightning that no run takes, by key, and why."""


class TrainerConfig(Section):
    """The arguments of Lightning's Trainer, and when a run validates and saves. Older files lack those with a default.

    With fast_dev_run each batch is an optimizer step.
    """

    accelerator: Accelerator
    devices: Count | Literal["auto", -1] | list[Annotated[int, Ge(0)]] | None  # of a node; None is auto
    num_nodes: Count
    precision: Annotated[Precision, BeforeValidator(lambda value: _PRECISIONS.get(str(value), value))]
    max_steps: Annotated[int, Ge(-1), Le(10**9)]
    max_epochs: Literal[-1] | Count | None
    min_steps: Count | None = None
    min_epochs: Count | None = None
    max_time: Time | None = None
    accumulate_grad_batches: Count
    gradient_clip_val: Annotated[float, Ge(0)] | None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    val_every_n_steps: Count | None
    val_check_interval: Share | Time | None = None
    check_val_every_n_epoch: Count | None = 1
    num_sanity_val_steps: Annotated[int, Ge(-1)] = 0
    save_every_n_steps: Count | None
    log_every_n_steps: Count
    limit_train_batches: Share | None = None
    limit_val_batches: Annotated[float, Ge(0), Le(1)] | Count | None  # 0: no validation
    limit_test_batches: Share | None = None
    overfit_batches: Annotated[float, Ge(0), Le(1)] | Count = 0.0
    fast_dev_run: bool | Annotated[int, Ge(0)] = False
    reload_dataloaders_every_n_epochs: Annotated[int, Ge(0)] = 0
    enable_progress_bar: bool = True
    enable_model_summary: bool = False
    enable_autolog_hparams: bool = True
    profiler: Literal["simple", "advanced", "pytorch"] | None = None
    detect_anomaly: bool = False
    deterministic: bool | Literal["warn"]
    benchmark: bool | None = None
    inference_mode: bool = True
    sync_batchnorm: bool = False
    tf32: bool = False  # on GPUs that have it

    @model_validator(mode="before")
    @classmethod
    def _taken(cls, values: Any) -> Any:
        """Text for devices is a number or a list."""
        if not isinstance(values, dict):
            return values
        if isinstance(text := values.get("devices"), str) and re.fullmatch(r"-?\d+(,\d*)*", text):
            devices = [int(n) for n in text.split(",") if n] if "," in text else int(text)
            values = {**values, "devices": devices}
        if refused := next((name for name in values if f"trainer.{name}" in REFUSED), None):
            raise ValueError(f"{refused} {REFUSED[f'trainer.{refused}']}")
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if isinstance(self.devices, list) and len({*self.devices}) < max(1, len(self.devices)):
            raise ValueError(f"devices={self.devices} is no list of different devices: give for example [0,1]")
        for key, default in {"val_check_interval": None, "check_val_every_n_epoch": 1}.items():
            if self.val_every_n_steps is not None and (value := getattr(self, key)) not in (None, default):
                raise ValueError(f"{key}={value} beside val_every_n_steps: set trainer.val_every_n_steps=null")
        if self.fast_dev_run:
            self.accumulate_grad_batches, self.max_steps, self.max_epochs = 1, int(self.fast_dev_run), None
        return self

    @property
    def validates(self) -> bool:
        """Whether there are validations, as Lightning has it."""
        return bool(self.limit_val_batches != 0 or self.overfit_batches or self.fast_dev_run)

    @property
    def per_node(self) -> int | None:
        """The number of devices of a node. None: the machine says it."""
        if isinstance(self.devices, list):
            return len(self.devices)
        return self.devices if isinstance(self.devices, int) and self.devices > 0 else None

    @property
    def n_devices(self) -> int:
        """The number of devices on all nodes, with one on each if `devices` is open."""
        return (self.per_node or 1) * self.num_nodes


_PRECISIONS = {"32": "32", "32-true": "32", "16": "16-mixed", "bf16": "bf16-mixed"}


def _words(value: Any) -> Any:
    """Words of a list, or of a text with commas, as W&B reads WANDB_TAGS."""
    return [word.strip() for word in value.split(",")] if isinstance(value, str) and value else value or []


class WandbConfig(Section):
    """The settings of Weights & Biases, under the names of WandbLogger and wandb.init."""

    target: str = Field(alias="_target_")
    mode: Literal["offline", "online", "disabled"]
    offline: bool | None = None  # as in WandbLogger; None: `mode` says it
    project: str
    entity: str | None
    # None: in a sweep the overrides of this job only, else setting and run folder
    name: Name | None
    group: Name | None  # None: the sweep
    job_type: Name | None = None
    notes: str | None = None
    tags: Annotated[list[RunTag], BeforeValidator(_words)] = Field(default_factory=list)
    id: RunID | None = None  # None: drawn; a resumed run keeps its own
    version: RunID | None = None  # as id
    resume: Literal["allow", "must", "never", "auto"] = "allow"  # must would fail for a run that was offline before
    save_dir: File | None = None  # None: the run folder
    dir: File | None = None  # as save_dir
    log_model: bool | Literal["all"] = False  # as in WandbLogger: True: at the end of training, "all": each

    @model_validator(mode="after")
    def _taken_by_wandb(self) -> Self:
        if "" in self.tags:
            raise ValueError("tags (or WANDB_TAGS) has an empty one, which W&B refuses: take out a comma")
        entity, _, name = self.project.rpartition("/")
        better = re.sub(r"[/\\#?%:]", "-", name or entity)[:128]
        if self.project != better:
            account = f"logger.wandb.entity={entity} " if re.fullmatch(r"[\w-]+", entity, re.ASCII) else ""
            raise ValueError(
                f"project={self.project} (or WANDB_PROJECT) has more than 128 letters, or one of / \\ # ? % :, "
                f"which W&B refuses: write {account}logger.wandb.project={better}"
            )
        return self
