"""The inverse Hessian H of QN-Mixer, held as the pairs that made it, never as an L × L matrix.

With H₀ = I, the dense recursion of the paper, H_{t+1} = (I − ρ s zᵀ) H_t (I − ρ z sᵀ) + ρ s sᵀ with ρ = 1/(zᵀs), is
exactly

    H r = r − Z w + S c,   w = R⁻¹ Sᵀ r,   c = R⁻ᵀ (D w − Zᵀ r + Zᵀ Z w),

where the columns of S and Z are all steps s and gradient changes z, R is the upper triangle of SᵀZ and D its diagonal
(Byrd, Nocedal, Schnabel 1994, eq. 2.6).

So H r is a combination of the vectors, and its coefficients follow from their inner products alone. An iteration
touches vectors of L numbers in five operators, whatever the number of pairs; the rest is arithmetic on (2t)² numbers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

# Found by experiment to hold where a bare skip, or Powell's usual 0.2, let training blow up.
DAMPING = 0.5
MIN_COSINE = 0.3

SMALLEST, LARGEST = 1e-18, 1e18
"""Bounds on sᵀs, and the upper one on zᵀz: no product of two inner products leaves the range of float32."""


class Curvature(NamedTuple):
    """What the inner products of t pairs say of them, [B, t] each."""

    used: Tensor  # bool: whether a pair is good enough for H
    cosine: Tensor  # cos(z, s) before damping


def curvature(gram: Tensor, damping: float = DAMPING, min_cosine: float = MIN_COSINE) -> Curvature:
    """Which pairs `coefficients` uses, by their inner products [B, 2t, 2t]; for the log."""
    lengths = gram.diagonal(dim1=1, dim2=2).sqrt()
    cosine = gram.diagonal(1, 1, 2)[:, 0::2] / lengths[:, 0::2] / lengths[:, 1::2]
    return Curvature(_judge(gram, damping, min_cosine).used, cosine)


def coefficients(gram: Tensor, products: Tensor, damping: float = DAMPING, min_cosine: float = MIN_COSINE) -> Tensor:
    """Coefficients f [B, 2t] of H r − r = Σ f_k v_k, for v = s_0, z_0, s_1, z_1, …; differentiable once.

    Damping: z ← θz + (1 − θ)s with the largest θ ≤ 1 for which zᵀs ≥ damping · sᵀs. Then the pair of a sample is
    skipped where zᵀs ≤ min_cosine · ‖z‖‖s‖, and where sᵀs or zᵀz is out of bounds or not finite: shorter steps are
    below the rounding of the image, so that their z is noise. No finite vectors make NaN of H or of its gradient.
    Source: ours, after Powell 1978 (the paper draws no safeguard); idle, it changes nothing.

    Args:
        gram: inner products of the vectors, [B, 2t, 2t].
        products: their inner products with r, [B, 2t].
    """
    return _Coefficients.apply(gram, products, damping, min_cosine)


class _Judged(NamedTuple):
    """What the inner products of t pairs say of them, [B, t] each."""

    used: Tensor  # bool: whether a pair is good enough for H
    theta: Tensor  # θ of damping; of a skipped pair anything


def _judge(gram: Tensor, damping: float, min_cosine: float) -> _Judged:
    """Judge pairs by their inner products [B, 2t, 2t]."""
    squares = gram.diagonal(dim1=1, dim2=2)
    ss, zz = squares[:, 0::2], squares[:, 1::2]
    slope = gram.diagonal(1, 1, 2)[:, 0::2] / ss
    theta = (1 - damping) / (1 - slope.clamp_max(damping))
    # ‖z‖²/‖s‖² in its parts along s, which damping raises to its bound, and at right angles to it, which it scales.
    along, across = slope.clamp_min(damping) / theta, torch.addcmul(zz / ss, slope, slope, value=-1)
    straight = along.square_() * (min_cosine**-2 - 1) > across
    return _Judged(straight & (ss > SMALLEST) & (ss + zz < LARGEST), theta)


class _Solved(NamedTuple):
    """H r of one r by its parts, [B, t] each."""

    w: Tensor
    c: Tensor

    @staticmethod
    def of(products: Tensor, theta: Tensor, s_z: Tensor, z_z: Tensor) -> "_Solved":
        """From the products [B, t, 2] of r with all s and z, θ, and SᵀZ and ZᵀZ of the damped z."""
        s_r, z_r = products.unbind(2)
        w = _solve(s_z, s_r, upper=True)
        z_q = torch.baddbmm(torch.lerp(s_r, z_r, theta)[..., None], z_z, w[..., None], beta=-1)[..., 0]  # −Zᵀ(r − Z w)
        return _Solved(w, _solve(s_z.mT, z_q.addcmul_(s_z.diagonal(dim1=1, dim2=2), w), upper=False))

    def coefficients(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Those of S c − Z w [B, 2t], for the z as they were before damping; and those of Z w."""
        theta_w = theta * self.w
        of_damped = torch.stack([self.w - theta_w, theta_w], 2)
        of_all = -of_damped
        of_all[..., 0] += self.c
        return of_all.flatten(1), of_damped.flatten(1)


