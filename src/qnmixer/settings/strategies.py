"""The strategies: their keys, and the arithmetic of their devices."""

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge
from pydantic import Field

from qnmixer.settings.sections import Count, TrainerConfig
from qnmixer.settings.validation import Section


class StrategyConfig(Section):
    """How a run uses several devices.

    Attributes:
        planned_as: what the plan counts on a device: a `replica` of the whole network, one of its `shards`, or a part
            of a `pipeline`.
    """

    planned_as: ClassVar[str] = "replica"
    name: str

    def devices_per_replica(self, trainer: TrainerConfig) -> int:
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

    def devices_per_replica(self, trainer: TrainerConfig) -> int:
        """The devices of one pipeline."""
        return self.devices_per_pipeline or trainer.per_node or 1


Strategy = Annotated[SingleConfig | DDPConfig | FSDPConfig | PipelineConfig, Field(discriminator="name")]
