"""CUDA graphs on a CPU: what is captured is a list of operators with their tensors, and replaying computes them again.

The memory of a graph is fixed, and so it is here: each result is written to where the captured one lies. Whatever the
host decides or counts in Python is done once, at the capture, as on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CPUGraph(TorchDispatchMode):
    """In place of torch.cuda.CUDAGraph; captures while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.n_replayed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def replay(self) -> None:
        """Compute all again, in the memory of the capture."""
        self.n_replayed += 1
        for func, args, kwargs, result in self.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextmanager
def graphs_on_the_cpu() -> Iterator[list[CPUGraph]]:
    """torch.cuda.make_graphed_callables captures `CPUGraph`s in the block, and gives them here."""
    made: list[CPUGraph] = []

    def new() -> CPUGraph:
        made.append(CPUGraph())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", new)
        patch.setattr(torch.cuda, "graph", lambda graph, **_: graph)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda: None)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.cuda.graphs, "graph_pool_handle", lambda: None)
        yield made
