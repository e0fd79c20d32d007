"""The Lightning strategy that a config names."""

from datetime import timedelta
from inspect import signature
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

from qnmixer.config import Config, DDPConfig, FSDPConfig, PipelineConfig
from qnmixer.parallel.fsdp import ShardedStrategy
from qnmixer.parallel.pipeline import PipelineStrategy

# A rank waits for the others while one of them evaluates, plans or writes.
_TIMEOUT = timedelta(minutes=30)

# ddp would send the operator at every forward, 30 MB at the default size: every process has built the same.
_SYNC = "forward_sync_buffers"  # called broadcast_buffers before torch 2.13
_NO_BUFFERS: dict[str, Any] = {
    _SYNC if _SYNC in signature(DistributedDataParallel).parameters else "broadcast_buffers": False
}


def build_strategy(config: Config) -> Strategy | str:
    """What `strategy` names, for Lightning's Trainer; `config` says how many devices there are."""
    options = config.strategy
    if isinstance(options, DDPConfig):
        return DDPStrategy(
            static_graph=options.static_graph, gradient_as_bucket_view=True, timeout=_TIMEOUT, **_NO_BUFFERS
        )
    if isinstance(options, FSDPConfig):
        return ShardedStrategy((config.trainer.devices or 1) * config.trainer.num_nodes, options, _TIMEOUT)
    if isinstance(options, PipelineConfig):
        return PipelineStrategy(config, _TIMEOUT)
    return "auto"
