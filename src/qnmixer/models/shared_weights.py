"""Weights that every iteration uses: their gradients are summed first, and reach the weights once a backward pass.

So do the gradients of further weights, which follow from these by a function: see `DerivingModule`.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import repeat
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Function = Callable[..., Sequence[Tensor]]
"""From weights to further weights.

Backward calls it again, outside autocast. So it must draw no random numbers, and use no operator that autocast casts.
Its gradients must reach its arguments only.
"""


class Derived(NamedTuple):
    """The results of a function of weights."""

    values: Sequence[Tensor]
    places: Sequence[int] | None = None
    """Where their gradients are summed. None: they need none, or autograd goes through the function by itself."""


class DerivingModule(nn.Module):
    """A module that derives further weights from its weights: once for all iterations of a pass."""

    of_pass: "SharedWeights | None" = None
    """The pass that runs now. None outside a pass, where the weights may change between two calls."""

    def cache(self) -> dict[Hashable, Any]:
        """What it keeps for the other iterations of a pass."""
        return {} if self.of_pass is None else self.of_pass.caches[self]

    def derive(self, key: Hashable, function: Function, *weights: Tensor) -> Derived:
        """function(*weights). In a pass, forward calls it once for each key, and backward too.

        All calls with one key must have the same function and weights.
        """
        if torch.compiler.is_compiling() or self.of_pass is None:
            return Derived(function(*weights))
        return self.of_pass.derive(self, key, function, weights)

    def used(self, derived: Sequence[Derived]) -> list[Tensor]:
        """The values of all. Their gradients are summed over the iterations, then go through the functions."""
        values = [value for it in derived for value in it.values]
        # torch.compile must not read `of_pass`: it would compile again for each kind of value.
        if torch.compiler.is_compiling() or self.of_pass is None or not torch.is_grad_enabled():
            return values
        return self.of_pass.used(values, [k for it in derived for k in it.places or repeat(None, len(it.values))])


class SharedWeights:
    """The weights of some modules during one pass through the iterations.

    Autograd adds the gradients of T uses of a weight one by one: T − 1 operators for each weight. On a GPU, and on
    small images everywhere, starting them takes longer than the additions.

    Here each iteration uses aliases of the weights. All aliases of an iteration come from one node of the graph, whose
    backward adds all their gradients to the sums by one operator. Each of these nodes has an edge to a last node.
    Autograd runs the last node after all of them. It returns the sums as the gradients of the weights. So hooks on
    weights, which ddp needs, run once for each weight.

    Weights that are derived from these have sums too. The last node takes them through the functions.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        owners = [owner for module in modules for owner in module.modules()]
        self._places = [(owner, name) for owner in owners for name, p in owner._parameters.items() if _takes_part(p)]
        self.caches: dict[DerivingModule, dict[Hashable, Any]] = {
            owner: {} for owner in owners if isinstance(owner, DerivingModule)
        }
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
        weights = [owner._parameters[name] for owner, name in self._places]
        aliases = weights
        try:
            for module in self.caches:
                module.of_pass = self
            if weights and torch.is_grad_enabled():
                aliases = _Use.apply(self.end, self._sums, range(len(weights)), weights)
                for (owner, name), alias in zip(self._places, aliases, strict=True):
                    owner._parameters[name] = alias
            # By identity: a module names a weight by what stands in its place now.
            self._place_of = {id(weight): place for place, weight in enumerate(aliases)}
            yield
        finally:
            if aliases is not weights:
                for (owner, name), weight in zip(self._places, weights, strict=True):
                    owner._parameters[name] = weight
            for module in self.caches:
                module.of_pass = None

    def derive(self, module: DerivingModule, key: Hashable, function: Function, weights: Sequence[Tensor]) -> Derived:
        """`DerivingModule.derive` in this pass."""
        places = [self._place_of.get(id(weight)) for weight in weights]
        if any(weight.requires_grad and place is None for weight, place in zip(weights, places, strict=True)):
            return Derived(function(*weights))  # whole weights of FSDP2: only autograd knows the way to the shards
        cache = self.caches[module]
        if key not in cache:
            cache[key] = self._sums.record(function, weights, places)
        found: Derived = cache[key]
        return found

    def used(self, values: Sequence[Tensor], places: Sequence[int | None]) -> list[Tensor]:
        """Aliases of the values that have a place, and the others."""
        summed = [(place, value) for place, value in zip(places, values, strict=True) if place is not None]
        aliases = iter(_Use.apply(self.end, self._sums, *zip(*summed, strict=True)) if summed else ())
        return [value if place is None else next(aliases) for place, value in zip(places, values, strict=True)]


