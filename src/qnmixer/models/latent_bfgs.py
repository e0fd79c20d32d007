"""The inverse Hessian H of QN-Mixer, stored as its pairs (s, z), never as an L × L matrix.

With H₀ = I, the dense recursion of the paper, H_{t+1} = (I − ρ s zᵀ) H_t (I − ρ z sᵀ) + ρ s sᵀ with ρ = 1/(zᵀs), is
exactly

    H r = q + S c,   w = R⁻¹ Sᵀ r,   q = r − Z w,   c = R⁻ᵀ (D w − Zᵀ q),

where the columns of S and Z are all steps s and gradient changes z, R is the upper triangle of SᵀZ and D its diagonal
(Byrd, Nocedal, Schnabel 1994, eq. 2.6, arranged as the two-loop recursion).

Steps and changes are rows of one buffer, so an iteration takes the same number of operators for any number of pairs.
H does not change if the s and z of a pair are multiplied by the same number. So both are divided by a power of two,
which puts the largest entry of s between 1 and 2. That is exact, and no product of two vectors can overflow.
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

_LARGEST = 2.0**40
"""A larger entry of z, as a multiple of the scale of s, is cut off: squares must stay finite in float32."""
_SMALLEST = 2.0**-100
"""A step whose largest entry is not larger counts as 0: its gradients would leave the range of float32."""
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

    The rows of a pair are s and z, divided by the scale of the step s. Differentiation treats the scale as a constant.
    If s is not finite, its row is zero, so H stays finite. Its scale is infinite, so the sum of the steps is NaN.

    All rows are in one buffer. A step or change is written once and stays in its place. So autograd never copies a row,
    and backward needs only the buffer, although the rows are used T² times. The gradients of all rows are one tensor,
    and the backward of each method adds to it in place. So call each method on the history that the last method
    returned. A history can be continued only once.

    Between two iterations the last row is the gradient code r_{t−1}. The next code r_t turns it in place into the
    change z_{t−1} = r_t − r_{t−1}. A separate tensor for the code would cost one more vector an iteration when
    recomputing. The sum of the changes cannot replace the code: rounding would hide the small, late changes.

    Attributes:
        rows: [B, n, L].
        scales: [B, T, 1], of the steps.
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
        buffer = _Buffer(rows, like.new_zeros(len(like), n_iterations, 1))
        return History(rows, buffer.scales, buffer=buffer)

    @property
    def is_empty(self) -> bool:
        """Whether there is no row yet, as before the first iteration."""
        return self.rows.shape[1] == 0

    def way(self) -> tuple["History", Tensor]:
        """The history, and the sum of its steps Σ s [B, L]."""
        buffer = self._room()
        rows, way = _Way.apply(self.rows, buffer)
        return History(rows, buffer.scales, self.ends_with_code, buffer), way

    def advance(self, r: Tensor, trust: Tensor | None = None, constant: bool = False) -> "History":
        """The history after an iteration with the gradient code r = r_t [B, L].

        It forms z_{t−1}, takes the step s_t = −(r + τ (H r − r)) with H of all pairs, and keeps r for the next
        iteration, if there is one. trust: τ [1]; None: τ = 1. constant: differentiation treats the pairs as constants.

        Damping: z ← θz + (1 − θ)s with the largest θ ≤ 1 for which zᵀs ≥ DAMPING · sᵀs. Then the pair of a sample is
        skipped where zᵀs ≤ MIN_COSINE · ‖z‖‖s‖, and where s is zero or not finite. No input, finite or not, makes H or
        its gradient NaN. Source: ours, after Powell 1978 (the paper draws no safeguard). Good pairs are not changed.
        """
        buffer = self._room()
        with torch.autocast(r.device.type, enabled=False):
            rows = _Advance.apply(self.rows, r, trust, buffer, self.ends_with_code, constant)
        return History(rows, buffer.scales, rows.shape[1] % 2 == 0, buffer)

    def curvature(self) -> Curvature:
        """How good the pairs are. A last step without a change is not a pair yet."""
        n_pairs = (self.rows.shape[1] - self.ends_with_code) // 2
        vectors = self.rows.detach()[:, : 2 * n_pairs]
        gram = torch.bmm(vectors, vectors.mT)
        lengths = gram.diagonal(dim1=1, dim2=2).sqrt()
        cosine = gram.diagonal(1, 1, 2)[:, 0::2] / (lengths[:, 0::2] * lengths[:, 1::2])
        return Curvature(~_Pairs.of(gram).skipped, cosine.nan_to_num_(0.0))

    def _room(self) -> "_Buffer":
        """The buffer. A history that a pipeline stage receives has none: each method then copies it into a new one."""
        return self._buffer or _Buffer(self.rows, self.scales)


def _unpacked(parts: Iterable[Any], ends_with_code: bool) -> History:
    rows, scales, buffer = parts
    return History(rows, scales, ends_with_code, buffer)


def _parts(history: History) -> tuple[list[Any], bool]:
    # `.data`, as in `_Buffer.first`: later iterations write behind the scales of this one.
    return [history.rows, history.scales.data, history._buffer], history.ends_with_code


register_pytree_node(History, _parts, _unpacked)


class _Buffer:
    """Memory for the rows of a history, [B, 2T − 1, L], their scales, and their inner products [B, 2T − 1, 2T − 1]."""

    def __init__(self, rows: Tensor, scales: Tensor) -> None:
        batch, n, length = rows.shape
        self.rows = rows.new_empty(batch, 2 * scales.shape[1] - 1, length)
        self.rows[:, :n] = rows.detach()
        self.scales = scales.clone()
        self.unit = torch.eye(2, dtype=rows.dtype, device=rows.device)[0]
        self._bits, exponent = _EXPONENT[rows.dtype]
        self._exponent = torch.full((), exponent, dtype=self._bits, device=rows.device)
        self._n = n
        self._gram = rows.new_zeros(batch, self.rows.shape[1], self.rows.shape[1])
        self._known = 0  # rows whose products with all rows before them are in the Gram matrix
        self._pairs: dict[int, _Pairs] = {}

    def is_last(self, n: int) -> bool:
        """Whether n rows are the last rows so far.

        If not, the backward pass recomputes an iteration and must not write: its code r_{t−1} is gone by then.
        """
        if n < self._n and not _TORCH.is_bw:
            raise RuntimeError("a history can be continued once: call methods of the one that the last method gave")
        return n == self._n

    def write_change(self, r: Tensor) -> None:
        """Replace the code in the last row by r [B, 1, L] minus this code, divided by the scale of the step before."""
        row = self.rows[:, self._n - 1 : self._n]
        torch.sub(r, row, out=row)
        row.div_(self.scale(self._n - 1)).nan_to_num_(0.0).clamp_(-_LARGEST, _LARGEST)

    def write_step(self, r: Tensor, f: Tensor | None) -> None:
        """Store the step Σ f_k v_k − r as a new row, where v are all rows, and r as one more, except after the last.

        Shapes: r [B, 1, L], f [B, 1, n]; None: no rows yet.
        """
        n, row = self._n, self.rows[:, self._n : self._n + 1]
        if f is None:
            torch.neg(r, out=row)
        else:
            torch.baddbmm(r, f, self.rows[:, :n], beta=-1, out=row)
        self._normalize(n)
        self._n = self.n_after(n)
        if self._n > n + 1:
            self.rows[:, n + 1 : self._n] = r

    def n_after(self, n: int) -> int:
        """The number of rows after an iteration, from that before it."""
        return min(n + 2, self.rows.shape[1])

    def _normalize(self, n: int) -> None:
        """Divide the step in row n by its scale, which is set here."""
        row, scale = self.rows[:, n : n + 1], self.scale(n)
        # Not `vector_norm`: on a CPU the largest entry then takes 14 times as long.
        torch.amax(row.abs(), 2, keepdim=True, out=scale)
        scale.view(self._bits).bitwise_and_(self._exponent)
        torch.threshold_(scale, _SMALLEST, 2.0**127)  # so the row of a smaller step is 0
        row.div_(scale).nan_to_num_(0.0)

    def scale(self, n: int) -> Tensor:
        """The divisor of row n, [B, 1, 1]."""
        return self.scales[:, n // 2 : n // 2 + 1]

    def steps(self, n: int) -> Tensor:
        """Scales [B, t, 1] of the steps among the first n rows."""
        return self.scales[:, : (n + 1) // 2]

    def gram(self, n: int) -> Tensor:
        """Inner products of the first n rows [B, n, n], on the diagonal and above it. Only new rows are multiplied."""
        if n > self._known:
            # Into its place: a copy would be one more operator an iteration.
            torch.bmm(self.rows[:, :n], self.rows[:, self._known : n].mT, out=self._gram[:, :n, self._known : n])
            self._known = n
        return self._gram[:, :n, :n]

    def pairs(self, n: int) -> "_Pairs":
        """What the formula needs of the pairs in the first n rows. It is small, so it is kept for backward."""
        if n not in self._pairs:
            self._pairs[n] = _Pairs.of(self.gram(n))
        return self._pairs[n]

    def first(self, n: int) -> Tensor:
        """The first n rows. `.data` hides from autograd that they are a view, so it allows later writes behind them."""
        return self.rows[:, :n].data


class _Pairs(NamedTuple):
    """What the formula needs of t pairs. Y = S N_s + Z N_z is the damped Z: N_z = θ and N_s = 1 − θ.

    A skipped pair has N = D = 0, and a column of the identity in R. So it adds nothing.
    """

    skipped: Tensor  # bool [B, t]
    ss: Tensor  # sᵀs [B, t]; 0.5 for a zero s, so that skipped pairs stay finite
    slope: Tensor  # zᵀs / sᵀs [B, t]
    mu: Tensor  # N_s / N_z [B, t]
    N: Tensor  # [B, t, 2]
    D: Tensor  # [B, t, 1]
    R: Tensor  # [B, t, t]; the part below its diagonal is not used

    @staticmethod
    def of(gram: Tensor) -> "_Pairs":
        """From the inner products of the rows s_0, z_0, s_1, … [B, 2t, 2t]; only its upper triangle is used."""
        t, squares = gram.shape[1] // 2, gram.diagonal(dim1=1, dim2=2)
        ss, sz, zz = squares[:, 0::2], gram.diagonal(1, 1, 2)[:, 0::2], squares[:, 1::2]
        positive_ss = ss.clamp_min(0.5)
        slope = sz / positive_ss
        # θz + (1 − θ)s is θ (z + μs); μ = 0 where zᵀs is large enough already.
        mu = slope.sub(DAMPING).clamp_max_(0.0).mul_(-1 / (1 - DAMPING))
        # By Pythagoras, with the part of z across s. For s = 0 both sides are 0.
        across, damped = torch.addcmul(zz * ss, sz, sz, value=-1), torch.addcmul(sz, mu, ss)
        skipped = across.addcmul_(damped, damped, value=1 - MIN_COSINE**-2) >= 0
        N = gram.new_empty(*mu.shape, 2)
        N_s, N_z = N.unbind(2)
        torch.reciprocal(mu + 1, out=N_z).masked_fill_(skipped, 0.0)
        torch.mul(N_z, mu, out=N_s)
        R = (gram.view(-1, t, 2, t, 2)[:, :, 0] * N.unsqueeze(1)).sum(3)
        diagonal = R.diagonal(dim1=1, dim2=2)
        D = diagonal.clone()
        diagonal.masked_fill_(skipped, 1.0)
        return _Pairs(skipped, positive_ss, slope, mu, N, D.unsqueeze(2), R)


class _Solved(NamedTuple):
    """The parts of H r for one r."""

    w: Tensor  # [B, t, 1]
    of_q: Tensor  # N w [B, t, 2]
    q: Tensor  # r − Y w [B, 1, L]
    inner: Tensor  # inner products of the rows with q [B, t, 2]
    c: Tensor  # R⁻ᵀ (Yᵀ q − D w) [B, t, 1]: minus the c above
    of_s: Tensor  # (c, 0) [B, t, 2]

    @staticmethod
    def of(r: Tensor, s_r: Tensor, vectors: Tensor, pairs: _Pairs, unit: Tensor) -> "_Solved":
        """From r [B, 1, L], Sᵀ r [B, t, 1], the rows s_0, z_0, s_1, … [B, 2t, L], and the vector (1, 0)."""
        N, R = pairs.N, pairs.R
        w = torch.linalg.solve_triangular(R, s_r, upper=True)  # the other triangle is not used
        of_q = w * N
        q = torch.baddbmm(r, of_q.view(len(r), 1, -1), vectors, alpha=-1)
        inner = torch.bmm(vectors, q.mT).view_as(N)
        y_q = (inner * N).sum(2, keepdim=True).addcmul_(pairs.D, w, value=-1)
        c = torch.linalg.solve_triangular(R.mT, y_q, upper=False)
        return _Solved(w, of_q, q, inner, c, c * unit)

    def coefficients(self) -> Tensor:
        """f [B, 1, 2t] in r − H r = Σ f_k v_k, where v are the rows s_0, z_0, s_1, …."""
        return (self.of_q + self.of_s).view(len(self.q), 1, -1)


class _Way(torch.autograd.Function):
    """rows s_0, z_0, …, s_t, … [B, n, L] → the same rows, and the sum of the steps times their scales [B, L]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: _Buffer) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.n, ctx.buffer = rows.shape[1], buffer
        with torch.autocast(rows.device.type, enabled=False):
            way = torch.bmm(buffer.steps(ctx.n).mT, buffer.rows[:, : ctx.n : 2]).squeeze(1)
        return buffer.first(ctx.n), way

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        (own, of_way), buffer, n = gradients, ctx.buffer, ctx.n
        if of_way is not None:
            own = torch.zeros_like(buffer.rows[:, :n]) if own is None else own
            own[:, 0::2].baddbmm_(buffer.steps(n), of_way.unsqueeze(1))
        return own, None


