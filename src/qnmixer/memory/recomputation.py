"""Checkpoints whose second forward pass sees the buffers that the first one saw, and changes none.

torch's checkpoint alone would count the batches of BatchNorm twice, and update every counter and running mean twice.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qnmixer.parallel.buffers import Place, places_of, replaced
from qnmixer.parallel.torch_private import version_of


class Recomputation:
    """Runs parts of a network as checkpoints.

    A checkpoint may be inside another one. Buffers that never change cost one copy of each. A changed buffer is known
    by its version. BatchNorm, and code that writes to `.data`, change buffers without a new version. So until the first
    second pass the values are compared too.

    Args:
        network: in training, or to be trained. It may still be moved or sharded.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._places = places_of(network)
        self._copies: dict[Place, tuple[Tensor, int, Tensor]] = {}  # of a tensor, at a version, its value
        self._changing: set[Place] = set()
        self._silent: set[Place] = set()  # those that change at the same version
        self._compares = True

    def run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """function(*inputs), whose inner tensors the backward pass computes again instead of storing them."""
        if not torch.is_grad_enabled():
            return function(*inputs)
        if not self._places:
            return checkpoint(function, *inputs, use_reentrant=False)
        return self._run_with_buffers(function, *inputs)

    # `function` may be compiled, but the compiler takes no such contexts.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # torch's
    def _run_with_buffers(self, function: Callable[..., Any], *inputs: Any) -> Any:
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        values: dict[Place, Tensor] = {}
        return self._first_pass(values), _Reusable(lambda: self._second_pass(values))

    @contextmanager
    def _first_pass(self, values: dict[Place, Tensor]) -> Iterator[None]:
        """Store the values that the pass sees, and find out which it changes."""
        values |= {place: self._value(place) for place in self._places}
        originals = {place: (place.tensor, version_of(place.tensor)) for place in values}
        yield
        for place, (tensor, version) in originals.items():
            if place.tensor is not tensor or version_of(tensor) != version:
                self._changing.add(place)
            elif self._compares and not bool((tensor == values[place]).all()):
                self._changing.add(place)
                self._silent.add(place)

    def _value(self, place: Place) -> Tensor:
        """A copy of a buffer; the last one, if that still has its value."""
        tensor, (source, version, value) = place.tensor, self._copies.get(place, (None, 0, None))
        if value is not None and source is tensor and version == version_of(tensor) and place not in self._silent:
            return value
        if value is not None:
            self._changing.add(place)  # maybe outside of a checkpoint
        value = tensor.detach().clone()
        self._copies[place] = (tensor, version_of(tensor), value)
        return value

    @contextmanager
    def _second_pass(self, values: dict[Place, Tensor]) -> Iterator[None]:
        self._compares = self._compares and not self._network.training
        with replaced({place: values[place] for place in self._changing}):
            yield


class _Reusable(AbstractContextManager[None]):
    """A context that can be entered again: a graph may have several backward passes, each with a second pass."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)