class _Derivation(NamedTuple):
    """A function of weights, and the places of its weights and results.

    A weight that needs no gradient has no place.
    """

    function: Function
    weights: Sequence[Tensor]
    versions: Sequence[int]
    from_places: Sequence[int | None]
    to_places: range


class _Sums:
    """The sums of the gradients of weights, by their places.

    The first n places are those of the weights of a pass. Those of derived weights follow.
    """

    def __init__(self, n: int) -> None:
        self._n = self._n_places = n
        self._sums: dict[int, Tensor] = {}
        self._own: set[int] = set()  # the places of sums that may be written
        self._derivations: list[_Derivation] = []

    def record(self, function: Function, weights: Sequence[Tensor], places: Sequence[int | None]) -> Derived:
        """The results of a function of weights with these places. Backward calls the function again.

        It leaves no graph here. Otherwise the iteration that calls it would save more tensors than when a checkpoint
        recomputes it, because the results are then in the cache. torch does not allow this.
        """
        weights = [weight.detach() for weight in weights]
        values = function(*weights)
        if all(place is None for place in places) or any(weight.is_inference() for weight in weights):
            return Derived(values)  # no backward
        to_places = range(self._n_places, self._n_places + len(values))
        self._n_places = to_places.stop
        versions = [weight._version for weight in weights]
        self._derivations.append(_Derivation(function, weights, versions, places, to_places))
        return Derived(values, to_places)

    def add(self, places: Iterable[int], gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one iteration; None for a weight without one."""
        sums, others, again = [], [], []
        for place, gradient in zip(places, gradients, strict=True):
            if gradient is None:
                continue
            if (total := self._sums.get(place)) is None:
                self._sums[place] = gradient
            else:
                sums.append(total)
                others.append(gradient)
                again.append(place)
        if not again:
            return
        if self._own.issuperset(again):
            torch._foreach_add_(sums, others)
            return
        # Not in place: a gradient of the first iteration may be the gradient of another tensor too.
        self._sums.update(zip(again, torch._foreach_add(sums, others), strict=True))
        self._own.update(again)

    def take(self) -> list[Tensor | None]:
        """Return the sums of the weights of the pass, and clear all for the next backward pass."""
        self._through_functions()
        sums = [self._sums.get(place) for place in range(self._n)]
        self._sums, self._own = {}, set()
        return sums

    def _through_functions(self) -> None:
        """Add what the gradients of derived weights give to the weights."""
        leaves: dict[int, Tensor] = {}
        results: list[tuple[Tensor, Tensor]] = []
        for function, weights, versions, from_places, to_places in self._derivations:
            gradients = [self._sums.get(place) for place in to_places]
            if all(gradient is None for gradient in gradients):
                continue
            if versions != [weight._version for weight in weights]:
                raise RuntimeError("a weight was modified by an inplace operation between forward and backward")
            inputs = [
                weight if place is None else leaves.setdefault(place, weight.detach().requires_grad_())
                for weight, place in zip(weights, from_places, strict=True)
            ]
            with torch.enable_grad():
                values = function(*inputs)
            results += [(v, g) for v, g in zip(values, gradients, strict=True) if g is not None and v.requires_grad]
        if results:
            outputs, of_outputs = zip(*results, strict=True)
            self.add(leaves, torch.autograd.grad(outputs, list(leaves.values()), of_outputs, allow_unused=True))


def is_shared_weight(tensor: Tensor) -> bool:
    """Whether a tensor is an alias of a weight, or of a derived weight."""
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
    def forward(
        ctx: Any, end: Tensor, sums: _Sums, places: Iterable[int], weights: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.places = sums, places
        return tuple(weight.detach() for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:
        ctx.sums.add(ctx.places, gradients)
        return None, None, None, None
