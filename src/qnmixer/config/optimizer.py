"""What `optimizer` may say."""

from dataclasses import dataclass

from qnmixer.config.custom import Custom
from qnmixer.config.option import number


@dataclass(kw_only=True)
class OptimizerConfig:
    """What all optimizers take; the scalars λ_t learn at lr · step_size_lr_factor."""

    name: str
    lr: float = number(above=0)
    weight_decay: float = number(at_least=0)
    step_size_lr_factor: float = number(above=0)


@dataclass(kw_only=True)
class AdamWConfig(OptimizerConfig):
    """torch.optim.AdamW."""

    betas: list[float]


@dataclass(kw_only=True)
class SGDConfig(OptimizerConfig):
    """torch.optim.SGD."""

    momentum: float = number(at_least=0, below=1)


@dataclass(kw_only=True)
class CustomOptimizerConfig(OptimizerConfig, Custom):
    """A user's own torch.optim.Optimizer, built with `(parameter groups, lr=…, **arguments)`."""