def _solve(triangle: Tensor, b: Tensor, upper: bool) -> Tensor:
    """Solve one triangular system a sample, [B, t, t] and [B, t]; the other triangle is not looked at."""
    return torch.linalg.solve_triangular(triangle, b[..., None], upper=upper)[..., 0]


class _Coefficients(torch.autograd.Function):
    """f of `coefficients`, from G [B, 2t, 2t] and p = V r [B, 2t].

    Backward: H is symmetric, so a cotangent f̄ goes back to p as p does to f: by its own w‾ = R⁻¹ S f̄ and c‾. With Z the
    damped Z θ + S (1 − θ), what there is to differentiate is cᵀSf̄ − wᵀZf̄, and its derivatives are

        in SᵀZ:  A = triu(−c w‾ᵀ − c‾ wᵀ) + diag(w w‾),        in ZᵀZ:  w‾ wᵀ,
        in θ_j:  Σ_i A_ij s_iᵀ(z_j − s_j) + w‾_j (z_j − s_j)ᵀ(Z w − r) + w_j (z_j − s_j)ᵀ(Z w‾ − f̄).
    """

    @staticmethod
    def forward(ctx: Any, gram: Tensor, products: Tensor, damping: float, min_cosine: float) -> Tensor:
        used, theta = _judge(gram, damping, min_cosine)
        t = used.shape[1]
        # A skipped pair becomes one at right angles to everything: s = z of length 1.
        both = used[:, :, None, None, None] & used[:, None, None, :, None]
        aside = torch.eye(t, dtype=gram.dtype, device=gram.device)[:, None, :, None]
        gram = torch.where(both, gram.view(-1, t, 2, t, 2), aside)
        products = products.view(-1, t, 2).where(used[..., None], 0)
        theta = theta.where(used, 1)
        damped = torch.lerp(gram[..., 0], gram[..., 1], theta[:, None, None])  # [B, t, 2, t]: of s and z with damped z
        z_z = torch.lerp(damped[:, :, 0], damped[:, :, 1], theta[..., None])
        w, c = solved = _Solved.of(products, theta, damped[:, :, 0], z_z)
        f, of_damped = solved.coefficients(theta)
        ctx.save_for_backward(gram, products, used, theta, damped, z_z, w, c, of_damped)
        ctx.damping = damping
        return f

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gram, products, used, theta, damped, z_z, w, c, of_damped = ctx.saved_tensors
        back_products = gradients[0].view_as(products).where(used[..., None], 0)
        back = _Solved.of(back_products, theta, damped[:, :, 0], z_z)
        of_products, back_of_damped = back.coefficients(theta)

        both, swapped = torch.stack([w, back.w], 2), torch.stack([back.w, w], 2)
        A = torch.bmm(torch.stack([c, back.c], 2), swapped.mT).neg_().triu_()
        A.diagonal(dim1=1, dim2=2).addcmul_(w, back.w)
        of_r = torch.stack([products, back_products], 3).diff(dim=2)[:, :, 0]  # (z_j − s_j)ᵀ r, and so of f̄
        residual = torch.baddbmm(of_r, damped.diff(dim=2)[:, :, 0], both, beta=-1)
        of_theta = (gram[:, :, 0].diff(dim=3)[..., 0] * A).sum(1) + (residual * swapped).sum(2)

        t = used.shape[1]
        of_gram = torch.bmm(back_of_damped[..., None], of_damped[:, None]).view(-1, t, 2, t, 2)
        of_gram[:, :, 0].addcmul_(A[..., None], torch.stack([1 - theta, theta], 2)[:, None])
        of_gram = of_gram.view(-1, 2 * t, 2 * t)
        # θ = (1 − damping) / (1 − zᵀs/sᵀs), or 1 and constant.
        ss, sz = gram[:, :, 0].diagonal(dim1=1, dim2=2).unbind(1)
        of_sz = theta.square().mul_(theta < 1).mul_(of_theta).div_((1 - ctx.damping) * ss)
        of_gram.diagonal(1, 1, 2)[:, 0::2] += of_sz
        of_gram.diagonal(dim1=1, dim2=2)[:, 0::2].addcmul_(of_sz, sz / ss, value=-1)
        return of_gram, of_products.view(-1, 2 * t), None, None