class _Advance(torch.autograd.Function):
    """From the rows s_0, z_0, …, s_{t−1}, r_{t−1} [B, 2t, L] and r_t to s_0, z_0, …, s_{t−1}, z_{t−1}, s_t, r_t.

    Backward: H is symmetric, so it is applied to v = τ s̄ too; the cotangent of H r is −v. Let e, p and b be for v what
    w, q and c are for r. Then vᵀ H r = pᵀ q + eᵀ D w, and its derivatives are

        Ȳ = −(q eᵀ + p wᵀ),   S̄ = v cᵀ + r bᵀ,   R̄ = −triu(c eᵀ + b wᵀ) + diag(e w).
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, r: Tensor, trust: Tensor | None, buffer: _Buffer, has_code: bool, constant: bool
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.buffer, ctx.n, ctx.has_code, ctx.constant = buffer, rows.shape[1], has_code, constant
        is_new, f = buffer.is_last(ctx.n), None
        row = r.unsqueeze(1)
        if is_new and has_code:
            buffer.write_change(row)
        if ctx.n:
            vectors, pairs = buffer.rows[:, : ctx.n], buffer.pairs(ctx.n)
            solved = _Solved.of(row, torch.bmm(vectors[:, 0::2], row.mT), vectors, pairs, buffer.unit)
            f = solved.coefficients()
            ctx.save_for_backward(r, trust, f, *solved)
            if trust is not None:
                f = trust * f
        if is_new:
            buffer.write_step(row, f)
        return buffer.first(buffer.n_after(ctx.n))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (own,), buffer, n = gradients, ctx.buffer, ctx.n
        if own is None:
            return None, None, None, None, None, None
        own, of_s, of_code = own.tensor_split((n, n + 1), 1)
        of_s, of_trust = of_s / buffer.scale(n), None
        if not n:
            of_r = -of_s
        else:
            r, trust, f, *others = ctx.saved_tensors
            vectors, pairs, solved = buffer.rows[:, :n], buffer.pairs(n), _Solved(*others)
            inner = torch.bmm(vectors, of_s.mT)
            v, s_v = of_s, inner[:, 0::2]
            if trust is not None:
                of_trust = torch.dot(f.flatten(), inner.flatten()).view(1)
                v, s_v = v * trust, s_v * trust
            back = _Solved.of(v, s_v, vectors, pairs, buffer.unit)
            of_r = torch.baddbmm(of_s, back.coefficients(), vectors, beta=-1)
            if not ctx.constant:
                _subtract_gradients(own, vectors, buffer.gram(n), r.unsqueeze(1), v, pairs, solved, back)
                if ctx.has_code:
                    of_z = own[:, -1:].div_(buffer.scale(n - 1))
                    of_r += of_z
                    of_z.neg_()  # now it is the gradient of r_{t−1}
        if of_code.shape[1]:
            of_r += of_code
        return own, of_r.squeeze(1), of_trust, None, None, None


def _subtract_gradients(
    own: Tensor, vectors: Tensor, gram: Tensor, r: Tensor, v: Tensor, pairs: _Pairs, solved: _Solved, back: _Solved
) -> None:
    """Subtract the derivatives of vᵀ H r from those of the rows s_0, z_0, s_1, …, [B, 2t, L]."""
    _, ss, slope, mu, N, D, _ = pairs
    factors = torch.stack([back.of_q, solved.of_q, solved.of_s, back.of_s], 3)
    own.baddbmm_(factors.flatten(1, 2), torch.cat([solved.q, back.q, v, r], 1))

    of_D = back.w * solved.w
    of_R = torch.bmm(solved.c, back.w.mT).baddbmm_(back.c, solved.w.mT).triu_()
    of_R.diagonal(dim1=1, dim2=2).add_(of_D.squeeze(2))
    # Let H have γD in place of D, with γ = θ (1 + μ) = 1, and Y = θ (z + μs). It is then the same for any other number
    # in place of θ, so θ counts as a constant.
    t = N.shape[1]
    of_mu = (gram.view(-1, t, 2, t, 2)[:, :, 0, :, 0] * of_R).sum(1, keepdim=True).mT.addcmul_(D, of_D)
    of_mu.addcmul_(solved.inner[..., :1], back.w, value=-1).addcmul_(back.inner[..., :1], solved.w, value=-1)
    of_mu = of_mu.squeeze(2).mul_(N[..., 1]).div_(ss).masked_fill_(mu <= 0, 0.0)
    # M in M V, the derivatives of the inner products for all rows V. Its even rows are those of the steps.
    M = torch.zeros_like(gram)
    of_products = M.view(-1, t, 2, t, 2)[:, :, 0]
    torch.mul(of_R.unsqueeze(3), N.unsqueeze(1), out=of_products)
    diagonal = of_products.diagonal(dim1=1, dim2=2)
    diagonal[:, 1].sub_(of_mu, alpha=1 / (1 - DAMPING))
    diagonal[:, 0].addcmul_(of_mu, slope, value=1 / (1 - DAMPING))
    own.baddbmm_(M + M.mT, vectors, alpha=-1)
