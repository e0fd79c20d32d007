"""The inverse Hessian H of QN-Mixer, stored as its pairs (s, z), never as an L × L matrix.

With H₀ = I, the dense recursion of the paper, H_{t+1} = (I − ρ s zᵀ) H_t (I − ρ z sᵀ) + ρ s sᵀ with ρ = 1/(zᵀs), is
exactly

    H r = q + S c,   w = R⁻¹ Sᵀ r,   q = r − Z w,   c = R⁻ᵀ (D w − Zᵀ q),

where the columns of S and Z are all steps s and gradient changes z, R is the upper triangle of SᵀZ and D its diagonal
(Byrd, Nocedal, Schnabel 1994, eq. 2.6, arranged as the two-loop recursion).

Steps and changes are rows of one buffer, so an iteration takes the same number of operators for any number of pairs.
Each vector is divided by a power of two, which puts its largest entry between 1 and 2. That is exact, and no product of
two vectors can overflow or vanish. H depends on a pair only through the two directions and γ = ‖s‖/‖z‖, which turns D
into γD.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import register_pytree_node
from torch.utils.module_tracker import ModuleTracker

# Found by experiment. Training diverged with Powell's usual 0.2, and with skipping alone.
DAMPING = 0.5
MIN_COSINE = 0.3

_RATIO_MAX = 1e12
"""Bound on ‖s‖/‖z‖: beyond it damping decides the result anyway."""
_SMALLEST = 2.0**-100
"""A vector whose largest entry is smaller counts as 0: its gradients would leave the range of float32."""
_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}
"""For each dtype: the integer type of its size, and the mask of its exponent bits. With these bits alone a number is
rounded down to a power of two, and NaN becomes infinite."""
_TORCH = ModuleTracker()  # says whether backward runs


class Curvature(NamedTuple):
    """How good t pairs are, [B, t] each."""

    used: Tensor  # bool: whether a pair is good enough for H
    cosine: Tensor  # cos(z, s) before damping


class History:
    """s_0, z_0, s_1, z_1, …: all steps s, and the changes z of the gradient code between them.

    A vector is stored as a row with entries up to 2 and a scale. Differentiation treats the scale as a constant. If a
    vector is not finite, its row is zero, so H stays finite. Its scale is infinite, so the sum of the steps is NaN.

    All rows are in one buffer. A step or change is written once and stays in its place. So autograd never copies a row,
    and backward needs only the buffer, although the rows are used T² times. The gradients of all rows are one tensor,
    and the backward of each method adds to it in place. So call each method on the history that the last method
    returned. A history can be continued only once.

    Between two iterations the last row is the gradient code r_{t−1}. The next code r_t turns it in place into the
    change z_{t−1} = r_t − r_{t−1}. A separate tensor for the code would cost one more vector an iteration when
    recomputing. The sum of the changes cannot replace the code: rounding would hide the small, late changes.

    Attributes:
        rows: [B, n, L].
        scales: [B, 2, T], the divisors of the steps s and of the changes z.
        ends_with_code: whether the last row is a code.
    """

    def __init__(
        self, rows: Tensor, scales: Tensor, ends_with_code: bool = False, buffer: "_Buffer | None" = None
    ) -> None:
        self.rows, self.scales, self.ends_with_code, self._buffer = rows, scales, ends_with_code, buffer

    @staticmethod
    def begin(like: Tensor, n_iterations: int) -> "History":
        """No rows yet, with memory for those of so many iterations. `like` is any vector [B, L]."""
        rows = like.new_empty(len(like), 0, like.shape[1])
        buffer = _Buffer(rows, like.new_zeros(len(like), 2, n_iterations), ends_with_code=False)
        return History(rows, buffer.scales, buffer=buffer)

    @property
    def is_empty(self) -> bool:
        """Whether there is no row yet, as before the first iteration."""
        return self.rows.shape[1] == 0

    def append(self, v: Tensor) -> "History":
        """The history with one more vector v [B, L]."""
        buffer = self._room()
        return History(_Append.apply(self.rows, v, buffer, False), buffer.scales, False, buffer)

    def append_code(self, r: Tensor) -> "History":
        """The history with the gradient code r_{t−1} [B, L] as its last row, for `change`."""
        buffer = self._room()
        return History(_Append.apply(self.rows, r, buffer, True), buffer.scales, True, buffer)

    def change(self, r: Tensor) -> "History":
        """The history with z_{t−1} in place of r_{t−1}. r is r_t, the next gradient code [B, L]."""
        buffer = self._room()
        return History(_Change.apply(self.rows, r, buffer), buffer.scales, False, buffer)

    def way(self) -> tuple["History", Tensor]:
        """The history, and the sum of its steps Σ s [B, L]."""
        buffer = self._room()
        rows, way = _Way.apply(self.rows, buffer)
        return History(rows, buffer.scales, self.ends_with_code, buffer), way

    def step(self, r: Tensor, trust: Tensor | None = None, constant: bool = False) -> tuple["History", Tensor]:
        """The history, and s = −(r + τ (H r − r)) [B, L] with H of all pairs. trust: τ [1]; None: τ = 1.

        Damping: z ← θz + (1 − θ)s with the largest θ ≤ 1 for which zᵀs ≥ DAMPING · sᵀs. Then the pair of a sample is
        skipped where zᵀs ≤ MIN_COSINE · ‖z‖‖s‖, where s is zero, and where s or z is not finite. No input, finite or
        not, makes H or its gradient NaN. Source: ours, after Powell 1978 (the paper draws no safeguard). Good pairs are
        not changed.

        constant: differentiation treats the pairs as constants.
        """
        buffer = self._room()
        rows, s = _Step.apply(self.rows, r, trust, buffer, constant)
        return History(rows, buffer.scales, False, buffer), s

    def curvature(self) -> Curvature:
        """How good the pairs are. A last step without a change is not a pair yet."""
        n_pairs = (self.rows.shape[1] - self.ends_with_code) // 2
        vectors = self.rows.detach()[:, : 2 * n_pairs]
        gram = torch.bmm(vectors, vectors.mT)
        lengths = gram.diagonal(dim1=1, dim2=2).sqrt()
        cosine = gram.diagonal(1, 1, 2)[:, 0::2] / (lengths[:, 0::2] * lengths[:, 1::2]).clamp_min(0.5)
        return Curvature(~_Pairs.of(gram, self.scales).skipped, cosine)

    def _room(self) -> "_Buffer":
        """The buffer. A history that a pipeline stage receives has none: each method then copies it into a new one."""
        return self._buffer or _Buffer(self.rows, self.scales, self.ends_with_code)


def _unpacked(parts: Iterable[Any], ends_with_code: bool) -> History:
    rows, scales, buffer = parts
    return History(rows, scales, ends_with_code, buffer)


def _parts(history: History) -> tuple[list[Any], bool]:
    # `.data`, as in `_Buffer.first`: later iterations write behind the scales of this one.
    return [history.rows, history.scales.data, history._buffer], history.ends_with_code


register_pytree_node(History, _parts, _unpacked)


class _Buffer:
    """Memory for the rows of a history, [B, 2T, L], for their scales, and for their inner products, [B, 2T, 2T]."""

    def __init__(self, rows: Tensor, scales: Tensor, ends_with_code: bool) -> None:
        batch, n, length = rows.shape
        self.rows = rows.new_empty(batch, 2 * scales.shape[-1], length)
        self.rows[:, :n] = rows.detach()
        self.scales = scales.clone()
        self.unit = torch.eye(2, dtype=rows.dtype, device=rows.device)[0]
        self._place = 2 * n - ends_with_code
        self._gram = rows.new_zeros(batch, self.rows.shape[1], self.rows.shape[1])
        self._known = 0  # rows whose products with all rows before them are in the Gram matrix

    def write(self, v: Tensor, n: int) -> None:
        """Store v [B, L] as row n, with its scale."""
        if self._has(2 * n + 2):
            return
        scale = self.scale(n)
        torch.linalg.vector_norm(v, torch.inf, dim=1, keepdim=True, out=scale)
        bits, exponent = _EXPONENT[v.dtype]
        scale.view(bits).bitwise_and_(exponent)
        torch.div(v, scale.clamp_min_(_SMALLEST), out=self.rows[:, n]).nan_to_num_(0.0)
        self._place = 2 * n + 2

    def write_code(self, r: Tensor, n: int) -> None:
        """Store the code r [B, L] as row n, without a scale."""
        if not self._has(2 * n + 1):
            self.rows[:, n] = r
            self._place = 2 * n + 1

    def write_change(self, r: Tensor, n: int) -> None:
        """Replace the code in row n by r [B, L] minus this code."""
        if not self._has(2 * n + 2):
            self.write(r - self.rows[:, n], n)

    def _has(self, place: int) -> bool:
        """Whether this row is written already. Then the backward pass recomputes the iteration, and must not write.

        The code r_{t−1} is gone by then, but its change is in the buffer.
        """
        if place > self._place:
            return False
        if not _TORCH.is_bw:
            raise RuntimeError("a history can be continued once: call methods of the one that the last method gave")
        return True

    def scale(self, n: int) -> Tensor:
        """The divisor of row n, [B, 1]."""
        return self.scales[:, n % 2, n // 2, None]

    def steps(self, n: int) -> Tensor:
        """Scales [B, t] of the steps among the first n rows."""
        return self.scales[:, 0, : (n + 1) // 2]

    def gram(self, n: int) -> Tensor:
        """Inner products of the first n rows [B, n, n], on the diagonal and above it. Only new rows are multiplied."""
        if n > self._known:
            # Into its place: a copy would be one more operator an iteration.
            torch.bmm(self.rows[:, :n], self.rows[:, self._known : n].mT, out=self._gram[:, :n, self._known : n])
            self._known = n
        return self._gram[:, :n, :n]

    def first(self, n: int) -> Tensor:
        """The first n rows. `.data` hides from autograd that they are a view, so it allows later writes behind them."""
        return self.rows[:, :n].data


class _Pairs(NamedTuple):
    """What the formula needs of t pairs. Y = S N_s + Z N_z is the damped Z with a factor for each column.

    A skipped pair has N = γ = 0, and a column of the identity in R. So it adds nothing.
    """

    skipped: Tensor  # bool [B, t]
    ss: Tensor  # sᵀs [B, t]; at least 0.5, so that pairs which are skipped for a zero s stay finite
    slope: Tensor  # zᵀs / sᵀs [B, t]
    mu: Tensor  # N_s / N_z [B, t]
    N: Tensor  # [B, t, 2]
    gamma: Tensor  # [B, t]
    gamma_D: Tensor  # [B, t]
    R: Tensor  # [B, t, t]; the part below its diagonal is not used

    @staticmethod
    def of(gram: Tensor, scales: Tensor) -> "_Pairs":
        """From the inner products of the rows s_0, z_0, s_1, … [B, 2t, 2t]; only its upper triangle is used."""
        t = gram.shape[1] // 2
        squares = gram.diagonal(dim1=1, dim2=2)
        zz, ss = squares[:, 1::2], squares[:, 0::2].clamp_min(0.5)
        slope = gram.diagonal(1, 1, 2)[:, 0::2] / ss
        ratio = (scales[:, 0, :t] / scales[:, 1, :t]).nan_to_num_(0.0).clamp_max_(_RATIO_MAX)
        # θz + (1 − θ)s is, up to a factor, z + μs; μ = 0 where zᵀs is large enough already.
        mu = torch.sub(slope, ratio, alpha=DAMPING).clamp_max_(0.0).mul_(-1 / (1 - DAMPING))
        across, damped = torch.addcmul(zz / ss, slope, slope, value=-1), slope + mu
        skipped = across.addcmul_(damped, damped, value=1 - MIN_COSINE**-2) >= 0
        skipped.logical_or_(ss <= 0.5)  # a row is shorter than 1 only if its vector counts as 0
        N = gram.new_empty(*mu.shape, 2)
        N_s, N_z = N.unbind(2)
        torch.reciprocal(mu + 1, out=N_z).masked_fill_(skipped, 0.0)  # Y is as long as a row for any μ
        torch.mul(N_z, mu, out=N_s)
        R = (gram.view(-1, t, 2, t, 2)[:, :, 0] * N[:, None]).sum(3)
        D = R.diagonal(dim1=1, dim2=2).masked_fill_(skipped, 1.0)
        gamma = ratio.add_(mu).mul_(N_z)
        return _Pairs(skipped, ss, slope, mu, N, gamma, gamma * D, R)


class _Solved(NamedTuple):
    """The parts of H r for one r."""

    w: Tensor  # [B, t]
    of_q: Tensor  # N w [B, t, 2]
    q: Tensor  # r − Y w [B, L]
    inner: Tensor  # inner products of the rows with q [B, t, 2]
    c: Tensor  # R⁻ᵀ (Yᵀ q − γ D w) [B, t]: minus the c above

    @staticmethod
    def of(r: Tensor, s_r: Tensor, vectors: Tensor, pairs: _Pairs) -> "_Solved":
        """From r [B, L], Sᵀ r [B, t] and the rows s_0, z_0, s_1, … [B, 2t, L]."""
        N, R = pairs.N, pairs.R
        w = _solve(R, s_r, upper=True)
        of_q = w[..., None] * N
        q = torch.baddbmm(r[:, None], of_q.view(len(r), 1, -1), vectors, alpha=-1)[:, 0]
        inner = torch.bmm(vectors, q[..., None]).view_as(N)
        y_q = (inner * N).sum(2)
        c = _solve(R.mT, y_q.addcmul_(pairs.gamma_D, w, value=-1), upper=False)
        return _Solved(w, of_q, q, inner, c)

    def coefficients(self, unit: Tensor) -> Tensor:
        """f [B, 2t] in r − H r = Σ f_k v_k, where v are the rows s_0, z_0, s_1, …; unit: the vector (1, 0)."""
        return torch.addcmul(self.of_q, self.c[..., None], unit).flatten(1)


def _solve(triangle: Tensor, b: Tensor, upper: bool) -> Tensor:
    """Solve a triangular system for each sample, [B, t, t] and [B, t]. The other triangle is not used."""
    return torch.linalg.solve_triangular(triangle, b[..., None], upper=upper)[..., 0]


class _Append(torch.autograd.Function):
    """rows [B, n, L] and v [B, L] → rows [B, n + 1, L]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, v: Tensor, buffer: _Buffer, is_code: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.buffer, ctx.n, ctx.is_code = buffer, rows.shape[1], is_code
        (buffer.write_code if is_code else buffer.write)(v, ctx.n)
        return buffer.first(ctx.n + 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        (of_rows,), n = gradients, ctx.n
        if of_rows is None:
            return None, None, None, None
        of_v = of_rows[:, n] if ctx.is_code else of_rows[:, n] / ctx.buffer.scale(n)
        return of_rows[:, :n], of_v, None, None


class _Change(torch.autograd.Function):
    """rows [B, n, L] that end with a code, and the next code [B, L] → rows [B, n, L] that end with their change."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, r: Tensor, buffer: _Buffer) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.buffer, ctx.n = buffer, rows.shape[1]
        buffer.write_change(r, ctx.n - 1)
        return buffer.first(ctx.n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        (of_rows,), last = gradients, ctx.n - 1
        if of_rows is None:
            return None, None, None
        of_r = of_rows[:, last] / ctx.buffer.scale(last)
        torch.neg(of_r, out=of_rows[:, last])
        return of_rows, of_r, None


class _Way(torch.autograd.Function):
    """rows s_0, z_0, …, s_t, … [B, n, L] → the same rows, and the sum of the steps times their scales [B, L]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: _Buffer) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.n, ctx.buffer = rows.shape[1], buffer
        with torch.autocast(rows.device.type, enabled=False):
            way = torch.bmm(buffer.steps(ctx.n)[:, None], buffer.rows[:, : ctx.n : 2])[:, 0]
        return buffer.first(ctx.n), way

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        (own, of_way), buffer, n = gradients, ctx.buffer, ctx.n
        if of_way is not None:
            own = torch.zeros_like(buffer.rows[:, :n]) if own is None else own
            own[:, 0::2].baddbmm_(buffer.steps(n)[..., None], of_way[:, None])
        return own, None


