"""A sparse matrix beside its transpose, applied and differentiated as one linear map."""

import warnings
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

LinearMap = Callable[[Tensor], Tensor]

_INT32_MAX = 2**31 - 1
_CHUNK = 2**21

# Only products with dense matrices are used, the part of it that is settled.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta", category=UserWarning)


def _csr_product(row_starts: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """M X for a CSR matrix M and contiguous X [columns of M, n].

    One column goes by the matrix–vector product, which is 1.6–2 times faster.
    """
    shape = len(row_starts) - 1, len(x)
    matrix = torch.sparse_csr_tensor(row_starts, columns, values, shape, check_invariants=False)
    return (matrix @ x[:, 0])[:, None] if x.shape[1] == 1 else matrix @ x


def _csr_product_shape(row_starts: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """An empty tensor like the product, for torch's fake tensors."""
    return x.new_empty(len(row_starts) - 1, x.shape[1])


# A torch operator of its own, so that fake tensors (memory plans) and the compiler pass through without a CSR tensor.
torch.library.define("qnmixer::csr_product", "(Tensor row_starts, Tensor columns, Tensor values, Tensor x) -> Tensor")
torch.library.impl("qnmixer::csr_product", ("cpu", "cuda"), torch.compiler.disable(_csr_product))
torch.library.register_fake("qnmixer::csr_product", _csr_product_shape)


class _ApplyLinear(torch.autograd.Function):
    """y = M x; the derivative applies Mᵀ through this same function, so it can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, apply: LinearMap, transpose: LinearMap) -> Tensor:
        ctx.map, ctx.transposed_map = apply, transpose  # ctx.apply is taken: the engine calls it
        # Sparse products are missing or wrong in half precision, and AᵀAx passes the fp16 maximum (TRAPS.md).
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


class SparsePair(FullPrecisionModule):
    """M and Mᵀ as two stored CSR matrices, in buffers that follow `.to(device)` and stay out of `state_dict`.

    Values are float32; `.double()` makes them float64 (exactly the same numbers), `.half()` and `.bfloat16()` leave
    them float32. Mᵀ is stored, since transposing on the fly costs more than the product.

    Args:
        row_starts: int [rows + 1], CSR row pointer of M.
        columns: int [nnz], column of each value.
        values: float32 [nnz].
        n_columns: number of columns of M.
    """

    row_starts: Tensor
    columns: Tensor
    values: Tensor
    column_starts: Tensor
    rows: Tensor
    values_t: Tensor

    def __init__(self, row_starts: np.ndarray, columns: np.ndarray, values: np.ndarray, n_columns: int) -> None:
        super().__init__()
        # int64 indices are 2–3 times slower: they are only for matrices that int32 cannot count.
        index = np.int32 if len(values) <= _INT32_MAX else np.int64
        matrix = row_starts.astype(index), columns.astype(index, copy=False), values
        transposed = _transpose(*matrix, n_columns)
        # Transposed back, each row's columns come in order, as CSR asks.
        matrix = _transpose(*transposed, len(row_starts) - 1)
        names = ("row_starts", "columns", "values", "column_starts", "rows", "values_t")
        for name, array in zip(names, matrix + transposed, strict=True):
            self.register_buffer(name, torch.from_numpy(array), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """M x for x [columns, n] of the values' dtype."""
        return torch.ops.qnmixer.csr_product(self.row_starts, self.columns, self.values, x)

    def transpose(self, y: Tensor) -> Tensor:
        """Mᵀ y for y [rows, n] of the values' dtype."""
        return torch.ops.qnmixer.csr_product(self.column_starts, self.rows, self.values_t, y)


def _transpose(
    starts: np.ndarray, indices: np.ndarray, values: np.ndarray, n_columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CSR arrays of the transpose of a CSR matrix with that many columns, in chunks that stay in the cache."""
    rows = np.repeat(np.arange(len(starts) - 1, dtype=indices.dtype), np.diff(starts))
    rows_t, values_t = np.empty_like(indices), np.empty_like(values)
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
    return starts_t.astype(starts.dtype), rows_t, values_t
