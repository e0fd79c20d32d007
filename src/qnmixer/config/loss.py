"""Schema of `loss`: the function that training minimises."""

from dataclasses import dataclass
from typing import ClassVar

from qnmixer.config.option import number
from qnmixer.config.target import Target, schema


@schema()
@dataclass(kw_only=True)
class LossConfig(Target):
    """A function `(image, truth, **arguments)` → [B], or a torch module built with `(**arguments)`."""

    group: ClassVar[str] = "loss"


@schema("qnmixer.optimization.losses.ssim_mix")
@dataclass(kw_only=True)
class SSIMMixConfig(LossConfig):
    """(1 − weight) · L1 + weight · (1 − SSIM)."""

    ssim_weight: float = number(at_least=0, at_most=1)