class _Step(torch.autograd.Function):
    """s = −(r + τ (H r − r)) from the rows s_0, z_0, …, s_{t−1}, z_{t−1} [B, 2t, L].

    Backward: H is symmetric, so it is applied to v = τ s̄ too; the cotangent of H r is −v. Let e, p
    and b be for v what w, q and c are for r. Then vᵀ H r = pᵀ q + eᵀ γD w, and its derivatives are

        Ȳ = −(q eᵀ + p wᵀ),   S̄ = v cᵀ + r bᵀ,   R̄ = −triu(c eᵀ + b wᵀ) + diag(γ e w),   γ̄ = D e w.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, r: Tensor, trust: Tensor | None, buffer: _Buffer, constant: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        n = rows.shape[1]
        vectors = buffer.rows[:, :n]
        pairs = _Pairs.of(buffer.gram(n), buffer.scales)
        s_r = torch.bmm(vectors[:, 0::2], r[..., None])[..., 0]
        solved = _Solved.of(r, s_r, vectors, pairs)
        f = solved.coefficients(buffer.unit)
        ctx.buffer, ctx.n, ctx.constant = buffer, n, constant
        ctx.save_for_backward(r, trust, f, *pairs, *solved)
        trusted = f if trust is None else trust * f
        return buffer.first(n), torch.baddbmm(r[:, None], trusted[:, None], vectors, beta=-1)[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        own, of_s = gradients
        if of_s is None:
            return own, None, None, None, None
        r, trust, f, *others = ctx.saved_tensors
        pairs, solved = _Pairs(*others[: len(_Pairs._fields)]), _Solved(*others[len(_Pairs._fields) :])
        vectors = ctx.buffer.rows[:, : ctx.n]
        inner = torch.bmm(vectors, of_s[..., None])[..., 0]
        of_trust = None if trust is None else torch.dot(f.flatten(), inner.flatten()).view(1)
        v, s_v = of_s, inner[:, 0::2]
        if trust is not None:
            v, s_v = v * trust, s_v * trust
        back = _Solved.of(v, s_v, vectors, pairs)
        of_r = torch.baddbmm(of_s[:, None], back.coefficients(ctx.buffer.unit)[:, None], vectors, beta=-1)[:, 0]
        if not ctx.constant:
            if own is None:
                own = torch.zeros_like(vectors)
            _subtract_gradients(own, vectors, ctx.buffer.gram(ctx.n), r, v, pairs, solved, back)
        return own, of_r, of_trust, None, None


def _subtract_gradients(
    own: Tensor, vectors: Tensor, gram: Tensor, r: Tensor, v: Tensor, pairs: _Pairs, solved: _Solved, back: _Solved
) -> None:
    """Subtract the derivatives of vᵀ H r from those of the rows s_0, z_0, s_1, …, [B, 2t, L]."""
    _, ss, slope, mu, N, gamma, _, R = pairs
    t, of_s = N.shape[1], own[:, 0::2]
    own.baddbmm_(torch.stack([back.of_q, solved.of_q], 3).flatten(1, 2), torch.stack([solved.q, back.q], 1))
    of_s.baddbmm_(solved.c[..., None], v[:, None]).baddbmm_(back.c[..., None], r[:, None])

    of_D = back.w * solved.w
    of_R = torch.bmm(solved.c[..., None], back.w[:, None])
    of_R.baddbmm_(back.c[..., None], solved.w[:, None]).triu_()
    of_R.diagonal(dim1=1, dim2=2).addcmul_(gamma, of_D)
    # By N_s = μ N_z and γ = N_z (ratio + μ). N_z only scales Y, so it counts as a constant. Then of μ by the slope.
    products = gram.view(-1, t, 2, t, 2)[:, :, 0]
    of_mu = (products[..., 0] * of_R).sum(1).addcmul_(R.diagonal(dim1=1, dim2=2), of_D)
    of_mu = of_mu.addcmul_(solved.inner[..., 0], back.w, value=-1).addcmul_(back.inner[..., 0], solved.w, value=-1)
    of_mu = of_mu.mul_(N[..., 1]).div_(ss).masked_fill_(mu <= 0, 0.0)
    of_products = of_R[..., None] * N[:, None]
    diagonal = of_products.diagonal(dim1=1, dim2=2)
    diagonal[:, 1].sub_(of_mu, alpha=1 / (1 - DAMPING))
    diagonal[:, 0].addcmul_(of_mu, slope, value=1 / (1 - DAMPING))

    of_products = of_products.flatten(2)
    of_s.baddbmm_(of_products, vectors, alpha=-1)
    own.baddbmm_(of_products.mT, vectors[:, 0::2], alpha=-1)
