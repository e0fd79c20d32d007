"""LEARN (Chen et al., IEEE Transactions on Medical Imaging 2018): gradient descent with a small CNN per iteration."""

import torch
from torch import Tensor, nn

from qnmixer.models.data_term import data_gradient, rectified
from qnmixer.models.unrolled import Channels, DataTerm, Iterations, Projector, UnrolledNetwork, check_choices


class LEARN(UnrolledNetwork[Tensor]):
    """x₀ = FBP(y); x_{t+1} = relu(x_t − λ_t A†(A x_t − y) − G_t(x_t)).

    G_t is three 5×5 convolutions, 1 → C → C → 1 channels, with ReLU between them and weights of its own in each
    iteration. As in the authors' public training code, λ_t and biases start at 0, and weights from N(0, 0.01²). A ReLU
    ends every iteration, because attenuation is not negative. The last one is `nonnegative`, so that a black image
    still gets a gradient.

    Args:
        projector: A, Aᵀ and FBP of the scan.
        n_iterations: T (authors' code: 50; in comparisons of the field 30 to 50).
        channels: C (paper: 48).
        data_term: A† = "adjoint", Aᵀ/‖A‖² (in the paper λ_t contains the scale), or "fbp", filtered back-projection
            (field). It is by the exact transpose here.
    """

    title = "LEARN"

    def __init__(
        self,
        projector: Projector,
        n_iterations: Iterations = 50,
        channels: Channels = 48,
        data_term: DataTerm = "adjoint",
    ) -> None:
        check_choices(LEARN, locals())
        super().__init__(n_iterations)
        self.projector = projector
        self.data_term = data_term
        self.regularizers = nn.ModuleList(small_cnn(channels) for _ in range(n_iterations))
        self.step_sizes = nn.ParameterList(torch.zeros(1) for _ in range(n_iterations))

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        """A step against the data gradient and against G_t, both taken at x_t."""
        descent = self.step_sizes[t] * data_gradient(self.projector, self.data_term, state, y)
        return rectified(state - descent - self.regularizers[t](state), is_last=t == self.n_iterations - 1)


def small_cnn(channels: int) -> nn.Sequential:
    """G_t: [B, 1, H, W] → [B, 1, H, W]."""
    layers = nn.Sequential(
        nn.Conv2d(1, channels, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, 1, 5, padding=2),
    )
    for name, parameter in layers.named_parameters():
        if name.endswith("weight"):
            nn.init.normal_(parameter, std=0.01)
        else:
            nn.init.zeros_(parameter)
    return layers
