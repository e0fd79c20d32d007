"""Sparse products as torch operators, linear maps as differentiable functions, and large matrices on disk.

The first run of a scan builds its matrices, and later ones map the files into memory. They are in
`$XDG_CACHE_HOME/qnmixer/matrices` (or `~/.cache`). A file is written under another name, then renamed. One process
builds while others wait. A file whose checksum is wrong is built again; checking 100 MB takes 0.05 s. If the disk is
full or read-only, only the caching is lost. Nothing is removed: the user may do that at any time.
"""

import inspect
import json
import warnings
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import embedding_bag

from qnmixer.files import default_cache_dir, digest, make_own_folder
from qnmixer.physics.geometry import FanBeamGeometry

# Products

# Only products with dense matrices are used here, and they are stable. Torch 2.11 warns of checks despite the argument.
_UNNEEDED = "Sparse (CSR tensor support is in beta|invariant checks are implicitly disabled)"
# For the whole process: `catch_warnings` around each product is not safe in threads.
warnings.filterwarnings("ignore", message=_UNNEEDED, category=UserWarning)
# Torch warns once a process: here, because pytest forgets the filter before it runs the tests of a project.
torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), device="cpu")
_WIDE = 16
"""Columns from which torch's embedding bag, a sparse product with prefetching, is faster than the CSR product."""


