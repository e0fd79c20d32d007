"""The Lightning strategy and the precision plugin that a config names."""

from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import Strategy

from qnmixer.errors import ConfigError
from qnmixer.parallel.ddp import DDPStrategy
from qnmixer.parallel.fsdp import FSDPStrategy
from qnmixer.parallel.pipeline import PipelineStrategy
from qnmixer.settings.sections import TrainerConfig
from qnmixer.settings.strategies import DDPConfig, FSDPConfig, PipelineConfig, SingleConfig, StrategyConfig


def build_strategy(config: StrategyConfig, trainer: TrainerConfig, batch_size: int) -> Strategy | str:
    """The strategy for Lightning's Trainer.

    Args:
        trainer: with the number of devices filled in.
        batch_size: samples of one device.

    Raises ConfigError for a name without a strategy.
    """
    match config:
        case SingleConfig():
            return "auto"
        case DDPConfig():
            return DDPStrategy(config.find_unused_parameters)
        case FSDPConfig():
            return FSDPStrategy(trainer.n_devices)
        case PipelineConfig():
            n_devices = config.devices_per_replica(trainer)
            accumulate = trainer.accumulate_grad_batches
            return PipelineStrategy(n_devices, batch_size, accumulate, config.schedule, config.microbatch_size)
    raise ConfigError(f"strategy={config.name} is not known: choose single, ddp, fsdp or pipeline")


def build_precision(trainer: TrainerConfig, accelerator: str) -> Precision:
    """Autocast, and a GradScaler for fp16, on a CPU too: there Lightning would silently use bf16 for 16-mixed."""
    precision = trainer.precision
    # A plugin, because the Trainer's own `precision="16-mixed"` is refused by Lightning's FSDP2 strategy.
    return Precision() if precision == "32" else MixedPrecision(precision, accelerator)
