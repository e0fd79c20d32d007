"""Sparse products as torch operators, and linear maps as differentiable functions."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

LinearMap = Callable[[Tensor], Tensor]

_INT32_MAX = 2**31 - 1
_CHUNK = 2**21
"""Values transposed at a time; they stay in the cache."""

# Only products with dense matrices are used, the part of it that is settled.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta", category=UserWarning)


def _csr_product(starts: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """M X for a CSR matrix M and contiguous X [columns of M, n].

    One column goes by the matrix–vector product, which is 1.6–2 times faster.
    """
    matrix = _csr(starts, indices, values, len(x))
    return (matrix @ x[:, 0])[:, None] if x.shape[1] == 1 else matrix @ x


def _csr_product_shape(starts: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """An empty tensor like the product, for torch's fake tensors."""
    return x.new_empty(len(starts) - 1, x.shape[1])


def _csr_stack_product(starts: Tensor, indices: Tensor, values: Tensor, bounds: Sequence[int], y: Tensor) -> Tensor:
    """Σ_q of M_q Y, each moved q blocks of columns to the right: [rows of M_q, (2Q − 1)·n/Q] for Q matrices.

    `starts` is [Q, rows + 1]; M_q has the indices and values from bounds[q] to bounds[q + 1]. The product adds each
    share in place, so the Q·n columns of all the M_q Y never stand in memory.
    """
    if len(starts) == 1:
        return _csr_product(starts[0], indices, values, y)
    block = y.shape[1] // len(starts)
    total = torch.zeros_like(_csr_stack_product_shape(starts, indices, values, bounds, y))
    for q in range(len(starts)):
        part = slice(bounds[q], bounds[q + 1])
        matrix = _csr(starts[q], indices[part], values[part], len(y))
        total[:, q * block : q * block + y.shape[1]].addmm_(matrix, y)
    return total


def _csr_stack_product_shape(
    starts: Tensor, indices: Tensor, values: Tensor, bounds: Sequence[int], y: Tensor
) -> Tensor:
    """An empty tensor like the product of the stack, for torch's fake tensors."""
    quarters = len(starts)
    return y.new_empty(starts.shape[1] - 1, y.shape[1] // quarters * (2 * quarters - 1))


def _csr(starts: Tensor, indices: Tensor, values: Tensor, n_columns: int) -> Tensor:
    """A torch CSR tensor over the given arrays, without copying or checking them."""
    return torch.sparse_csr_tensor(starts, indices, values, (len(starts) - 1, n_columns), check_invariants=False)


def _define(name: str, arguments: str, product: Callable[..., Tensor], shape: Callable[..., Tensor]) -> None:
    """Make a product a torch operator, so that fake tensors and the compiler pass it without a CSR tensor."""
    torch.library.define(f"qnmixer::{name}", f"({arguments}) -> Tensor")
    torch.library.impl(f"qnmixer::{name}", ("cpu", "cuda"), torch.compiler.disable(product))
    torch.library.register_fake(f"qnmixer::{name}", shape)


_CSR = "Tensor starts, Tensor indices, Tensor values"
_define("csr_product", f"{_CSR}, Tensor x", _csr_product, _csr_product_shape)
_define("csr_stack_product", f"{_CSR}, int[] bounds, Tensor y", _csr_stack_product, _csr_stack_product_shape)


class _ApplyLinear(torch.autograd.Function):
    """y = M x; the derivative applies Mᵀ through this same function, so it can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, apply: LinearMap, transpose: LinearMap) -> Tensor:
        ctx.map, ctx.transposed_map = apply, transpose  # ctx.apply is taken: the engine calls it
        # Sparse products are missing or wrong in half precision, and AᵀAx passes the fp16 maximum.
        with torch.autocast(x.device.type, enabled=False):
            return apply(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _ApplyLinear.apply(gradients[0], ctx.transposed_map, ctx.map), None, None


def apply_linear(x: Tensor, apply: LinearMap, transpose: LinearMap) -> Tensor:
    """Apply a linear map to x, differentiable any number of times by means of its transpose; autocast is off inside."""
    return _ApplyLinear.apply(x, apply, transpose)


class FullPrecisionModule(nn.Module):
    """A module whose buffers follow `.to()`, `.double()` and the like, but stay as they are under half precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply a conversion to the buffers; of one to half precision, only the device."""
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, converted in self._buffers.items():
            original = exact[name]
            if converted is not None and original is not None and converted.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = original.to(converted.device)
        return self


def index_type(n_values: int) -> type[np.int32] | type[np.int64]:
    """Type of index for that many values: int64 is 2–3 times slower, and only for what int32 cannot count."""
    return np.int32 if n_values <= _INT32_MAX else np.int64


def transpose_csr(
    starts: np.ndarray, indices: np.ndarray, values: np.ndarray, n_columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CSR arrays of the transpose of a CSR matrix with that many columns; its indices are in order within each row."""
    rows = np.repeat(np.arange(len(starts) - 1, dtype=index_type(len(values))), np.diff(starts))
    rows_t, values_t = np.empty_like(rows), np.empty_like(values)
    starts_t = np.concatenate([[0], np.cumsum(np.bincount(indices, minlength=n_columns))])
    free = starts_t[:-1].copy()
    for start in range(0, len(values), _CHUNK):
        part = slice(start, start + _CHUNK)
        # torch sorts whole numbers by radix, six times faster than numpy.
        order = torch.sort(torch.from_numpy(indices[part]), stable=True).indices.numpy()
        counts = np.bincount(indices[part], minlength=n_columns)
        place = np.arange(len(order)) + np.repeat(free - np.cumsum(counts) + counts, counts)
        rows_t[place] = rows[part][order]
        values_t[place] = values[part][order]
        free += counts
    return starts_t.astype(rows.dtype), rows_t, values_t
