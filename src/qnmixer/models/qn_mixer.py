"""QN-Mixer (Ayad, Larue, Nguyen, CVPR 2024): an unrolled quasi-Newton method in a learned latent space."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from annotated_types import Ge, Gt, Le, MultipleOf
from torch import Tensor, nn

from qnmixer.errors import ConfigError, PluginError
from qnmixer.models.bfgs import Pair, apply_inverse_hessian, make_pair, split_scale
from qnmixer.models.codec import OrthonormalCodec, StridedCodec
from qnmixer.models.data_term import data_gradient, nonnegative, safe_step_size
from qnmixer.models.incept_mixer import DetailConvolutions, InceptMixer, MixerLayer
from qnmixer.models.unrolled import (
    Channels,
    DataTerm,
    Iterations,
    Projector,
    UnrolledNetwork,
    check_choices,
    with_random_turns,
)


class QNState(NamedTuple):
    """Before iteration t: x_t, the pairs of H_{t−1}, and s_{t−1} and r_{t−1}, from which the next pair comes."""

    x: Tensor  # [B, 1, H, W]
    pairs: tuple[Pair, ...] = ()
    s: Tensor | None = None  # s_{t−1} [B, L] divided by its scale; None before the first iteration
    scale: Tensor | None = None  # largest entry of s_{t−1} [B, 1]
    r: Tensor | None = None  # with hessian="bfgs" r_{t−1} [B, L], with "gradients" r_0 to r_{t−1} [B, t, L]


class QNMixer(UnrolledNetwork[QNState]):
    """x₀ = FBP(y); r_t = E(λ_t A†(A x_t − y) + G(x_t)); s_t = −H_t r_t; x_{t+1} = x_t + D(s_t).

    H₀ = I, and H_t follows from (s_{t−1}, z_{t−1} = r_t − r_{t−1}) by the BFGS formula. The loop is exactly that of the
    paper's figure, but the pair is made at the start of iteration t, not at the end of t − 1. So each iteration calls
    G, E and D once, and every result is used.

    The defaults are those of `model=qn_mixer`. What is not as in the figure is said at the argument.

    Args:
        projector: A, Aᵀ and FBP of the scan; its geometry sets the image size.
        n_iterations: T (figure: 14).
        channels: C, features of the regulariser (field: 96).
        patch_size: P, side of the patches in pixels (figure: 4).
        n_mixer_layers: layers of the mixer (ours).
        mlp_ratio: hidden features of the mixer's MLPs, as a multiple of those outside (ours).
        inception: False cuts the patches from the image itself (ablation).
        detail_channels: of the convolutions at full resolution that end G, with weights of their own in each iteration
            (ours); 0: no such convolutions (figure).
        detail_data_step: these convolutions also see Σ λ A†(A u − y), the sum of the data-term steps from x_t (ours).
        codec: "orthonormal" (ours, trains best) or "strided" (the paper's words).
        codec_kernel: of the orthonormal codec; 3 sees neighbouring cells, 1 does not (figure).
        latent_factor: the latent has latent_channels × (H/factor) × (W/factor) numbers.
        latent_channels: factor² of them are as many numbers as the image.
        shared_regularizer: one Incept-Mixer for all iterations (one J, as drawn), or one each, with T times the weights
            (the author's other code).
        shared_step_size: one λ for all iterations (figure), or one each.
        data_term: A† = "fbp", Aᵀ after the ramp filter (author, field; faster), or "adjoint", Aᵀ/‖A‖².
        data_steps: steps along the data term in an iteration, each with a λ of its own (figure: 1). The formula has
            their sum. They cost little compared with G.
        nonnegative: the image is max(0, x_t) for t ≥ 1, as attenuation is never negative (ours). The next iteration
            still starts from x_t. False: x_t (figure).
        hessian: "bfgs"; or, of first order and to compare BFGS with, "identity" (H_t = I), "momentum" (s_t = −r_t +
            β_t s_{t−1}, ours) or "gradients" (s_t = −r_t − Σ_{k<t} α_{tk} r_k). The last is the memory of DeMUN (arXiv
            2501.04608). β and α are learned, from 0.
        hessian_gradient: "full" differentiates through H; "detach" treats its pairs as constants.
        learned_trust: with hessian="bfgs", (1 − τ_t) I + τ_t H_t in place of H_t, with τ_t learned from 0, so that
            training begins at first order (ours); False: H_t itself (figure).
        symmetric: in training, G_t sees x_t under a random turn or flip, new in each iteration, and its image is turned
            back. See `with_random_turns`.
        regularizer: a module x → G(x) in place of the Incept-Mixer, copied for each iteration that has its own, or a
            function (image_size, channels) → such a module. It needs detail_channels=0.

    Raises:
        ConfigError: a word is not known, or a rule of `rules` is broken.
    """

    title = "QN-Mixer"

    @classmethod
    def rules(cls, arguments: Mapping[str, Any]) -> None:
        """Check what its codec can have, and that a regulariser of one's own comes without the details."""
        codec, factor, channels = (arguments[key] for key in ("codec", "latent_factor", "latent_channels"))
        if codec == "orthonormal" and channels > factor**2:
            raise ConfigError(
                f"latent_channels={channels} is more than latent_factor² = {factor**2}, the most that an orthonormal "
                "codec can have: lower it, or raise latent_factor"
            )
        if codec == "strided" and (factor < 2 or factor & (factor - 1)):
            raise ConfigError(f"latent_factor={factor} does not fit codec=strided: choose 2, 4, 8 or 16")
        if arguments["regularizer"] is not None and arguments["detail_channels"]:
            # Its image would be taken for their features.
            raise ConfigError("a regularizer replaces the detail convolutions too: set detail_channels=0")

    @classmethod
    def divisors(cls, arguments: Mapping[str, Any]) -> dict[str, int]:
        """The patch size and the latent cell size."""
        return {key: arguments[key] for key in ("patch_size", "latent_factor")}

    def __init__(
        self,
        projector: Projector,
        n_iterations: Iterations = 14,
        channels: Annotated[Channels, MultipleOf(4)] = 96,
        patch_size: Annotated[int, Ge(1)] = 4,
        n_mixer_layers: Annotated[int, Ge(1), Le(1000)] = 2,
        mlp_ratio: Annotated[float, Gt(0), Le(100)] = 2.0,
        inception: bool = True,
        detail_channels: Annotated[int, Ge(0), Le(1024)] = 16,
        detail_data_step: bool = True,
        codec: Literal["orthonormal", "strided"] = "orthonormal",
        codec_kernel: Literal[1, 3] = 3,
        latent_factor: Annotated[int, Ge(1)] = 4,
        latent_channels: Annotated[int, Ge(1), Le(4096)] = 16,
        shared_regularizer: bool = True,
        shared_step_size: bool = False,
        data_term: DataTerm = "fbp",
        data_steps: Annotated[int, Ge(1), Le(1000)] = 4,
        nonnegative: bool = True,
        hessian: Literal["bfgs", "identity", "momentum", "gradients"] = "bfgs",
        hessian_gradient: Literal["full", "detach"] = "full",
        learned_trust: bool = True,
        symmetric: bool = False,
        regularizer: Callable[[int, int], nn.Module] | nn.Module | None = None,
    ) -> None:
        check_choices(QNMixer, locals())
        self.rules(locals())
        super().__init__(n_iterations)
        image_size = projector.geometry.image_size  # the mixer has weights for each row and column of patches
        self.projector = projector
        self.data_term = data_term
        self.nonnegative = nonnegative
        self.hessian = hessian
        self.hessian_gradient = hessian_gradient
        self.symmetric = symmetric
        self.codec = (
            OrthonormalCodec(latent_factor, latent_channels, codec_kernel)
            if codec == "orthonormal"
            else StridedCodec(latent_factor, latent_channels)
        )

        def make_regularizer() -> nn.Module:
            if regularizer is None:
                mixer = (patch_size, n_mixer_layers, mlp_ratio, inception)
                return InceptMixer(image_size, channels, *mixer, features=detail_channels)
            if isinstance(regularizer, nn.Module):
                return copy.deepcopy(regularizer)
            try:
                inspect.signature(regularizer).bind(image_size, channels)
            except TypeError as error:
                raise PluginError(
                    f"the regularizer does not fit ({error}): its class or function is called with two arguments, "
                    "(image_size, channels), and gives a module x → G(x)"
                ) from error
            return regularizer(image_size, channels)

        n_regularizers = 1 if shared_regularizer else n_iterations
        self.regularizers = nn.ModuleList(make_regularizer() for _ in range(n_regularizers))
        self.detail_data_step = detail_data_step
        n_inputs = 2 if detail_data_step else 1
        self.details = nn.ModuleList(
            DetailConvolutions(detail_channels, n_inputs) for _ in range(n_iterations if detail_channels else 0)
        )
        self.step_sizes = nn.ParameterList(
            torch.full((data_steps,), safe_step_size(projector, data_term))
            for _ in range(1 if shared_step_size else n_iterations)
        )

        # Not for the first iteration: it has no pair, and DDP fails on a parameter without a gradient.
        later = range(1, n_iterations)
        self.momenta = nn.ParameterList(torch.zeros(1) for _ in later if hessian == "momentum")
        self.mixes = nn.ParameterList(torch.zeros(t) for t in later if hessian == "gradients")
        self.trust = nn.ParameterList(torch.zeros(1) for _ in later if hessian == "bfgs" and learned_trust)

    def start(self, y: Tensor) -> QNState:
        """x₀ = FBP(y), and no pairs: H₀ = I."""
        return QNState(self.projector.fbp(y))

    def image(self, state: QNState) -> Tensor:
        """x_t, or max(0, x_t) after an iteration: x₀ is FBP as it is, as with all other networks."""
        return nonnegative(state.x) if self.nonnegative and state.s is not None else state.x

    def step(self, t: int, y: Tensor, state: QNState) -> QNState:
        """r_t = E(∇J_t(x_t)), s_t = −H_t r_t, x_{t+1} = x_t + D(s_t)."""
        code = self.codec.encode(self.objective_gradient(t, state.x, y))  # r_t, of a shape that D reads
        # H needs full precision, and half precision would round late, small steps of x away.
        with torch.autocast(code.device.type, enabled=False):
            r = code.flatten(1).to(state.x.dtype)
            s, pairs = self.direction(t, r, state)
            x = state.x + self.codec.decode(s.view(code.shape))
            return QNState(x, pairs, *split_scale(s), self._kept_gradients(r, state.r))

    def _kept_gradients(self, r: Tensor, earlier: Tensor | None) -> Tensor | None:
        """What later iterations need of r_t [B, L] and of what was kept before it."""
        if self.hessian == "gradients":
            return r[:, None] if earlier is None else torch.cat([earlier, r[:, None]], 1)
        return r if self.hessian == "bfgs" else None

    def direction(self, t: int, r: Tensor, state: QNState) -> tuple[Tensor, tuple[Pair, ...]]:
        """s_t = −H_t r_t [B, L], and the pairs of H_t. Another method than BFGS goes here, in a subclass."""
        s, scale = state.s, state.scale  # of the step before, which is scale · s
        if s is None or scale is None or self.hessian == "identity":
            return -r, ()  # H₀ = I
        if self.hessian == "momentum":
            return -r + self.momenta[t - 1] * scale * s, ()
        assert state.r is not None
        if self.hessian == "gradients":
            return -r - torch.einsum("t, btl -> bl", self.mixes[t - 1], state.r), ()
        z = (r - state.r) / scale  # as s is: H depends on their ratio only
        if self.hessian_gradient == "detach":
            s, z = s.detach(), z.detach()
        pairs = *state.pairs, make_pair(s, z)
        Hr = apply_inverse_hessian(r, pairs)
        if self.trust:
            Hr = r + self.trust[t - 1] * (Hr - r)  # (1 − τ_t) I + τ_t H_t in place of H_t
        return -Hr, pairs

    def objective_gradient(self, t: int, x: Tensor, y: Tensor) -> Tensor:
        """∇J_t(x) = λ_t A†(A x − y) + G_t(x), [B, 1, H, W]. Shared λ and G are the same for every t.

        With data_steps > 1 the data term is the sum of so many steps x → u, each with a λ of its own.
        """
        u = x
        for step_size in self.step_sizes[t % len(self.step_sizes)]:
            u = u - step_size * data_gradient(self.projector, self.data_term, u, y)
        descent = x - u
        return self.regularization(t, x, descent) + descent

    @with_random_turns
    def regularization(self, t: int, x: Tensor, descent: Tensor) -> Tensor:
        """G_t(x), [B, 1, H, W]. The details also see the descent along the data term.

        It is taken at x_t, as the formula has it, and not after that descent.
        """
        # With details it gives features of x, from which they make G(x).
        G = self.regularizers[t % len(self.regularizers)](x)
        if self.details:
            G = self.details[t](torch.cat([x, descent], 1) if self.detail_data_step else x, G)
        return G

    def large_parts(self) -> list[nn.Module]:
        """The layers of the mixer. Their inner features are about half of what an iteration stores."""
        return [module for module in self.modules() if isinstance(module, MixerLayer)]

    def scalars(self) -> dict[str, nn.ParameterList]:
        """λ_t, and from t = 1 on β_t, α_t and τ_t, if it has them."""
        learned = {"beta": self.momenta, "alpha": self.mixes, "tau": self.trust}
        return super().scalars() | {letter: part for letter, part in learned.items() if part}

    def first_order(self) -> Self | None:
        """The same network, with the same weights, and s_t = −r_t."""
        if self.hessian == "identity":
            return None
        network = copy.copy(self)
        network.hessian = "identity"
        return network

    def diagnostics(self, state: QNState) -> dict[str, Tensor]:
        """Mean cos(z, s) and the share of pairs that the safeguard skipped. They show problems early."""
        if not state.pairs:
            return {}
        cosine, rho = (torch.cat(column) for column in zip(*((p.cosine, p.rho) for p in state.pairs), strict=True))
        return {"cosine_zs": cosine.mean(), "skipped_pairs": (rho == 0).to(rho.dtype).mean()}
