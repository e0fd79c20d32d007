"""The Lightning strategy and the precision plugin that a config names, and the checks that need to see the hardware."""

from dataclasses import replace
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

from qnmixer.config import Config, DDPConfig, FSDPConfig, PipelineConfig, validate
from qnmixer.errors import ConfigError
from qnmixer.parallel.compilation import check_compiler
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
            static_graph=options.static_graph,
            gradient_as_bucket_view=True,
            timeout=_TIMEOUT,
            **_NO_BUFFERS,
        )
    if isinstance(options, FSDPConfig):
        return ShardedStrategy((config.trainer.devices or 1) * config.trainer.num_nodes, options, _TIMEOUT)
    if isinstance(options, PipelineConfig):
        return PipelineStrategy(config, _TIMEOUT)
    return "auto"


def build_precision(config: Config, accelerator: str) -> Precision:
    """Autocast, and for fp16 a GradScaler; on a CPU too, where Lightning would silently take bf16 for 16-mixed."""
    precision = config.trainer.precision
    return Precision() if precision == "32" else MixedPrecision(precision, accelerator)  # type: ignore[arg-type]  # a choice


def on_this_machine(config: Config) -> Config:
    """The config with its accelerator and devices counted. Raises ConfigError for what this machine does not have."""
    trainer = config.trainer
    if trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.accelerator={trainer.accelerator}, but torch sees no CUDA device here: use cpu, or auto"
        )
    if config.compile:
        check_compiler()
    on_cuda = trainer.accelerator != "cpu" and torch.cuda.is_available()
    devices = trainer.devices
    if devices is None:
        if config.strategy.name != "single" and not on_cuda:
            raise ConfigError(
                f"strategy={config.strategy.name} on a CPU: give the number of processes, as in trainer.devices=4"
            )
        devices = 1 if config.strategy.name == "single" else torch.cuda.device_count()
    if on_cuda and devices > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.devices={devices}, but torch sees {torch.cuda.device_count()} here: lower it, or try "
            "trainer.accelerator=cpu"
        )
    if on_cuda and trainer.precision == "bf16-mixed" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"trainer.precision=bf16-mixed, but {torch.cuda.get_device_name()} has no bf16: use "
            "trainer.precision=16-mixed"
        )
    counted = replace(config, trainer=replace(trainer, devices=devices, accelerator="cuda" if on_cuda else "cpu"))
    validate(counted)
    return counted
