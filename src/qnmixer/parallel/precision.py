"""The precision plugin that a config names."""

from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from qnmixer.config import Config


def build_precision(config: Config, accelerator: str) -> Precision:
    """Autocast, and for fp16 a GradScaler; on a CPU too, where Lightning would silently take bf16 for 16-mixed."""
    precision = config.trainer.precision
    return Precision() if precision == "32" else MixedPrecision(precision, accelerator)  # type: ignore[arg-type]  # a choice
