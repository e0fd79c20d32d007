"""A plain torch module as a network: a U-Net on FBP, or a map from sinograms to images."""

from typing import Any

from torch import Tensor, nn

from qnmixer.errors import ConfigError
from qnmixer.models.unrolled import Projector, UnrolledNetwork


class PlainNetwork(UnrolledNetwork[Tensor]):
    """x₀ = FBP(y), x₁ = module(x₀) or module(y): one iteration.

    Args:
        projector: FBP of the scan.
        module: [B, 1, S, S] → [B, 1, S, S], or [B, 1, V, D] → [B, 1, S, S].
        of_sinogram: whether it gets y. Else it gets FBP(y).

    The forward pass raises ConfigError if the module gives something else than images of this shape.
    """

    def __init__(self, projector: Projector, module: nn.Module, of_sinogram: bool) -> None:
        super().__init__(n_iterations=1)
        self.projector, self.module, self.of_sinogram = projector, module, of_sinogram
        self.title = type(module).__name__

    def __getattr__(self, name: str) -> Any:
        """What only the module has, so that `self.network` of a training step is as the user's own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # it is not set yet
                raise
            return getattr(self.module, name)

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        """The module's image."""
        x: Tensor = self.module(y if self.of_sinogram else state)
        if not isinstance(x, Tensor) or x.shape != state.shape:
            output = [*x.shape] if isinstance(x, Tensor) else type(x).__name__
            raise ConfigError(f"{self.title} gives {output}, not images {[*state.shape]}")
        return x

    def blocks(self) -> list[nn.Module]:
        """The module."""
        return [self.module]
