"""QN-Mixer (Ayad, Larue, Nguyen, CVPR 2024): an unrolled quasi-Newton method in a learned latent space."""

from collections.abc import Collection
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from qnmixer.errors import ConfigError
from qnmixer.models.codec import CODECS
from qnmixer.models.incept_mixer import InceptionPatches, InceptMixer
from qnmixer.models.latent_bfgs import CurvaturePair, apply_inverse_hessian, curvature_pair
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.physics import FanBeamProjector


class QNState(NamedTuple):
    """What iteration t gets from t − 1: x_t, the last latent gradient and step, and the pairs that make H."""

    x: Tensor  # [B, 1, H, W]
    r: Tensor | None  # r_{t−1}, [B, L]; None before the first iteration
    s: Tensor | None  # s_{t−1}, [B, L]
    pairs: tuple[CurvaturePair, ...]  # at most t − 1 of them


class QNMixer(UnrolledNetwork[QNState]):
    """x₀ = FBP(y); r_t = E(λ_t A†(A x_t − y) + G(x_t)); s_t = −H_t r_t; x_{t+1} = x_t + D(s_t).

    H₀ = I, and H_t follows from (s_{t−1}, z_{t−1} = r_t − r_{t−1}) by the BFGS formula. The loop is the paper's
    (figure, exact) with the curvature pair formed at the start of iteration t instead of the end of t − 1, so
    that each iteration is one call of G, E and D and nothing is computed that goes unused.

    Args:
        projector: A, Aᵀ and FBP of the scan; its geometry sets the image size.
        n_iterations: T (figure: 14).
        channels: C, features of the regulariser (field: 96).
        patch_size: P (figure: 4).
        n_mixer_layers, mlp_ratio: depth and hidden width of the mixer (ours: 2, 2).
        codec: "orthonormal" (ours, trains best) or "strided" (the paper's words).
        latent_factor, latent_channels: the latent is latent_channels × (H/factor) × (W/factor).
        shared_regularizer: one G for all iterations (one J, as drawn) or one each (the author's other code).
        shared_step_size: one λ for all iterations, or one each.
        data_term: A† = "fbp" (author, field) or "adjoint", Aᵀ/‖A‖².
        hessian: "bfgs", or "identity" for the first-order ablation (H_t = I).
        hessian_gradient: "full" differentiates through H; "detach" treats its pairs as constants.

    Raises:
        ConfigError: the image does not divide into patches or latent cells, or an option is none of the above.
    """

    def __init__(
        self,
        projector: FanBeamProjector,
        n_iterations: int = 14,
        channels: int = 96,
        patch_size: int = 4,
        n_mixer_layers: int = 2,
        mlp_ratio: float = 2.0,
        codec: Literal["orthonormal", "strided"] = "orthonormal",
        latent_factor: int = 4,
        latent_channels: int = 16,
        shared_regularizer: bool = True,
        shared_step_size: bool = True,
        data_term: Literal["fbp", "adjoint"] = "fbp",
        hessian: Literal["bfgs", "identity"] = "bfgs",
        hessian_gradient: Literal["full", "detach"] = "full",
    ) -> None:
        super().__init__(n_iterations)
        _check_choice("codec", codec, CODECS)
        _check_choice("data_term", data_term, ("fbp", "adjoint"))
        _check_choice("hessian", hessian, ("bfgs", "identity"))
        _check_choice("hessian_gradient", hessian_gradient, ("full", "detach"))
        image_size = projector.geometry.image_size
        if image_size % latent_factor:
            raise ConfigError(f"an image of {image_size} pixels cannot be cut into latent cells of {latent_factor}")
        self.projector = projector
        self.data_term = data_term
        self.hessian = hessian
        self.hessian_gradient = hessian_gradient
        self.codec = CODECS[codec](latent_factor, latent_channels)
        self.regularizers = nn.ModuleList(
            InceptMixer(image_size, channels, patch_size, n_mixer_layers, mlp_ratio)
            for _ in range(1 if shared_regularizer else n_iterations)
        )
        self.step_sizes = nn.ParameterList(
            torch.full((1,), self._safe_step_size()) for _ in range(1 if shared_step_size else n_iterations)
        )

    def start(self, y: Tensor) -> QNState:
        """x₀ = FBP(y), and H₀ = I."""
        return QNState(self.projector.fbp(y), None, None, ())

    def step(self, t: int, y: Tensor, state: QNState) -> QNState:
        """Iteration t: gradient, its code, the inverse Hessian, the step."""
        gradient = self.objective_gradient(t, state.x, y)
        code = self.codec.encode(gradient)
        r = code.flatten(1).to(state.x.dtype)  # H works in the precision of the image, whatever the autocast
        pairs = state.pairs if state.r is None else self._with_new_pair(state, r)
        s = -apply_inverse_hessian(pairs, r)
        x = state.x + self.codec.decode(s.view(code.shape))
        return QNState(x, r, s, pairs)

    def objective_gradient(self, t: int, x: Tensor, y: Tensor) -> Tensor:
        """∇J(x) = λ_t A†(A x − y) + G_t(x), [B, 1, H, W]; shared λ and G are the same for every t."""
        step_size = self.step_sizes[t % len(self.step_sizes)]
        regularizer = self.regularizers[t % len(self.regularizers)]
        return step_size * self._data_gradient(x, y) + regularizer(x)

    def recomputed_parts(self) -> list[nn.Module]:
        """The branches of the inceptions: the only features at full resolution."""
        return [b for module in self.modules() if isinstance(module, InceptionPatches) for b in module.branches]

    def _with_new_pair(self, state: QNState, r: Tensor) -> tuple[CurvaturePair, ...]:
        if self.hessian == "identity":
            return ()
        assert state.r is not None
        assert state.s is not None
        s, z = state.s, r - state.r
        if self.hessian_gradient == "detach":
            s, z = s.detach(), z.detach()
        return (*state.pairs, curvature_pair(s, z))

    def _data_gradient(self, x: Tensor, y: Tensor) -> Tensor:
        residual = self.projector(x) - y
        if self.data_term == "fbp":
            return self.projector.fbp(residual)
        return self.projector.adjoint(residual) / self.projector.operator_norm() ** 2

    def _safe_step_size(self) -> float:
        """λ at the start: 1 over the spectral radius of A†A, half the largest step at which descent converges."""
        return 1.0 / self.projector.fbp_spectral_radius() if self.data_term == "fbp" else 1.0


def _check_choice(key: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ConfigError(f"model.{key}={value} is not known: choose {' or '.join(choices)}")
