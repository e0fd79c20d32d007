"""What `strategy` may say: how a run is spread over devices."""

from dataclasses import dataclass

from qnmixer.config.option import number, one_of


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
