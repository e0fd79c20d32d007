"""QN-Mixer (Ayad, Larue, Nguyen, CVPR 2024): an unrolled quasi-Newton method in a learned latent space."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from qnmixer.errors import ConfigError
from qnmixer.models.codec import OrthonormalCodec, StridedCodec
from qnmixer.models.data_term import DATA_TERMS, data_descent, safe_step_size
from qnmixer.models.incept_mixer import DetailConvolutions, InceptMixer
from qnmixer.models.latent_bfgs import History
from qnmixer.models.nonnegative import nonnegative
from qnmixer.models.unrolled import UnrolledNetwork, check_choice
from qnmixer.physics import FanBeamProjector


class QNState(NamedTuple):
    """The state before iteration t: x₀, and the vectors from which x_t and H_t are computed.

    x_t itself is not in it, because it would cost one more image an iteration.
    """

    x0: Tensor  # [B, 1, H, W]
    history: History | None = None  # bfgs: pairs and r_{t−1}; empty before the first iteration
    way: Tensor | None = None  # identity and momentum: s_0 + … + s_{t−1} [B, L]
    step: Tensor | None = None  # momentum: s_{t−1} [B, L]


class QNMixer(UnrolledNetwork[QNState]):
    """x₀ = FBP(y); r_t = E(λ_t A†(A x_t − y) + G(x_t)); s_t = −H_t r_t; x_{t+1} = x_t + D(s_t).

    H₀ = I, and H_t follows from (s_{t−1}, z_{t−1} = r_t − r_{t−1}) by the BFGS formula. The loop is exactly that of the
    paper's figure, but the curvature pair is formed at the start of iteration t, not at the end of t − 1. So each
    iteration calls G, E and D once, and every result is used.

    Four things are ours, and the defaults are those of `model=qn_mixer`, not of the figure:

    - G ends with convolutions at full resolution. Each iteration has its own.
    - Several data-fit steps λ_t A†(A x_t − y) are taken in a row, and the formula has their sum. They cost little
      compared with G.
    - H_t is replaced by (1 − τ_t) I + τ_t H_t with a learned τ_t. It begins at 0, so training begins at first order.
    - Negative values of the image are set to 0, because attenuation is never negative.

    Args:
        projector: A, Aᵀ and FBP of the scan; its geometry sets the image size.
        n_iterations: T (figure: 14).
        channels: C, features of the regulariser (field: 96).
        patch_size: P (figure: 4).
        n_mixer_layers, mlp_ratio: depth and hidden width of the mixer (ours: 2, 2).
        inception: False cuts the patches from the image itself (ablation).
        detail_channels: of the convolutions at full resolution; 0: no such convolutions (figure).
        codec: "orthonormal" (ours, trains best) or "strided" (the paper's words).
        codec_kernel: of the orthonormal codec; 3 sees neighbouring cells, 1 does not (figure).
        latent_factor, latent_channels: the latent is latent_channels × (H/factor) × (W/factor).
        shared_regularizer: one Incept-Mixer for all iterations (one J, as drawn) or one each (the author's other code).
        shared_step_size: one λ for all iterations (figure), or one each.
        data_term: A† = "fbp" (author, field), here by the exact transpose, or "adjoint", Aᵀ/‖A‖².
        data_steps: steps along the data term in an iteration, each with a λ of its own (figure: 1).
        nonnegative: the image is max(0, x_t) for t ≥ 1. The next iteration still starts from x_t. False: x_t (figure).
        hessian: "bfgs"; or, of first order, "identity" (H_t = I) or "momentum" (H_t = I, and s_t = −r_t + β_t s_{t−1}
            with a learned β_t per iteration, from 0; ours, to compare BFGS with).
        hessian_gradient: "full" differentiates through H; "detach" treats its pairs as constants.
        learned_trust: use τ_t, with hessian="bfgs". False: H_t itself (figure).
        regularizer: a function (image_size, channels) → module x → G(x), in place of the Incept-Mixer. It needs
            detail_channels=0.

    Raises:
        ConfigError: a word is not known, channels is not a multiple of 4, or `regularizer` is given with
            detail_channels above 0.
    """

    title = "QN-Mixer"

    def __init__(
        self,
        projector: FanBeamProjector,
        n_iterations: int = 14,
        channels: int = 96,
        patch_size: int = 4,
        n_mixer_layers: int = 2,
        mlp_ratio: float = 2.0,
        inception: bool = True,
        detail_channels: int = 16,
        codec: Literal["orthonormal", "strided"] = "orthonormal",
        codec_kernel: int = 3,
        latent_factor: int = 4,
        latent_channels: int = 16,
        shared_regularizer: bool = True,
        shared_step_size: bool = False,
        data_term: Literal["fbp", "adjoint"] = "fbp",
        data_steps: int = 4,
        nonnegative: bool = True,
        hessian: Literal["bfgs", "identity", "momentum"] = "bfgs",
        hessian_gradient: Literal["full", "detach"] = "full",
        learned_trust: bool = True,
        regularizer: Callable[[int, int], nn.Module] | None = None,
    ) -> None:
        super().__init__(n_iterations)
        check_choice("data_term", data_term, DATA_TERMS)
        check_choice("codec", codec, ("orthonormal", "strided"))
        check_choice("hessian", hessian, ("bfgs", "identity", "momentum"))
        check_choice("hessian_gradient", hessian_gradient, ("full", "detach"))
        if regularizer is not None and detail_channels:  # its image would be taken for their features
            raise ConfigError(f"your regularizer replaces the details: set detail_channels=0, not {detail_channels}")
        image_size = projector.geometry.image_size
        self.projector = projector
        self.data_term = data_term
        self.nonnegative = nonnegative
        self.hessian = hessian
        self.hessian_gradient = hessian_gradient
        self.latent_factor = latent_factor
        self.latent_channels = latent_channels
        self.codec = (
            OrthonormalCodec(latent_factor, latent_channels, codec_kernel)
            if codec == "orthonormal"
            else StridedCodec(latent_factor, latent_channels)
        )

        def incept_mixer(size: int, width: int) -> nn.Module:
            return InceptMixer(size, width, patch_size, n_mixer_layers, mlp_ratio, inception, features=detail_channels)

        make = regularizer or incept_mixer
        n_regularizers = 1 if shared_regularizer else n_iterations
        self.regularizers = nn.ModuleList(make(image_size, channels) for _ in range(n_regularizers))
        self.details = nn.ModuleList(
            DetailConvolutions(detail_channels) for _ in range(n_iterations if detail_channels else 0)
        )
        self.step_sizes = nn.ParameterList(
            torch.full((data_steps,), safe_step_size(projector, data_term))
            for _ in range(1 if shared_step_size else n_iterations)
        )

        def scalars(wanted: bool) -> nn.ParameterList:
            """One for each iteration except the first."""
            return nn.ParameterList(torch.zeros(1) for _ in range(n_iterations - 1 if wanted else 0))

        self.momenta = scalars(hessian == "momentum")
        self.trust = scalars(hessian == "bfgs" and learned_trust)

    def start(self, y: Tensor) -> QNState:
        """x₀ = FBP(y), and H₀ = I."""
        x0 = self.projector.fbp(y)
        if self.hessian != "bfgs":
            return QNState(x0)
        return QNState(x0, History.begin(x0.new_empty(self._latent_shape(x0)).flatten(1), self.n_iterations))

    def image(self, state: QNState) -> Tensor:
        """x_t, or max(0, x_t) after an iteration."""
        way = state.way if state.history is None or state.history.is_empty else state.history.way()[1]
        if way is None:
            return state.x0
        x = self._iterate(state.x0, way)
        return nonnegative(x) if self.nonnegative else x

    def _iterate(self, x0: Tensor, way: Tensor | None) -> Tensor:
        """x_t = x₀ + D(s_0 + … + s_{t−1}), as D is linear."""
        if way is None:
            return x0
        with torch.autocast(x0.device.type, enabled=False):  # half precision would round late, small steps away
            return x0 + self.codec.decode(way.view(self._latent_shape(x0)))

    def step(self, t: int, y: Tensor, state: QNState) -> QNState:
        """Iteration t: gradient, its code, the inverse Hessian, the step."""
        history = state.history
        if history is None:
            return self._first_order_step(t, y, state)
        way = None
        if not history.is_empty:
            history, way = history.way()
        r = self._code(t, self._iterate(state.x0, way), y)
        trust = self.trust[t - 1] if self.trust and t else None
        return QNState(state.x0, history.advance(r, trust, constant=self.hessian_gradient == "detach"))

    def _first_order_step(self, t: int, y: Tensor, state: QNState) -> QNState:
        """Iteration t with H = I."""
        s = -self._code(t, self._iterate(state.x0, state.way), y)
        if self.momenta and t:
            s = s + self.momenta[t - 1] * state.step
        way = s if state.way is None else state.way + s
        return QNState(state.x0, way=way, step=s if self.momenta else None)

    def _code(self, t: int, x: Tensor, y: Tensor) -> Tensor:
        """r_t = E(∇J_t(x_t)), [B, L], in the precision of the image also under autocast, because H needs it."""
        return self.codec.encode(self.objective_gradient(t, x, y)).flatten(1).to(x.dtype)

    def objective_gradient(self, t: int, x: Tensor, y: Tensor) -> Tensor:
        """∇J_t(x) = λ_t A†(A x − y) + G_t(x), [B, 1, H, W]; shared λ and G are the same for every t."""
        step_sizes = self.step_sizes[t % len(self.step_sizes)]
        regularization = self.regularizers[t % len(self.regularizers)](x)
        if self.details:
            regularization = self.details[t](x, regularization)
        return regularization + data_descent(self.projector, self.data_term, x, y, step_sizes)

    def diagnostics(self, state: QNState) -> dict[str, Tensor]:
        """Mean cos(z, s) and the share of pairs that the safeguard skipped. They show problems early."""
        if state.history is None or self.n_iterations == 1:
            return {}
        used, cosine = state.history.curvature()
        return {"cosine_zs": cosine.mean(), "skipped_pairs": (~used).to(cosine.dtype).mean()}

    def blocks(self) -> list[nn.Module]:
        """The regularisers."""
        return [*self.regularizers, *self.details]

    def shared(self) -> list[nn.Module]:
        """The codec, and the regulariser and step sizes if all iterations use the same."""
        of_all = [parts for parts in (self.regularizers, self.step_sizes) if len(parts) == 1]
        return [self.codec, *of_all]

    def _latent_shape(self, x: Tensor) -> tuple[int, int, int, int]:
        """Shape of the codes of images like x."""
        size = x.shape[-1] // self.latent_factor
        return len(x), self.latent_channels, size, size
