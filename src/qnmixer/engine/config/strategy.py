"""Schema of `strategy`: how a run uses several devices."""

from dataclasses import dataclass
from typing import ClassVar

from qnmixer.engine.config.option import number, one_of
from qnmixer.engine.config.trainer import TrainerConfig


@dataclass(kw_only=True)
class StrategyConfig:
    """How a run uses several devices.

    Attributes:
        planned_as: what the plan counts on a device: a `replica` of the whole network, one of its `shards`, or a part
            of a `pipeline`. None: the plan refuses the strategy.
    """

    planned_as: ClassVar[str | None] = None

    name: str

    def devices_per_replica(self, trainer: TrainerConfig) -> int:
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
    schedule: str = one_of("1f1b", "gpipe", "interleaved", "sequential")
    microbatch_size: int = number(at_least=1)
    devices_per_pipeline: int | None = number(at_least=2)  # None: all of a node
    stages_per_device: int = number(at_least=1)
    cut: list[int] | None  # iterations of each stage; None: as equal as possible

    def devices_per_replica(self, trainer: TrainerConfig) -> int:
        """The devices of one pipeline."""
        return self.devices_per_pipeline or trainer.devices or 1