def _csr_product(starts: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """M X for a CSR matrix M and contiguous X [columns of M, n].

    One column goes by the matrix–vector product, which is 1.6–2 times faster.
    """
    # The best kernel on a GPU would read no matrix. A thread for each ray (A) or pixel (Aᵀ, FBP) would compute its
    # weights, and image and sinogram alone would pass through memory. At 256 × 256 with 32 views the matrix makes that
    # 22 times as many bytes for one image, 2.3 for sixteen. There is no Triton kernel here: one that reads the matrix
    # saves only the two gathers. One without it would have to repeat the float64 lengths of `system_matrix` bit by bit.
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


def full_product(a: Tensor, b: Tensor) -> Tensor:
    """A B of matrices in the full precision of their dtype, without TF32. It is not differentiable."""
    return torch.ops.qnmixer.full_product(a, b)


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


def _define(name: str, arguments: str, product: Callable[..., Tensor], shape: Callable[..., Tensor]) -> None:
    """Make a product a torch operator, so that fake tensors and the compiler pass it without a CSR tensor."""
    torch.library.define(f"qnmixer::{name}", f"({arguments}) -> Tensor")
    torch.library.impl(f"qnmixer::{name}", ("cpu", "cuda"), product)
    torch.library.register_fake(f"qnmixer::{name}", shape)


_define(
    "csr_product", "Tensor starts, Tensor indices, Tensor values, Tensor x", _csr_product,
    lambda starts, indices, values, x: x.new_empty(len(starts) - 1, x.shape[1]),
)  # fmt: skip
_define("full_product", "Tensor a, Tensor b", _full_product, lambda a, b: a.new_empty(len(a), b.shape[1]))


# Linear maps

LinearMap = Callable[[Tensor], Tensor]


def apply_linear(x: Tensor, apply: LinearMap, transpose: LinearMap) -> Tensor:
    """Apply a linear map to x, differentiable any number of times by means of its transpose; autocast is off inside."""
    return _ApplyLinear.apply(x, apply, transpose)


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


# Torch asks for it each time the function is applied; to derive it again takes longer than the rest of that.
_ApplyLinear.forward.__signature__ = inspect.signature(_ApplyLinear.forward)  # type: ignore[attr-defined]

# Building a matrix

Triples = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows, columns and values of a sparse matrix."""


class Csr(NamedTuple):
    """A sparse matrix: starts [rows + 1] of each row's indices (columns) [nnz] and values [nnz]; float32 values."""

    starts: np.ndarray
    indices: np.ndarray
    values: np.ndarray


def in_threads(part: Callable[[int, int], Triples], n: int, step: int) -> Triples:
    """Those of part(first, last) for all numbers below n, `step` at a time, in as many threads as torch has."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        parts = pool.map(lambda start: part(start, min(start + step, n)), range(0, n, step))
        rows, columns, values = map(np.concatenate, zip(*parts, strict=True))
    return rows, columns, values


def to_csr(triples: Triples, n_rows: int, n_columns: int) -> Csr:
    """The matrix of rows, columns and values in any order; no place occurs twice."""
    rows, columns, values = triples
    index = np.int32 if max(len(values), n_columns) < 2**31 else np.int64  # products with int64 are 2–3 times slower
    # torch sorts whole numbers by radix, six times faster than numpy.
    order = torch.sort(torch.from_numpy(rows.astype(np.int64) * n_columns + columns))[1].numpy()
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n_rows))])
    return Csr(starts.astype(index), columns[order].astype(index, copy=False), values[order])


def transpose_csr(matrix: Csr, n_columns: int, n_blocks: int = 1) -> Csr:
    """Transpose of a matrix, block by block: [M_0 M_1 …] becomes [M_0ᵀ M_1ᵀ …].

    Args:
        matrix: blocks side by side, [rows, n_blocks · n_columns].
        n_columns: columns of a block.
        n_blocks: how many.
    """
    n_rows = len(matrix.starts) - 1
    rows = np.repeat(np.arange(n_rows, dtype=np.int32), np.diff(matrix.starts))
    block, column = np.divmod(matrix.indices, n_columns)
    return to_csr((column, block.astype(np.int64) * n_rows + rows, matrix.values), n_columns, n_blocks * n_rows)


# Matrices on the disk

FORMAT = 3
"""Raise it when the layout or the values of the matrices change."""
WORTH_CACHING = 2**20
"""From this number of rays times pixels of a side on, a matrix is kept on disk: it takes about 0.1 s, and 10 MB."""
Arrays = Sequence[np.ndarray]
_small: dict[str, Arrays] = {}
"""Those of a few smaller scans, which a process often needs again: for a network, its evaluation, the plan."""


def cached(kind: str, geometry: FanBeamGeometry, build: Callable[[], Arrays]) -> Arrays:
    """What `build` gives for that kind and scan: of a large one from the disk, of a small one from memory."""
    key, arrays = _key(kind, geometry), None
    if geometry.n_distinct_views * geometry.n_distinct_bins * geometry.image_size < WORTH_CACHING:
        return _cached_in_memory(key, build)
    try:
        folder = default_cache_dir() / "matrices"
        make_own_folder(folder)
        path = folder / f"{digest(key, 32)}.safetensors"
        with FileLock(folder / "lock"):
            arrays = _read(path, key)
            if arrays is None:
                arrays = build()
                _write(path, key, arrays)
                arrays = _read(path, key) or arrays  # mapped, so that processes share the pages
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: no home, or a disk without locks
        reason = f"{error.strerror} for {error.filename}" if isinstance(error, OSError) else error
        warnings.warn(f"no cache on disk ({reason}): every start builds the matrices of the scan again", stacklevel=1)
    return arrays or build()


def _cached_in_memory(key: str, build: Callable[[], Arrays]) -> Arrays:
    """A copy of what `build` gives, which is kept; all are forgotten when a seventeenth comes."""
    if (arrays := _small.get(key)) is None:
        arrays = build()
        if len(_small) == 16:
            _small.clear()
        _small[key] = arrays
    return [array.copy() for array in arrays]


def _key(kind: str, geometry: FanBeamGeometry) -> str:
    """The identity of a file's content; 400 and 400.0 are the same. A parallel beam has no distances in it."""
    values = asdict(geometry)
    identity = {"format": FORMAT, "kind": kind, "distinct_views": geometry.n_distinct_views, "beam": values.pop("beam")}
    ignored = () if geometry.is_fan else ("source_to_axis", "axis_to_detector")
    return json.dumps(identity | {name: float(value) for name, value in values.items() if name not in ignored})


def _read(path: Path, key: str) -> Arrays | None:
    """The arrays of a file, mapped copy-on-write; None if it is missing, damaged or for another key."""
    if not path.is_file():  # opening a pipe would not end
        return None
    try:
        with safe_open(path, "pt") as file:
            arrays = [file.get_tensor(str(k)).numpy() for k in range(len(file.keys()))]
            if file.metadata() != {"key": key, "checksums": _checksums(arrays)}:
                return None
    except SafetensorError:
        return None
    return arrays


def _write(path: Path, key: str, arrays: Arrays) -> None:
    """Write a file. Only for the process that holds the lock, so that the name for the time being is nobody else's."""
    temporary = path.with_suffix(".tmp")
    try:
        tensors = {str(k): torch.from_numpy(array) for k, array in enumerate(arrays)}
        save_file(tensors, temporary, {"key": key, "checksums": _checksums(arrays)})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _checksums(arrays: Arrays) -> str:
    return " ".join(str(zlib.crc32(array.data)) for array in arrays)
