"""Filtered back-projection as a network without iterations, so that it is evaluated and compared like all others."""

from torch import Tensor

from qnmixer.models.unrolled import Projector, UnrolledNetwork


class FBP(UnrolledNetwork[Tensor]):
    """x₀ = FBP(y) only: T = 0, no weights. The projector has the filter."""

    title = "FBP"
    has_weights = False

    def __init__(self, projector: Projector) -> None:
        super().__init__(n_iterations=0)
        self.projector = projector

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        """Never called, because T = 0."""
        return state