class History:
    """r_0, s_0, z_0, s_1, z_1, …: the gradient code of the start, all steps and the gradient changes between them.

    The vectors are rows of one buffer, into which each is written where it stays, and their gradients are rows of
    another, to which each use of a row adds in place. Autograd would add up a gradient for each row and use, T² of
    them; here it sees only which use comes before which. A second backward through the same graph starts anew.

    `changed` and `stepped` give one that is a row longer and shares the buffer, so that there is one way on from each
    history: another one would write over its rows. To go the same way again, as recomputing does, writes what is there.
    To pytrees a history is a container of `rows`; one made of rows alone copies them into a buffer of its own.

    Attributes:
        rows: [B, n, L].
    """

    def __init__(self, rows: Tensor, buffer: "_Buffer | None" = None) -> None:
        self.rows, self._buffer = rows, buffer

    @staticmethod
    def begin(r: Tensor, n_iterations: int) -> "History":
        """r_0 [B, L] alone, with room for what so many iterations add."""
        return History(r[:, None]).in_buffer(n_iterations)

    def in_buffer(self, n_iterations: int) -> "History":
        """The same, with room for so many iterations; itself where there is."""
        if self._buffer is not None:
            return self
        buffer = _Buffer(self.rows, 2 * n_iterations)
        return History(_Begin.apply(self.rows, buffer), buffer)

    def sums(self) -> tuple[Tensor, Tensor]:
        """Newest gradient code r_0 + Σ z, and way from the start Σ s, [B, L] each; with as many s as z and r_0."""
        return _Sums.apply(self.rows, self._buffer)

    def changed(self, r: Tensor, before: Tensor, constant: bool = False) -> tuple["History", Tensor, Tensor]:
        """With the change r − before of the gradient code; inner products of all pairs, and of these with r.

        Those are what `coefficients` takes. constant: pairs are constants to differentiation.
        """
        rows, gram, products = _Changed.apply(self.rows, r, before, self._buffer, constant)
        return History(rows, self._buffer), gram, products

    def stepped(self, r: Tensor, f: Tensor | None = None, constant: bool = False) -> "History":
        """With the step s = −(r + Σ f_k v_k), for the v = s_0, z_0, s_1, z_1, … so far; −r without f [B, 2t]."""
        return History(_Stepped.apply(self.rows, r, f, self._buffer, constant), self._buffer)

    def curvature(self) -> Curvature:
        """How good the pairs are."""
        t = self.rows.shape[1] // 2 - 1
        pairs = self.rows.detach()[:, 1 : 2 * t + 1]
        return curvature(torch.bmm(pairs, pairs.mT))


register_pytree_node(History, lambda history: ([history.rows], None), lambda rows, _: History(*rows))


class _Buffer:
    """Room for the rows of a history, [B, capacity, L], and for their gradients."""

    def __init__(self, rows: Tensor, capacity: int) -> None:
        batch, n, length = rows.shape
        self.rows = rows.new_empty(batch, max(n, capacity), length)
        self._gradients: Tensor | None = None

    def first(self, n: int) -> Tensor:
        """The first n rows, for autograd to follow. No view to it: what is written behind them does not matter."""
        return self.rows[:, :n].data

    def gradients(self, n: int, more: Tensor | None = None) -> Tensor:
        """Gradients of the first n rows [B, n, L] so far, to add to; `more` is what came from elsewhere."""
        if self._gradients is None:
            self._gradients = torch.zeros_like(self.rows)
        if more is not None:
            self._gradients[:, :n] += more
        return self._gradients[:, :n]

    def done(self) -> None:
        """Give the memory of the gradients back."""
        self._gradients = None


