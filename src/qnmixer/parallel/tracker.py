"""Counts the bytes of tensors, which are real or have shapes alone, and the parts of such a step."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from qnmixer.parallel.shapes import key_of, report_to, storage_of
from qnmixer.parallel.torch_private import TorchDispatchMode, is_traceable_wrapper_subclass_type, tree_leaves

AUTOCAST = {"32": None, "16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
HOST = torch.device("meta")
"""Where shapes are that offloading has moved to the host. Shapes on the CPU are those of the device."""


def n_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(t.nbytes for t in tensors)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    return [value for value in tree_leaves(list(optimizer.state.values())) if isinstance(value, Tensor)]


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer state and the gradients of a first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def batch_of(image: Tensor, weight: Tensor, y: Tensor) -> Any:
    """A batch of these images and sinograms."""
    n = len(image)
    ones = {key: torch.ones(n) for key in ("hu_offset", "hu_scale")}
    return {"image": image, "weight": weight, "sinogram": y, "sample": list(range(n)), "name": [""] * n} | ones


def autocast(precision: str) -> torch.autocast:
    """The autocast of a precision, on the CPU. Like Lightning's, it casts a weight again at each use."""
    dtype = AUTOCAST[precision]
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False)


class PeakTracker(TorchDispatchMode):
    """Counts the bytes of all tensors in the block, and the largest sum of these bytes: the peak.

    A storage counts once until it is freed, however many tensors share it. Tensors from before the block count only
    after `track`. The same code counts fake tensors (the plan) and real ones (a training step on a CPU). Buffers that
    C++ code allocates by itself do not count: workspaces of convolutions, messages of ddp, everything that
    torch.compile compiled.

    torch has a similar tracker, `torch.distributed._tools.mem_tracker`. Its import alone takes a second. It takes twice
    as long for each operator, and its hooks on modules prevent that graphs are freed.

    Shapes on `HOST` do not count either.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = dict.fromkeys(("parameters", "gradients", "optimizer", "operator", "activations"), 0)  # bytes
        self.peak = dict(self.current)  # the same when their sum was largest
        self._kinds: dict[int, str] = {}  # of each storage that is alive
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._hooks: list[Any] = []

    def track(self, *holders: nn.Module | torch.optim.Optimizer | Tensor) -> None:
        """Count tensors that exist already: weights, gradients and buffers of modules, states of optimizers, tensors.

        Later gradients of these modules count as gradients, not as activations.
        """
        for holder in holders:
            if isinstance(holder, nn.Module):
                for parameter in holder.parameters():
                    self._count(parameter, "parameters")
                    self._take_gradient(parameter)
                    if parameter.requires_grad:
                        self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take_gradient))
                for buffer in holder.buffers():
                    self._count(buffer, "operator")
            elif isinstance(holder, torch.optim.Optimizer):
                for value in optimizer_tensors(holder):
                    self._count(value, "optimizer")
            else:
                self._count(holder, "activations")

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes at once."""
        return sum(self.peak.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a wrapper calls this again with the tensors inside it
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._take_result(value)
        return result

    def __enter__(self) -> Self:
        self._is_told = report_to(self._take_result)
        return self if self._is_told else super().__enter__()

    def __exit__(self, *args: Any) -> None:
        if self._is_told:
            report_to(None)
        else:
            super().__exit__(*args)
        for hook in self._hooks:
            hook.remove()
        self._alive.clear()

    def _take_result(self, tensor: Tensor) -> None:
        if tensor.device != HOST:
            self._count(tensor, "activations")

    def _count(self, tensor: Tensor, kind: str) -> None:
        storage = storage_of(tensor)
        key, size = key_of(storage), storage.nbytes()
        if key in self._alive:
            return
        self._kinds[key] = kind
        # Of the storage, not the tensor: views share it, and it is freed with the last of them.
        self._alive[key] = weakref.ref(storage, partial(self._forget, key, size))
        self.current[kind] += size
        if sum(self.current.values()) > self.peak_bytes:
            self.peak = dict(self.current)

    def _forget(self, key: int, size: int, _: Any) -> None:
        del self._alive[key]
        self.current[self._kinds.pop(key)] -= size

    def _take_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        self._count(parameter.grad, "gradients")
        # The backward pass made it as a result like any other, so it was counted as an activation.
        storage = storage_of(parameter.grad)
        key = key_of(storage)
        earlier_kind, self._kinds[key] = self._kinds[key], "gradients"
        self.current[earlier_kind] -= storage.nbytes()
        self.current["gradients"] += storage.nbytes()
