"""The base class of unrolled networks: a start, a step, and T."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterator
from typing import Generic, TypeVar

from torch import Tensor, nn

from qnmixer.errors import ConfigError
from qnmixer.models.shared_weights import SharedWeights
from qnmixer.physics import FanBeamProjector

S = TypeVar("S")
"""The state between two iterations: tensors [B, …], and tuples of them."""


class UnrolledNetwork(nn.Module, ABC, Generic[S]):
    """x₀ → … → x_T, each from the previous one by `step`. The loop is written here once for every network.

    `step` gets all its inputs as arguments and stores nothing. So other code can replace `loop` from outside, to
    recompute, offload or pipeline the steps.
    """

    title: str = "network"
    """Its name in tables and pictures."""

    projector: FanBeamProjector
    """A, Aᵀ and FBP of the scan. A subclass sets it from its first argument."""

    def __init__(self, n_iterations: int) -> None:
        super().__init__()
        self.n_iterations = n_iterations
        self.step_sizes = nn.ParameterList()
        """λ_t, if the network has them. They have their own learning rate, and are logged."""
        self.loop: Callable[[UnrolledNetwork[S], range, Tensor, S], S] = UnrolledNetwork.run

    @abstractmethod
    def start(self, y: Tensor) -> S:
        """The state of x₀, from a sinogram y [B, 1, V, D]."""

    @abstractmethod
    def step(self, t: int, y: Tensor, state: S) -> S:
        """The state after iteration t = 0 … T−1."""

    def image(self, state: S) -> Tensor:
        """x_t [B, 1, H, W] of a state. By default the state is the image."""
        assert isinstance(state, Tensor)
        return state

    def diagnostics(self, state: S) -> dict[str, Tensor]:
        """Scalars of the last state, by name, which are logged at each validation."""
        return {}

    def recomputed_parts(self) -> list[nn.Module]:
        """Parts with large inner features that are cheap to compute again. They must draw no random numbers."""
        return []

    def blocks(self) -> list[nn.Module]:
        """The parts with most weights, each called as a whole. fsdp gathers, and torch compiles, one at a time."""
        return []

    def shared(self) -> list[nn.Module]:
        """The parts that every iteration uses."""
        return []

    def shared_weights(self, iterations: range) -> SharedWeights:
        """The weights of the parts of `shared`, for a pass through some iterations."""
        return SharedWeights(self.shared() if len(iterations) > 1 else [])

    def states(self, y: Tensor) -> Iterator[S]:
        """Yield the T + 1 states, from that of x₀ on."""
        state = self.start(y)
        yield state
        for t in range(self.n_iterations):
            state = self.step(t, y, state)
            yield state

    def trajectory(self, y: Tensor, shown: Container[int] | None = None) -> tuple[S, list[Tensor]]:
        """The last state, and x_t for each t, or for each t in `shown`: a solver may take thousands of iterations."""
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

    def run(self, iterations: range, y: Tensor, state: S, weights: SharedWeights | None = None) -> S:
        """The state after some consecutive iterations. weights: of a longer pass that contains these iterations."""
        weights = weights or self.shared_weights(iterations)
        for t in iterations:
            with weights.in_use():
                state = self.step(t, y, state)
        return state


def check_choice(argument: str, value: str, choices: Collection[str]) -> None:
    """Raise ConfigError if a value is not one of the choices. Without the check it would silently mean one of them."""
    if value not in choices:
        raise ConfigError(f"{argument}={value} is not known: choose {' or '.join(choices)}")
