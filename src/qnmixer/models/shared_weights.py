"""Weights that every iteration uses: their gradients are summed first, and reach the weights once a backward pass."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class CachingModule(nn.Module):
    """A module that keeps what it computes from its weights, for the other iterations of a pass."""

    cache: dict[Any, Any] | None = None
    """Empty when a pass begins; None outside a pass, where the weights may change between two calls."""


class SharedWeights:
    """The weights of some modules during one pass through the iterations.

    Autograd adds the gradients of T uses of a weight one by one: T − 1 operators for each weight. On a GPU, and on
    small images everywhere, starting them takes longer than the additions.

    Here each iteration uses aliases of the weights. All aliases of an iteration come from one node of the graph, whose
    backward adds all their gradients to the sums by one operator. Each of these nodes has an edge to a last node.
    Autograd runs the last node after all of them. It returns the sums as the gradients of the weights. So hooks on
    weights, which ddp needs, run once for each weight.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        owners = [owner for module in modules for owner in module.modules()]
        self._places = [(owner, name) for owner in owners for name, p in owner._parameters.items() if _takes_part(p)]
        self._caches = [(owner, dict[Any, Any]()) for owner in owners if isinstance(owner, CachingModule)]
        self._sums = _Sums(len(self._places))
        weights = [owner._parameters[name] for owner, name in self._places]
        has_graph = weights and torch.is_grad_enabled()
        self.end = _End.apply(self._sums, *weights) if has_graph else torch.empty(0, requires_grad=True)
        """The output of the last node: an empty tensor."""

    def ending_at(self, end: Tensor) -> Self:
        """The same sums for a graph of its own, which ends at `end`. The caller connects it with `self.end`."""
        other = copy(self)
        other.end = end
        return other

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the modules use aliases of their weights, and caches, in the block. Enter it once for each iteration."""
        places = self._places if torch.is_grad_enabled() else []
        weights = [owner._parameters[name] for owner, name in places]
        try:
            for module, cache in self._caches:
                module.cache = cache
            if places:
                for (owner, name), alias in zip(places, _Use.apply(self.end, self._sums, weights), strict=True):
                    owner._parameters[name] = alias
            yield
        finally:
            for (owner, name), weight in zip(places, weights, strict=True):
                owner._parameters[name] = weight
            for module, _ in self._caches:
                module.cache = None


class _Sums:
    """The sums of the gradients of n weights."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._sums: list[Tensor | None] = []
        self._own: set[int] = set()  # the sums that are no other tensor's

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one iteration; None for a weight without one."""
        if not self._sums:
            self._sums = list(gradients)
            return
        sums, others, places = [], [], []
        for k, (total, gradient) in enumerate(zip(self._sums, gradients, strict=True)):
            if total is None:
                self._sums[k] = gradient
            elif gradient is not None:
                sums.append(total)
                others.append(gradient)
                places.append(k)
        if not places:
            return
        if self._own.issuperset(places):
            torch._foreach_add_(sums, others)
            return
        # Not in place: a gradient of the first iteration may be the gradient of another tensor too.
        for k, total in zip(places, torch._foreach_add(sums, others), strict=True):
            self._sums[k] = total
        self._own = set(places)

    def take(self) -> list[Tensor | None]:
        """Return the sums, and clear them for the next backward pass."""
        sums, self._sums, self._own = self._sums, [], set()
        return sums or [None] * self._n


def is_shared_weight(tensor: Tensor) -> bool:
    """Whether a tensor is an alias of a weight."""
    return isinstance(tensor.grad_fn, _Use._backward_cls)


def _takes_part(weight: nn.Parameter | None) -> bool:
    """False for the shards of FSDP2: it puts whole weights in their place when a module is called."""
    return weight is not None and weight.requires_grad and not is_traceable_wrapper_subclass(weight)


class _End(torch.autograd.Function):
    """An empty tensor that depends on the weights. Backward gives them their sums."""

    @staticmethod
    def forward(ctx: Any, sums: _Sums, *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sums = sums
        return weights[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.sums.take()


class _Use(torch.autograd.Function):
    """Aliases of weights, for one iteration. Backward adds their gradients to the sums."""

    @staticmethod
    def forward(ctx: Any, end: Tensor, sums: _Sums, weights: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums = sums
        return tuple(weight.detach() for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.sums.add(gradients)
        return None, None, None
