"""Weights that every iteration uses. Their gradients are added up apart, and reach the weights once a backward pass."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class SharedWeights:
    """The weights of some modules during one pass through the iterations.

    Autograd adds the gradients of T uses of a weight one by one: T − 1 operators for each weight. Here each iteration
    uses copies that share the memory of the weights. Their gradients meet in one node of the graph for an iteration,
    where one operator adds them all. The graph has an edge from each of these nodes to a last one, which backward
    reaches after all of them. It hands the sums to the weights, so that hooks on weights, as of ddp, still run once.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        owners = [owner for module in modules for owner in module.modules()]
        self._places = [(owner, name) for owner in owners for name, p in owner._parameters.items() if _takes_part(p)]
        self._sums: list[Tensor | None] = []
        weights = [owner._parameters[name] for owner, name in self._places]
        self._end = _End.apply(self, *weights) if weights and torch.is_grad_enabled() else None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The modules use copies of their weights while the block runs: once for each iteration."""
        if self._end is None:
            yield
            return
        weights = [owner._parameters[name] for owner, name in self._places]
        try:
            for (owner, name), copy in zip(self._places, _Use.apply(self._end, self, weights), strict=True):
                owner._parameters[name] = copy
            yield
        finally:
            for (owner, name), weight in zip(self._places, weights, strict=True):
                owner._parameters[name] = weight

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one iteration; None where it has none."""
        if not self._sums:
            self._sums = list(gradients)
            return
        both = [k for k, (a, b) in enumerate(zip(self._sums, gradients, strict=True)) if not (a is None or b is None)]
        # Not in place: the first gradients may be those of other tensors too.
        added = torch._foreach_add([self._sums[k] for k in both], [gradients[k] for k in both])  # type: ignore[arg-type]
        self._sums = [b if a is None else a for a, b in zip(self._sums, gradients, strict=True)]
        for k, value in zip(both, added, strict=True):
            self._sums[k] = value

    def take(self) -> list[Tensor | None]:
        """The sums; the next backward pass begins anew."""
        sums, self._sums = self._sums, []
        return sums or [None] * len(self._places)


def is_shared_weight(tensor: Tensor) -> bool:
    """Whether a tensor is one of the copies of a weight."""
    return isinstance(tensor.grad_fn, _Use._backward_cls)  # type: ignore[attr-defined]  # every Function has one


def _takes_part(weight: nn.Parameter | None) -> bool:
    """Not the shards of FSDP2, which puts whole weights in their place when a module is called."""
    return weight is not None and weight.requires_grad and not is_traceable_wrapper_subclass(weight)


class _End(torch.autograd.Function):
    """Nothing of weights. Backward gives them their sums."""

    @staticmethod
    def forward(ctx: Any, shared: SharedWeights, *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.shared = shared
        return weights[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.shared.take()


class _Use(torch.autograd.Function):
    """Copies of weights, for one iteration. Backward adds their gradients to the sums."""

    @staticmethod
    def forward(ctx: Any, end: Tensor, shared: SharedWeights, weights: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shared = shared
        return tuple(weight.detach() for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.shared.add(gradients)
        return None, None, None
