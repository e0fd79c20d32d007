"""Filtered back-projection as a network of no iterations, so that it is evaluated and compared like all others."""

from torch import Tensor

from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.physics import FanBeamProjector


class FBP(UnrolledNetwork[Tensor]):
    """x₀ = FBP(y) and nothing more: T = 0, no weights. The projector holds the filter."""

    title = "FBP"

    def __init__(self, projector: FanBeamProjector) -> None:
        super().__init__(n_iterations=0)
        self.projector = projector

    def start(self, y: Tensor) -> Tensor:
        """FBP(y)."""
        return self.projector.fbp(y)

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        """Never called, as T = 0."""
        return state
