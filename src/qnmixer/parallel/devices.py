"""The accelerator and the number of devices of a run, as this machine has them."""

from dataclasses import replace

import torch

from qnmixer.config import Config, validate
from qnmixer.errors import ConfigError
from qnmixer.parallel.compilation import check_compiler


def resolve_devices(config: Config) -> Config:
    """Fill in the accelerator and the number of devices. Raises ConfigError for what this machine does not have."""
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
    resolved = replace(config, trainer=replace(trainer, devices=devices, accelerator="cuda" if on_cuda else "cpu"))
    validate(resolved)
    return resolved
