"""What every unrolled network is: a start, a step, and T."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterator
from typing import Generic, TypeVar

from torch import Tensor, nn

from qnmixer.errors import ConfigError
from qnmixer.physics import FanBeamProjector

S = TypeVar("S")
"""What one iteration hands to the next: tensors [B, …], and tuples of them."""


class UnrolledNetwork(nn.Module, ABC, Generic[S]):
    """x₀ → … → x_T, each from the last by `step`; the loop is written here once for every network.

    `step` takes everything it needs as arguments and keeps nothing, so that whatever runs the steps (recomputing,
    offloading, a pipeline over devices) can be put in the place of `loop` from outside.
    """

    title: str = "network"
    """What tables and pictures call it."""

    projector: FanBeamProjector
    """A, Aᵀ and FBP of the scan, which a subclass sets: it is what it is built with."""

    def __init__(self, n_iterations: int) -> None:
        super().__init__()
        self.n_iterations = n_iterations
        self.step_sizes = nn.ParameterList()
        """λ_t of networks that have them: they learn at a rate of their own, and are logged."""
        self.loop: Callable[[UnrolledNetwork[S], range, Tensor, S], S] = UnrolledNetwork.run

    @abstractmethod
    def start(self, y: Tensor) -> S:
        """The state that holds x₀, from a sinogram y [B, 1, V, D]."""

    @abstractmethod
    def step(self, t: int, y: Tensor, state: S) -> S:
        """The state after iteration t = 0 … T−1."""

    def image(self, state: S) -> Tensor:
        """x_t [B, 1, H, W] of a state, which is the state itself unless there is more in it."""
        assert isinstance(state, Tensor)
        return state

    def diagnostics(self, state: S) -> dict[str, Tensor]:
        """Scalars of the last state that are worth a line in the log at each validation, by name."""
        return {}

    def recomputed_parts(self) -> list[nn.Module]:
        """Parts whose inner features are large and cheap to build again; without random numbers."""
        return []

    def blocks(self) -> list[nn.Module]:
        """The parts that hold most weights, each called whole: what fsdp gathers, and torch compiles, at a time."""
        return []

    def states(self, y: Tensor) -> Iterator[S]:
        """Every state, the one of x₀ first: T + 1 of them."""
        state = self.start(y)
        yield state
        for t in range(self.n_iterations):
            state = self.step(t, y, state)
            yield state

    def trajectory(self, y: Tensor, shown: Container[int] | None = None) -> tuple[S, list[Tensor]]:
        """The last state, and every x_t; or those that are to be shown, as a solver may take hundreds of iterations."""
        images = []
        for t, state in enumerate(self.states(y)):
            if shown is None or t in shown:
                images.append(self.image(state))
        return state, images

    def iterates(self, y: Tensor) -> list[Tensor]:
        """x₀ … x_T, T + 1 images of [B, 1, H, W]."""
        return self.trajectory(y)[1]

    def forward(self, y: Tensor) -> Tensor:
        """x_T [B, 1, H, W] from a sinogram y [B, 1, V, D] in value × mm."""
        return self.image(self.loop(self, range(self.n_iterations), y, self.start(y)))

    def run(self, iterations: range, y: Tensor, state: S) -> S:
        """The state after some iterations in a row."""
        for t in iterations:
            state = self.step(t, y, state)
        return state


def check_choice(argument: str, value: str, choices: Collection[str]) -> None:
    """Raise ConfigError for a word that would be taken for one of the others in silence."""
    if value not in choices:
        raise ConfigError(f"{argument}={value} is not known: choose {' or '.join(choices)}")