# Below, rows are given for the order of the graph only: `_Buffer` has them, and takes their gradients.


class _Begin(torch.autograd.Function):
    """Copy rows [B, n, L] into a buffer."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: _Buffer) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.n, ctx.buffer = rows.shape[1], buffer
        buffer.rows[:, : ctx.n] = rows
        return buffer.first(ctx.n)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        own = ctx.buffer.gradients(ctx.n, gradients[0])
        ctx.buffer.done()
        return own, None


class _Sums(torch.autograd.Function):
    """Of rows [B, 2t, L] the sum of every other one, twice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: _Buffer) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.n, ctx.buffer = rows.shape[1], buffer
        code, way = rows.unflatten(1, (-1, 2)).sum(1).unbind(1)
        return code, way

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        own = ctx.buffer.gradients(ctx.n)
        for k, gradient in enumerate(gradients):
            if gradient is not None:
                own[:, k::2] += gradient[:, None]
        return None, None


class _Changed(torch.autograd.Function):
    """Append z = r − before; G = V Vᵀ and V r for the pairs V = (s_0, z_0, …) [B, 2t, L], the new one among them.

    Backward, for cotangents Ḡ and p̄:  V̄ += (Ḡ + Ḡᵀ) V + p̄ rᵀ,  r̄ = Vᵀ p̄ + z̄,  before‾ = −z̄.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, r: Tensor, before: Tensor, buffer: _Buffer, constant: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        n = rows.shape[1] + 1
        ctx.n, ctx.buffer, ctx.constant = n, buffer, constant
        torch.sub(r, before, out=buffer.rows[:, n - 1])
        pairs = buffer.rows[:, 1:n]
        gram = torch.bmm(pairs, pairs.mT)
        ctx.save_for_backward(r)
        if constant:
            ctx.mark_non_differentiable(gram)
        return buffer.first(n), gram, torch.bmm(pairs, r[..., None])[..., 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor | None, Tensor | None, None, None]:
        of_rows, of_gram, of_products = gradients
        (r,) = ctx.saved_tensors
        pairs, own = ctx.buffer.rows[:, 1 : ctx.n], ctx.buffer.gradients(ctx.n, of_rows)[:, 1:]
        if ctx.constant:
            of_r = None if of_products is None else torch.bmm(of_products[:, None], pairs)[:, 0]
            return None, of_r, None, None, None
        if of_gram is not None:
            own.baddbmm_(of_gram + of_gram.mT, pairs)
        of_z = own[:, -1]
        if of_products is None:
            return None, of_z, -of_z, None, None
        own.baddbmm_(of_products[..., None], r[:, None])
        return None, torch.baddbmm(of_z[:, None], of_products[:, None], pairs)[:, 0], -of_z, None, None


class _Stepped(torch.autograd.Function):
    """Append s = −(r + Vᵀ f), for the pairs V = (s_0, z_0, …) [B, 2t, L].

    Backward, for a cotangent s̄:  V̄ −= f s̄ᵀ,  f̄ = −V s̄,  r̄ = −s̄.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, r: Tensor, f: Tensor | None, buffer: _Buffer, constant: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        n = rows.shape[1] + 1
        ctx.n, ctx.buffer, ctx.constant = n, buffer, constant
        s = buffer.rows[:, n - 1 : n]
        if f is None:
            torch.neg(r[:, None], out=s)
        else:
            ctx.save_for_backward(f)
            torch.baddbmm(r[:, None], f[:, None], buffer.rows[:, 1 : n - 1], beta=-1, alpha=-1, out=s)
        return buffer.first(n)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor, Tensor | None, None, None]:
        own = ctx.buffer.gradients(ctx.n, gradients[0])
        of_s, of_f = own[:, -1], None
        for f in ctx.saved_tensors:  # none in the first iteration
            pairs = slice(1, ctx.n - 1)
            of_f = torch.baddbmm(f[..., None], ctx.buffer.rows[:, pairs], of_s[..., None], beta=0, alpha=-1)[..., 0]
            if not ctx.constant:
                own[:, pairs].baddbmm_(f[..., None], of_s[:, None], alpha=-1)
        return None, -of_s, of_f, None, None
