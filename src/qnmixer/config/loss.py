"""What `loss` may say: what training minimises."""

from dataclasses import dataclass

from qnmixer.config.custom import Custom
from qnmixer.config.option import number, one_of


@dataclass(kw_only=True)
class LossConfig:
    """What training minimises between x_T and the slice."""

    name: str = one_of("mse", "l1", "ssim_mix", "custom")


@dataclass(kw_only=True)
class SSIMMixConfig(LossConfig):
    """(1 − weight) · L1 + weight · (1 − SSIM)."""

    ssim_weight: float = number(at_least=0, at_most=1)


@dataclass(kw_only=True)
class CustomLossConfig(LossConfig, Custom):
    """A user's own function `(image, truth, **arguments)` → [B], or torch module built with `(**arguments)`."""
