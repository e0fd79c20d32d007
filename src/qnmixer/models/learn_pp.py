"""LEARN++ (Zhang et al., IEEE Transactions on Radiation and Plasma Medical Sciences 2022): LEARN in two domains."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from qnmixer.models.data_term import back_projection, rectified
from qnmixer.models.learn import small_cnn
from qnmixer.models.unrolled import Channels, DataTerm, Iterations, Projector, UnrolledNetwork, check_choices


class TwoDomains(NamedTuple):
    """An image, and the sinogram that it is fitted to."""

    x: Tensor  # [B, 1, H, W]
    z: Tensor  # [B, 1, V, D], divided by ‖A‖


class LEARNPlusPlus(UnrolledNetwork[TwoDomains]):
    """Two subnetworks side by side, each of which sees the state of the other:

    x_{t+1} = relu(x_t − λ_t A†(A x_t − z_t) − G_t(x_t)) and
    z_{t+1} = z_t − μ_t (z_t − A x_t) − ν_t (z_t − y) − H_t(z_t), from x₀ = FBP(y) and z₀ = y.

    From the paper's abstract (arXiv 2012.06983): LEARN, with a second subnetwork that restores the sinogram in
    parallel, and the two interact. Inferred, as its formulas were not at hand: gradient descent on ½‖A x − z‖² +
    ½‖z − y‖² and two learned terms, as the field writes models of two domains; G_t and H_t are both the CNN of LEARN,
    with its start; T; the start z₀ = y. The last iteration makes no z, which nothing would read.

    Smaller than the paper: there z has the views of a full scan, and H_t also fills in those that were not measured.
    Here A has the measured views only, and so has z. Without noise, and with one matrix for simulation and
    reconstruction, H_t then has little to restore.

    Args:
        projector: A, Aᵀ and FBP of the scan.
        n_iterations: T (inferred: half as many as of LEARN in comparisons, with twice as many CNNs).
        channels: C of both CNNs (LEARN: 48).
        data_term: A†, as in LEARN: "adjoint", Aᵀ/‖A‖², or "fbp" (field).
    """

    title = "LEARN++"

    def __init__(
        self,
        projector: Projector,
        n_iterations: Iterations = 15,
        channels: Channels = 48,
        data_term: DataTerm = "adjoint",
    ) -> None:
        check_choices(LEARNPlusPlus, locals())
        super().__init__(n_iterations)
        self.projector = projector
        self.data_term = data_term
        self.of_images = nn.ModuleList(small_cnn(channels) for _ in range(n_iterations))
        self.of_sinograms = nn.ModuleList(small_cnn(channels) for _ in range(n_iterations - 1))
        self.step_sizes = nn.ParameterList(torch.zeros(1) for _ in range(n_iterations))
        self.sinogram_steps = nn.ParameterList(torch.zeros(2) for _ in range(n_iterations - 1))  # μ_t, ν_t

    def start(self, y: Tensor) -> TwoDomains:
        """FBP(y) and y."""
        return TwoDomains(self.projector.fbp(y), y / self.projector.operator_norm())

    def step(self, t: int, y: Tensor, state: TwoDomains) -> TwoDomains:
        """A step of the image and one of the sinogram, both from the state before."""
        x, z = state
        norm = self.projector.operator_norm()  # A/‖A‖ keeps images and sinograms of one size
        residual = self.projector(x) - norm * z
        descent = self.step_sizes[t] * back_projection(self.projector, self.data_term, residual)
        is_last = t == self.n_iterations - 1
        image = rectified(x - descent - self.of_images[t](x), is_last=is_last)
        if is_last:
            return TwoDomains(image, z)
        mu, nu = self.sinogram_steps[t]
        return TwoDomains(image, z + mu * residual / norm - nu * (z - y / norm) - self.of_sinograms[t](z))
