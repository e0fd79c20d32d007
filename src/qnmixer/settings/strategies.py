"""The strategies: their keys, the arithmetic of their devices, and what they do not go with.

Each names the class, in a file of its own, that trains by it and says what the plan counts for it.
"""

from typing import Annotated, ClassVar, Literal, Protocol, get_args

from annotated_types import Ge
from pydantic import Field

from qnmixer.errors import ConfigError
from qnmixer.settings.data import Source
from qnmixer.settings.parts import Callbacks, ModelConfig, OptimizerConfig, averages_weights
from qnmixer.settings.sections import Count, TrainerConfig
from qnmixer.settings.validation import Section


class RunSections(Protocol):
    """The sections of a run that its strategy asks."""

    callbacks: Callbacks
    data: Source
    model: ModelConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig


class StrategyConfig(Section):
    """How a run uses its devices. Unless a strategy says otherwise, each has the whole network and its own samples."""

    parallelism: ClassVar[str]  # the class that trains by it, a qnmixer.parallel.parallelism.Parallelism
    is_parallel: ClassVar[bool] = True  # it is for several devices
    takes_weight_means: ClassVar[bool] = True  # callbacks=ema, which copies all weights
    takes_own_data: ClassVar[bool] = True  # a LightningDataModule of the user's, whose batches may differ in size
    takes_manual_optimization: ClassVar[bool] = True  # a module that calls its optimizers by itself
    takes_all_modules: ClassVar[bool] = True  # also one that needs more of the network than x_T from y
    one_in_flight: ClassVar[str] = "strategy=pipeline strategy.schedule=sequential"
    """Overrides from this strategy to the one that takes the least memory on each of several devices."""
    on_buffers: ClassVar[str] = (
        "each device updates them by its own slices, and they are averaged after each batch. One process gives other "
        "values where slices depend on each other, as in BatchNorm: strategy=single"
    )
    """What the values of buffers mean that several devices change as the network runs."""
    name: str

    def devices_per_replica(self, run: RunSections) -> int:
        """The number of devices that work on the same samples."""
        return 1

    def batch_of_replica(self, run: RunSections) -> int:
        """Samples that the devices of one replica get together. data.batch_size is for one device."""
        return run.data.batch_size * self.devices_per_replica(run)

    def idle_share(self, run: RunSections) -> float:
        """The share of their time that devices wait for each other by design."""
        return 0.0

    @property
    def samples_at_once(self) -> int:
        """The smallest number of samples that a device works on."""
        return 1

    def check(self, run: RunSections) -> None:
        """Raise ConfigError for sections that this strategy does not go with."""
        if not self.is_parallel and (n := run.trainer.n_devices) > 1:  # all but one would be idle
            others = strategies_with("is_parallel")
            raise ConfigError(f"strategy={self.name} has one device, not {n}: choose strategy={others}")
        if self.is_parallel and not run.model.has_weights:  # there are no gradients to share
            raise ConfigError(f"model={run.model.name} has no weights to train on several devices: use strategy=single")
        if averages_weights(run.callbacks) and not self.takes_weight_means:
            others = strategies_with("takes_weight_means")
            raise ConfigError(f"callbacks=ema does not work with strategy={self.name}: use strategy={others}")


class SingleConfig(StrategyConfig):
    """One device."""

    parallelism = "qnmixer.parallel.parallelism.Parallelism"
    is_parallel = False
    name: Literal["single"] = "single"


class DDPConfig(StrategyConfig):
    """The whole network on every device; each gets a part of the batch."""

    parallelism = "qnmixer.parallel.ddp.DataParallel"
    name: Literal["ddp"] = "ddp"
    find_unused_parameters: bool = False  # older files lack the key


class FSDPConfig(StrategyConfig):
    """As ddp, with weights, gradients and optimizer state in shards."""

    parallelism = "qnmixer.parallel.fsdp.ShardedDataParallel"
    takes_weight_means = False
    name: Literal["fsdp"] = "fsdp"

    def check(self, run: RunSections) -> None:
        """Adafactor takes means over rows and columns, which are on several devices."""
        super().check(run)
        if run.optimizer.name == "adafactor":
            raise ConfigError("optimizer=adafactor does not work with the sharded weights of strategy=fsdp")


