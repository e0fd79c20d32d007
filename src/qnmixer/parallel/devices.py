"""The accelerator and the number of devices of a run, as this machine has them."""

from dataclasses import replace

import torch

from qnmixer.config import Config
from qnmixer.config.run import validate
from qnmixer.errors import ConfigError
from qnmixer.parallel.compilation import check_compiler


def resolve_devices(config: Config) -> Config:
    """Fill in the accelerator and the number of devices. Raises ConfigError for what this machine does not have."""
    trainer = config.trainer
    device = choose_device(trainer.accelerator, "trainer.accelerator")
    on_cuda = device.type == "cuda"
    if config.compile:
        check_compiler()
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
    check_precision(device, trainer.precision, "trainer.precision")
    resolved = replace(config, trainer=replace(trainer, devices=devices, accelerator="cuda" if on_cuda else "cpu"))
    validate(resolved)
    return resolved


def choose_device(accelerator: str, key: str = "accelerator") -> torch.device:
    """The device that an accelerator means here. Raises ConfigError, naming the key, for a GPU that is not there."""
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(f"{key}={accelerator}, but torch sees no CUDA device here: use {key}=cpu")
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def check_precision(device: torch.device, precision: str, key: str = "precision") -> None:
    """Raise ConfigError, which names the key, for a precision that a device does not have."""
    if precision == "bf16-mixed" and device.type == "cuda" and not has_bf16():
        raise ConfigError(f"{key}={precision}, but {torch.cuda.get_device_name()} has no bf16: use {key}=16-mixed")


def has_bf16() -> bool:
    """Whether the GPU has the arithmetic of bf16; torch would emulate it otherwise."""
    return torch.cuda.is_bf16_supported(including_emulation=False)
