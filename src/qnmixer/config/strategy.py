"""What `strategy` may say: how a run is spread over devices."""

from dataclasses import dataclass
from typing import ClassVar

from qnmixer.config.option import number, one_of


@dataclass(kw_only=True)
class StrategyConfig:
    """How a run is spread over devices.

    Attributes:
        planned_as: how the plan counts what a device needs: as a `replica` of the whole network, as one of its
            `shards`, or as a part of a `pipeline`. None: the plan refuses it.
    """

    planned_as: ClassVar[str | None] = None

    name: str


@dataclass(kw_only=True)
class SingleConfig(StrategyConfig):
    """One device."""

    planned_as: ClassVar[str | None] = "replica"


@dataclass(kw_only=True)
class DDPConfig(StrategyConfig):
    """The whole network on every device, the batch shared out."""

    planned_as: ClassVar[str | None] = "replica"

    static_graph: bool


@dataclass(kw_only=True)
class FSDPConfig(StrategyConfig):
    """As ddp, with weights, gradients and optimizer state in shards."""

    planned_as: ClassVar[str | None] = "shards"

    reshard_after_forward: bool
    sharded_checkpoint: bool


@dataclass(kw_only=True)
class PipelineConfig(StrategyConfig):
    """The T iterations in stages, one after the other on the devices."""

    planned_as: ClassVar[str | None] = "pipeline"

    schedule: str = one_of("1f1b", "gpipe", "interleaved", "sequential")
    microbatch_size: int = number(at_least=1)
    devices_per_pipeline: int | None = number(at_least=2)  # None: all of a node
    stages_per_device: int = number(at_least=1)
    cut: list[int] | None  # iterations of each stage; None: balanced by measured cost
