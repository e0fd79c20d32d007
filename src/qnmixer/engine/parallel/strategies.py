"""The Lightning strategy and the precision plugin that a config names."""

from datetime import timedelta
from inspect import signature
from typing import Any

from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

from qnmixer.engine.config import Config
from qnmixer.engine.config.sections import DDPConfig, FSDPConfig, PipelineConfig, SingleConfig
from qnmixer.engine.parallel.fsdp import ShardedStrategy
from qnmixer.engine.parallel.pipeline import PipelineStrategy
from qnmixer.errors import ConfigError

# Long, because ranks wait while one of them evaluates, plans or writes.
_TIMEOUT = timedelta(minutes=30)

# Else ddp sends the scan's matrices at every forward, 30 MB at the default size. Every process has built the same.
_SYNC = "forward_sync_buffers"  # called broadcast_buffers before torch 2.13
_NO_BUFFERS: dict[str, Any] = {
    _SYNC if _SYNC in signature(DistributedDataParallel).parameters else "broadcast_buffers": False
}


def build_strategy(config: Config) -> Strategy | str:
    """The strategy for Lightning's Trainer. `config` has the number of devices filled in.

    Raises ConfigError for a name without a strategy.
    """
    match config.strategy:
        case SingleConfig():
            return "auto"
        case DDPConfig(static_graph=static):
            # Gradients that are views of ddp's buckets save a copy of all gradients.
            return DDPStrategy(static_graph=static, gradient_as_bucket_view=True, timeout=_TIMEOUT, **_NO_BUFFERS)
        case FSDPConfig():
            n_processes = (config.trainer.devices or 1) * config.trainer.num_nodes
            return ShardedStrategy(n_processes, config.strategy, _TIMEOUT)
        case PipelineConfig():
            return PipelineStrategy(config, _TIMEOUT)
    raise ConfigError(f"strategy={config.strategy.name} is not known: choose single, ddp, fsdp or pipeline")


def build_precision(config: Config, accelerator: str) -> Precision:
    """Autocast, and a GradScaler for fp16, on a CPU too: there Lightning would silently use bf16 for 16-mixed."""
    precision = config.trainer.precision
    # A plugin, because the Trainer's own `precision="16-mixed"` is refused by Lightning's FSDP2 strategy.
    return Precision() if precision == "32" else MixedPrecision(precision, accelerator)
