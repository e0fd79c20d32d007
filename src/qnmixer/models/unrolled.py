"""What every unrolled network is: a start, a step, and T."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from torch import Tensor, nn


class State(Protocol):
    """What one iteration hands to the next: a NamedTuple of tensors that holds at least the image."""

    @property
    def x(self) -> Tensor:
        """Current image x_t, [B, 1, H, W]."""


S = TypeVar("S", bound=State)


class UnrolledNetwork(nn.Module, ABC, Generic[S]):
    """x₀ → … → x_T, each from the last by `step`; the loop is written here once for every network.

    `step` takes everything it needs as arguments and keeps nothing, so that whatever runs it (recomputing,
    offloading, a pipeline over devices) can be put around it from outside.
    """

    def __init__(self, n_iterations: int) -> None:
        super().__init__()
        self.n_iterations = n_iterations

    @abstractmethod
    def start(self, y: Tensor) -> S:
        """The state that holds x₀, from a sinogram y [B, 1, V, D]."""

    @abstractmethod
    def step(self, t: int, y: Tensor, state: S) -> S:
        """The state after iteration t = 0 … T−1."""

    def states(self, y: Tensor) -> Iterator[S]:
        """Every state, the one of x₀ first: T + 1 of them."""
        state = self.start(y)
        yield state
        for t in range(self.n_iterations):
            state = self.step(t, y, state)
            yield state

    def iterates(self, y: Tensor) -> list[Tensor]:
        """x₀ … x_T, T + 1 images of [B, 1, H, W]."""
        return [state.x for state in self.states(y)]

    def forward(self, y: Tensor) -> Tensor:
        """x_T [B, 1, H, W] from a sinogram y [B, 1, V, D] in value × mm."""
        state = self.start(y)
        for t in range(self.n_iterations):
            state = self.step(t, y, state)
        return state.x
