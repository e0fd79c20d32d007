"""Sparse products as torch operators, and linear maps as differentiable functions."""

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

LinearMap = Callable[[Tensor], Tensor]
Residual = Callable[[Tensor, Tensor | None], Tensor]
"""The map from x and y to B (A x − y). None as y means 0."""

_INT32_MAX = 2**31 - 1
_CHUNK = 2**21
"""Values transposed at a time; they stay in the cache."""
_WIDE = 16
"""Columns from which torch's embedding bag, a sparse product with prefetching, is faster than the CSR product."""

# Only products with dense matrices are used here, and they are stable. Torch 2.11 warns of checks despite the argument.
_UNNEEDED = "Sparse (CSR tensor support is in beta|invariant checks are implicitly disabled)"
warnings.filterwarnings("ignore", message=_UNNEEDED, category=UserWarning)


class Csr(NamedTuple):
    """A sparse matrix: starts [rows + 1] of each row's indices (columns) [nnz] and values [nnz]; float32 values."""

    starts: np.ndarray
    indices: np.ndarray
    values: np.ndarray


def _csr_product(starts: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """M X for a CSR matrix M and contiguous X [columns of M, n].

    One column goes by the matrix–vector product, which is 1.6–2 times faster.
    """
    # The best kernel on a GPU would read no matrix. A thread for each ray (A) or pixel (Aᵀ, FBP) would compute its
    # weights, and image and sinogram alone would pass through memory. At 256 × 256 with 32 views the matrix makes that
    # 22 times as many bytes for one image, 2.3 for sixteen. There is no Triton kernel here: one that reads the matrix
    # saves only the two gathers. One without it would have to repeat the float64 lengths of `rays` to the last bit.
    if x.shape[1] >= _WIDE and x.device.type == "cpu" and x.dtype == torch.float32:
        return embedding_bag(indices, x, starts, mode="sum", per_sample_weights=values, include_last_offset=True)
    if x.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        return _reproducible_product(starts, indices, values, x)
    matrix = torch.sparse_csr_tensor(starts, indices, values, (len(starts) - 1, len(x)), check_invariants=False)
    return (matrix @ x[:, 0])[:, None] if x.shape[1] == 1 else matrix @ x


def _reproducible_product(starts: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """The same product, with each row summed in a fixed order: torch's calls of cuSPARSE do not give equal bits.

    It needs a temporary tensor with one number for each value of M and each column of X.
    """
    return torch.segment_reduce(
        values[:, None] * x[indices], "sum", offsets=starts.to(indices.dtype), axis=0, initial=0, unsafe=True
    )


def _csr_product_shape(starts: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """An empty tensor like the product, for torch's fake tensors."""
    return x.new_empty(len(starts) - 1, x.shape[1])


def _define(name: str, arguments: str, product: Callable[..., Tensor], shape: Callable[..., Tensor]) -> None:
    """Make a product a torch operator, so that fake tensors and the compiler pass it without a CSR tensor."""
    torch.library.define(f"qnmixer::{name}", f"({arguments}) -> Tensor")
    torch.library.impl(f"qnmixer::{name}", ("cpu", "cuda"), product)
    torch.library.register_fake(f"qnmixer::{name}", shape)


def _full_product(a: Tensor, b: Tensor) -> Tensor:
    """A B of matrices. TF32, if it is allowed, is for convolutions and the products of networks only."""
    if not a.is_cuda:
        return a @ b
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return a @ b
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def full_product(a: Tensor, b: Tensor) -> Tensor:
    """A B of matrices in the full precision of their dtype, without TF32. It is not differentiable."""
    return torch.ops.qnmixer.full_product(a, b)


_define("csr_product", "Tensor starts, Tensor indices, Tensor values, Tensor x", _csr_product, _csr_product_shape)
_define("full_product", "Tensor a, Tensor b", _full_product, lambda a, b: a.new_empty(len(a), b.shape[1]))


class _ApplyLinear(torch.autograd.Function):
    """y = M x; the derivative applies Mᵀ through this same function, so it can be differentiated again."""

    @staticmethod
    def forward(x: Tensor, apply: LinearMap, transpose: LinearMap) -> Tensor:
        # Sparse products are missing or wrong in half precision, and AᵀAx passes the fp16 maximum.
        with torch.autocast(x.device.type, enabled=False):
            return apply(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, LinearMap, LinearMap], output: Tensor) -> None:
        _, ctx.map, ctx.transposed_map = inputs  # not ctx.apply: the autograd engine calls that

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _ApplyLinear.apply(gradients[0], ctx.transposed_map, ctx.map), None, None


def apply_linear(x: Tensor, apply: LinearMap, transpose: LinearMap) -> Tensor:
    """Apply a linear map to x, differentiable any number of times by means of its transpose; autocast is off inside."""
    return _ApplyLinear.apply(x, apply, transpose)


class _SymmetricResidual(torch.autograd.Function):
    """B (A x − y) for a symmetric B A: the derivative in x is this same map, with y = 0."""

    @staticmethod
    def forward(x: Tensor, y: Tensor | None, residual: Residual, b: LinearMap, b_t: LinearMap) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return residual(x, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.maps = inputs[2:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (gradient,), (residual, b, b_t) = gradients, ctx.maps
        for_x = _SymmetricResidual.apply(gradient, None, residual, b, b_t) if ctx.needs_input_grad[0] else None
        for_y = -apply_linear(gradient, b_t, b) if ctx.needs_input_grad[1] else None
        return for_x, for_y, None, None, None


def symmetric_residual(x: Tensor, y: Tensor | None, residual: Residual, b: LinearMap, b_t: LinearMap) -> Tensor:
    """B (A x − y), differentiable any number of times, for linear A and B whose product B A is symmetric; y=None: 0.

    `residual` computes it without a graph; b and b_t are B and Bᵀ. This is one node of the graph where `apply_linear`
    would need three: on small images starting them takes most of the time.
    """
    return _SymmetricResidual.apply(x, y, residual, b, b_t)


class FullPrecisionModule(nn.Module):
    """A module whose buffers follow `.to()` and `.double()`, but are never converted to half precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply a conversion to the buffers. Of a conversion to half precision, only the device is used."""
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, converted in self._buffers.items():
            original = exact[name]
            if converted is not None and original is not None and converted.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = original.to(converted.device)
        return self


def index_type(n_values: int) -> type[np.int32] | type[np.int64]:
    """The index type for so many values. int64 is 2–3 times slower, so it is used only above the range of int32."""
    return np.int32 if n_values <= _INT32_MAX else np.int64


def stack_rows(make: Callable[[int, int], Csr], n_rows: int, step: int, n_columns: int, at_most: int) -> Csr:
    """Build a matrix from its parts make(first, last) of `step` rows, in as many threads as torch has.

    Args:
        make: rows of the matrix, their indices in any order; called in several threads at once.
        n_rows, n_columns: shape of the matrix.
        at_most: an upper bound on its number of values. The unused part costs no memory.
    """
    starts = np.zeros(n_rows + 1, dtype=np.int64)
    # Linux gives memory to pages when they are first written, so that those beyond the end cost nothing.
    indices = np.empty(at_most, dtype=index_type(n_columns))
    values = np.empty(at_most, dtype=np.float32)
    for first, part in _made_ahead(make, n_rows, step):
        rows = np.repeat(np.arange(len(part.starts) - 1), np.diff(part.starts))
        key = (rows * n_columns + part.indices).astype(index_type(step * n_columns), copy=False)
        # torch sorts whole numbers by radix, six times faster than numpy, and in threads of its own.
        order = torch.sort(torch.from_numpy(key)).indices.numpy()
        before, after = starts[first], starts[first] + len(order)
        starts[first + 1 : first + len(part.starts)] = before + part.starts[1:]
        indices[before:after], values[before:after] = part.indices[order], part.values[order]
    index = index_type(max(starts[-1], n_columns))
    return Csr(starts.astype(index), indices[: starts[-1]].astype(index, copy=False), values[: starts[-1]])


def _made_ahead(make: Callable[[int, int], Csr], n_rows: int, step: int) -> Iterator[tuple[int, Csr]]:
    """Yield the first row and the matrix of each part, in order. As many parts are made ahead as there are threads."""
    ahead: deque[tuple[int, Future[Csr]]] = deque()
    with ThreadPoolExecutor(n_threads := torch.get_num_threads()) as pool:
        for first in range(0, n_rows, step):
            ahead.append((first, pool.submit(make, first, min(first + step, n_rows))))
            if len(ahead) > n_threads:
                done, part = ahead.popleft()
                yield done, part.result()
        for done, part in ahead:
            yield done, part.result()


def transpose_csr(matrix: Csr, n_columns: int, n_blocks: int = 1) -> Csr:
    """Transpose of a matrix, block by block: [M_0 M_1 …] becomes [M_0ᵀ M_1ᵀ …]; indices in order within each row.

    Args:
        matrix: blocks side by side, [rows, n_blocks · n_columns].
        n_columns: columns of a block.
        n_blocks: how many.
    """
    n_rows, n_values = len(matrix.starts) - 1, len(matrix.values)
    counts = _counts(matrix.indices, n_blocks * n_columns).reshape(n_blocks, n_columns)
    ends = np.cumsum(counts.T.ravel())
    # The place of the next value of each column of each block.
    free = (ends.reshape(n_columns, n_blocks).T - counts).ravel()
    indices = np.empty(n_values, dtype=index_type(max(n_values, n_blocks * n_rows)))
    starts = np.concatenate([[0], ends[n_blocks - 1 :: n_blocks]]).astype(indices.dtype)
    values = np.empty_like(matrix.values)
    for first in range(0, n_values, _CHUNK):
        last = min(first + _CHUNK, n_values)
        columns, order = (t.numpy() for t in torch.sort(torch.from_numpy(matrix.indices[first:last]), stable=True))
        counts = _counts(columns, len(free))
        place = np.arange(last - first) + np.repeat(free - np.cumsum(counts) + counts, counts)
        rows = np.repeat(np.arange(n_rows, dtype=indices.dtype), np.diff(np.clip(matrix.starts, first, last)))
        indices[place] = rows[order] + columns // n_columns * n_rows
        values[place] = matrix.values[first:last][order]
        free += counts
    return Csr(starts, indices, values)


def _counts(numbers: np.ndarray, below: int) -> np.ndarray:
    """How often each whole number from 0 occurs, int64 [below]."""
    counts = np.zeros(below, dtype=np.int64)
    for first in range(0, len(numbers), _CHUNK):
        counts += np.bincount(numbers[first : first + _CHUNK], minlength=below)
    return counts