Schedule = Literal["1f1b", "sequential"]


def microbatches_together(schedule: Schedule, n: int) -> int:
    """Those of n micro-batches that a schedule lets into the stages together: all, or one after the other."""
    return 1 if schedule == "sequential" else n


class PipelineConfig(StrategyConfig):
    """The T iterations in stages, which run one after the other on the devices."""

    parallelism = "qnmixer.parallel.pipeline.PipelineParallel"
    takes_weight_means = takes_own_data = takes_manual_optimization = takes_all_modules = False
    one_in_flight = "strategy.schedule=sequential"
    on_buffers = (
        "updated once for each micro-batch; those that several devices change are averaged after each batch. One "
        "process gives other values: strategy=single memory=recompute"
    )
    name: Literal["pipeline"] = "pipeline"
    schedule: Schedule
    microbatch_size: Count
    devices_per_pipeline: Annotated[int, Ge(2)] | None  # None: all of a node

    def devices_per_replica(self, run: RunSections) -> int:
        """The devices of one pipeline."""
        return self.devices_per_pipeline or run.trainer.per_node or 1

    def n_together(self, run: RunSections) -> int:
        """Micro-batches of a batch that are in the stages together."""
        return microbatches_together(self.schedule, self.batch_of_replica(run) // self.microbatch_size)

    def in_flight(self, run: RunSections, device: int) -> int:
        """The most micro-batches that a device has between their forward and their backward pass."""
        return min(self.n_together(run), self.devices_per_replica(run) - device)

    def idle_share(self, run: RunSections) -> float:
        """The share of device time that a pipeline waits (the bubble), if all stages take the same time."""
        n_waiting = self.devices_per_replica(run) - 1
        return n_waiting / (self.n_together(run) + n_waiting)

    @property
    def samples_at_once(self) -> int:
        """A micro-batch."""
        return self.microbatch_size

    def check(self, run: RunSections) -> None:
        """The stages are iterations, of which each device needs one, with micro-batches for all of them."""
        super().check(run)
        trainer, data, T = run.trainer, run.data, run.model.T
        if not run.model.is_unrolled:
            raise ConfigError(f"strategy=pipeline cuts iterations into stages, but model={run.model.name} has {T}")
        if trainer.per_node is None:  # the rest is checked when the devices are counted
            return
        devices, size = self.devices_per_replica(run), self.microbatch_size
        n, remainder = divmod(self.batch_of_replica(run), size)
        if devices == 1:
            raise ConfigError("strategy=pipeline needs two devices or more: give trainer.devices=…, or strategy=single")
        if trainer.per_node % devices:
            raise ConfigError(
                f"strategy.devices_per_pipeline={devices} does not divide trainer.devices={trainer.devices}"
            )
        if devices > T:
            key = "strategy.devices_per_pipeline" if self.devices_per_pipeline else "trainer.devices"
            raise ConfigError(f"{key}={devices} gives more stages than model.n_iterations={T}")
        if remainder or n < microbatches_together(self.schedule, devices):
            cut = f"data.batch_size={data.batch_size} × {devices} devices by strategy.microbatch_size={size}"
            raise ConfigError(f"strategy.schedule={self.schedule} cannot cut {cut}")


Strategy = Annotated[SingleConfig | DDPConfig | FSDPConfig | PipelineConfig, Field(discriminator="name")]
"""Those that a run can choose."""


def strategies_with(quality: str) -> str:
    """The strategies with a quality, such as `is_parallel`, for an error: "single, ddp or fsdp"."""
    sections, _ = get_args(Strategy)
    *names, last = (kind.model_fields["name"].default for kind in get_args(sections) if getattr(kind, quality))
    return f"{', '.join(names)} or {last}"
