"""Schema of `optimizer`."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from qnmixer.config.option import number
from qnmixer.config.strategy import FSDPConfig
from qnmixer.config.target import Target, schema
from qnmixer.errors import ConfigError

if TYPE_CHECKING:
    from qnmixer.config.run import Config


@schema()
@dataclass(kw_only=True)
class OptimizerConfig(Target):
    """A torch.optim.Optimizer, built with `(parameter groups, lr=…, **arguments)`.

    Attributes:
        lr: learning rate of the weights.
        weight_decay: of the weights; each parameter group has its own.
        step_size_lr_factor: the learning rate of the scalars λ_t is lr times this factor.
    """

    group: ClassVar[str] = "optimizer"

    lr: float = number(above=0)
    weight_decay: float = number(at_least=0)
    step_size_lr_factor: float = number(above=0)

    def keywords(self) -> dict[str, Any]:
        """All arguments, except those that each parameter group has."""
        ours = {f.name for f in fields(OptimizerConfig)}
        return {key: value for key, value in super().keywords().items() if key not in ours}


@schema("torch.optim.AdamW")
@dataclass(kw_only=True)
class AdamWConfig(OptimizerConfig):
    """torch.optim.AdamW."""

    betas: list[float]

    def keywords(self) -> dict[str, Any]:
        """All arguments, with betas as a tuple, as torch stores them in checkpoints."""
        return super().keywords() | {"betas": tuple(self.betas)}

    def check(self, run: "Config") -> None:
        """Check that betas are two numbers."""
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas={self.betas} is not two numbers from 0 to below 1: give [0.9,0.999]")


@schema("qnmixer.optimization.muon.Muon")
@dataclass(kw_only=True)
class MuonConfig(AdamWConfig):
    """Muon for the network's `hidden_weights`, AdamW for the others.

    Attributes:
        lr: learning rate of `hidden_weights`.
        adamw_lr: learning rate of the others. That of the scalars λ_t is adamw_lr times step_size_lr_factor.
        momentum: of Muon.
        betas: of AdamW.
    """

    adamw_lr: float = number(above=0)
    momentum: float = number(at_least=0, below=1)

    def keywords(self) -> dict[str, Any]:
        """All arguments, except adamw_lr, which is given to the parameter groups."""
        return {key: value for key, value in super().keywords().items() if key != "adamw_lr"}


@schema("torch.optim.SGD")
@dataclass(kw_only=True)
class SGDConfig(OptimizerConfig):
    """torch.optim.SGD."""

    momentum: float = number(at_least=0, below=1)


@schema("torch.optim.Adafactor")
@dataclass(kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """torch.optim.Adafactor."""

    def check(self, run: "Config") -> None:
        """Check that weights are not in shards: Adafactor needs full weights."""
        if isinstance(run.strategy, FSDPConfig):
            raise ConfigError(
                "optimizer=adafactor does not work with sharded weights (a limit of torch): choose optimizer=adamw or "
                "strategy=ddp"
            )
