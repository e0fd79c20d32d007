"""Learned Primal-Dual (Adler & Öktem, IEEE Transactions on Medical Imaging 2018)."""

from typing import Annotated, NamedTuple

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from qnmixer.models.unrolled import Channels, Iterations, Projector, UnrolledNetwork


class PrimalDualState(NamedTuple):
    """Several images and several sinograms. The result is the first image."""

    primal: Tensor  # [B, n_primal, H, W]
    dual: Tensor  # [B, n_dual, V, D]


class LearnedPrimalDual(UnrolledNetwork[PrimalDualState]):
    """h ← h + Γ_t(h, A f⁽²⁾, y); f ← f + Λ_t(f, Aᵀ h⁽¹⁾); h from zero, f from FBP(y); x_t = f⁽¹⁾.

    f is n_primal images, h is n_dual sinograms, and an upper index picks one of them. Γ_t and Λ_t are three 3×3
    convolutions with PReLU, C channels between them, and weights of their own in each iteration. A, Aᵀ and y are all
    divided by ‖A‖. As in the authors' public code, weights have a Xavier start and biases start at 0. PReLU has one
    slope for each channel, which starts at 0. Ours: f starts as n_primal copies of FBP(y) in place of zeros, and the
    last convolution of each Λ_t at zero. So the network starts as FBP, as all others here do.

    Args:
        projector: A and Aᵀ of the scan.
        n_iterations: T (paper: 10).
        channels: C (paper: 32).
        n_primal: images passed between iterations (paper: 5).
        n_dual: sinograms passed between iterations (paper: 5).
    """

    title = "Learned PD"

    def __init__(
        self,
        projector: Projector,
        n_iterations: Iterations = 10,
        channels: Channels = 32,
        n_primal: Annotated[int, Ge(2), Le(1024)] = 5,
        n_dual: Channels = 5,
    ) -> None:
        super().__init__(n_iterations)
        self.projector = projector
        self.n_primal, self.n_dual = n_primal, n_dual
        self.dual_updates = nn.ModuleList(_update(n_dual + 2, channels, n_dual) for _ in range(n_iterations))
        self.primal_updates = nn.ModuleList(_update(n_primal + 1, channels, n_primal) for _ in range(n_iterations))
        for update in self.primal_updates:
            nn.init.zeros_(update[-1].weight)  # type: ignore[index]  # a Sequential

    def start(self, y: Tensor) -> PrimalDualState:
        """FBP(y) in every image, zeros in every sinogram."""
        x = self.projector.fbp(y)
        return PrimalDualState(x.repeat(1, self.n_primal, 1, 1), torch.zeros_like(y).repeat(1, self.n_dual, 1, 1))

    def step(self, t: int, y: Tensor, state: PrimalDualState) -> PrimalDualState:
        """The sinograms from the second image, then the images from the first of the new sinograms."""
        norm = self.projector.operator_norm()  # A/‖A‖ keeps images and sinograms of one size
        primal, dual = state
        projected = self.projector(primal[:, 1:2]) / norm
        dual = dual + self.dual_updates[t](torch.cat([dual, projected, y / norm], dim=1))
        back_projected = self.projector.adjoint(dual[:, :1]) / norm
        return PrimalDualState(primal + self.primal_updates[t](torch.cat([primal, back_projected], dim=1)), dual)

    def image(self, state: PrimalDualState) -> Tensor:
        """The first image."""
        return state.primal[:, :1]


def _update(n_in: int, channels: int, n_out: int) -> nn.Sequential:
    layers = nn.Sequential(
        nn.Conv2d(n_in, channels, 3, padding=1),
        nn.PReLU(channels, init=0.0),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.PReLU(channels, init=0.0),
        nn.Conv2d(channels, n_out, 3, padding=1),
    )
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # it has one
    return layers
