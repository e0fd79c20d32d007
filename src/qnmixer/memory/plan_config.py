"""The config of `qnmixer.plan`, and the devices that it knows by name."""

import math
from typing import Annotated, ClassVar, Literal, Self

from omegaconf import DictConfig, OmegaConf
from pydantic import BeforeValidator

from qnmixer.errors import ConfigError, suggest
from qnmixer.settings.run import WithRunConfig

DEVICES = {
    "V100-16": 16160.0,
    "V100-32": 32510.0,
    "A100-40": 40536.0,
    "A100-80": 81251.0,
    "H100": 81559.0,
    "RTX4090": 24564.0,
    "RTX5090": 32607.0,
}
"""MiB, as the driver reports it."""


class PlanConfig(WithRunConfig):
    """The checked config of one plan, which reads no slices."""

    command: ClassVar[str] = "plan"

    format: Literal["table", "json", "levers"]
    device: Annotated[str, BeforeValidator(str)] | None  # None: all known devices

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """Folders of slices may be missing. Raises ConfigError."""
        for key in OmegaConf.missing_keys(cfg):
            if key.startswith("data.") and key.endswith(".root"):
                OmegaConf.update(cfg, key, ".")
        config = super().parse(cfg)
        if config.device is not None:
            device_memory(config.device)
        return config


def device_memory(name: str) -> float:
    """Memory in MiB of a named device, or of "24" or "24GB". Raises ConfigError for other texts."""
    if name in DEVICES:
        return DEVICES[name]
    try:
        size = float(name.lower().removesuffix("gb"))
    except ValueError:
        size = 0.0
    if not (0 < size < math.inf):
        raise ConfigError(f"device={name} is not known: {suggest(name, DEVICES)}, or give a size in GB (device=24)")
    return 1024 * size
