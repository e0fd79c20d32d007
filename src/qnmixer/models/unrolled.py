"""The base class of unrolled networks: a start, which may be FBP, a step, and T. Everything else works with them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Self, TypeAlias, TypeVar, get_args

from annotated_types import Ge, Le
from torch import Tensor, nn

from qnmixer.errors import ConfigError
from qnmixer.physics.turns import random_turn

if TYPE_CHECKING:
    from qnmixer.physics import FanBeamProjector

S = TypeVar("S")
"""What one iteration hands to the next: tensors [B, …], and tuples of them."""
Iterations = Annotated[int, Ge(1), Le(1000)]
"""The type of an argument `n_iterations`. Bounds at an argument are checked when a command line gives its value."""
Channels = Annotated[int, Ge(1), Le(1024)]
"""The type of an argument that is a number of features."""
DataTerm = Literal["fbp", "adjoint"]
"""The kinds of A†. fbp: filtered back-projection by the exact transpose (`filtered_adjoint`). adjoint: Aᵀ/‖A‖²."""
Projector: TypeAlias = "FanBeamProjector"
"""The type of an argument `projector`. It is a text, so that the file of a network does not import A."""
Regularization = Callable[..., Tensor]
"""(network, t, *images) → G_t, images [B, C, H, W]."""


class UnrolledNetwork(nn.Module, ABC, Generic[S]):
    """x₀ → … → x_T, each from the one before by `step`.

    `step` gets all its inputs as arguments and stores nothing. So `loop` can be replaced from outside, to recompute,
    offload or pipeline the steps.

    The arguments of a subclass are the keys of its config section, with the types, bounds and defaults that they have
    in `__init__`. With an argument `n_iterations` its T can be chosen.
    """

    title: str = "network"
    """Its name in tables and pictures."""

    has_weights: ClassVar[bool] = True
    """Whether it has weights to train."""

    projector: Projector
    """A, Aᵀ and FBP of the scan. A subclass sets it from its first argument."""

    data_term: DataTerm = "fbp"
    """A† of its steps λ_t A†(A x − y)."""

    def __init__(self, n_iterations: int) -> None:
        super().__init__()
        self.n_iterations = n_iterations
        self.step_sizes = nn.ParameterList()
        """λ_t, if the network has them. They are logged, and follow the scan where a trained network gets another."""
        self.step_key: tuple[int, int] = (0, 0)
        """Seed and optimizer step, set from outside in training. A network that draws random numbers draws them by this
        and t. Then all devices draw the same ones, and so does what is computed again."""
        self.loop: Callable[[UnrolledNetwork[S], range, Tensor, S], S] = UnrolledNetwork.run
        """Runs some iterations. `memory/modes.py` puts one that recomputes or offloads in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise ConfigError for a module or weight named like a method: torch would keep it, and the method hide it."""
        if isinstance(value, nn.Module | nn.Parameter) and hasattr(type(self), name):
            raise ConfigError(f"{type(self).__name__}.{name} is a method, so no module or weight can have that name")
        super().__setattr__(name, value)

    @classmethod
    def rules(cls, arguments: Mapping[str, Any]) -> None:
        """Check the rules between its arguments, before it is built. Raises ConfigError, which names the arguments.

        Args:
            arguments: all but the projector by name, given or default.
        """

    @classmethod
    def divisors(cls, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Numbers that must divide the image size, by the argument that sets each."""
        return {}

    def start(self, y: Tensor) -> S:
        """The state of x₀, from a sinogram y [B, 1, V, D]: by default FBP(y), of a network whose state is the image."""
        return self.projector.fbp(y)  # type: ignore[return-value]  # S is Tensor

    @abstractmethod
    def step(self, t: int, y: Tensor, state: S) -> S:
        """The state after iteration t = 0 … T−1."""

    def image(self, state: S) -> Tensor:
        """x_t [B, 1, H, W] of a state: by default the state, or the first of its tensors."""
        return state if isinstance(state, Tensor) else state[0]  # type: ignore[index]  # a tuple

    def blocks(self) -> list[nn.Module]:
        """The parts with most weights, each called as a whole. fsdp gathers, and torch compiles, one at a time.

        By default these are the members of its module lists.
        """
        return [block for part in self.children() if isinstance(part, nn.ModuleList) for block in part]

    def large_parts(self) -> list[nn.Module]:
        """The parts inside an iteration whose inner features are large and quick to compute, each called as a whole.

        With `memory=recompute` and `memory=offload` the backward pass computes these features again, part by part. By
        default there are none.
        """
        return []

    def scalars(self) -> dict[str, nn.ParameterList]:
        """The few scalars that size a step, by their letter in the formula, an entry for each t. Records have them."""
        return {"lambda": self.step_sizes}

    def step_scalars(self) -> list[nn.Parameter]:
        """All `scalars`. They have a learning rate of their own, a multiple of the weights'."""
        return [scalar for part in self.scalars().values() for scalar in part]

    def first_order(self) -> Self | None:
        """The same network with H = I, to see what its second order adds; None for a network of first order."""
        return None

    def hidden_weights(self) -> list[nn.Parameter]:
        """Matrices and kernels for the orthogonal steps of `optimizer=muon`; AdamW changes all others.

        By default all those of the blocks but the last of each, which makes its image. Leave out layers that start at
        zero.
        """
        kernels = ([p for p in block.parameters() if p.ndim > 1] for block in self.blocks())
        return [p for weights in kernels for p in weights[:-1]]

    def diagnostics(self, state: S) -> dict[str, Tensor]:
        """Scalars of the last state, by name, which are logged at each validation."""
        return {}

    def forward(self, y: Tensor) -> Tensor:
        """x_T [B, 1, H, W] from a sinogram y [B, 1, V, D] in value × mm."""
        return self.image(self.loop(self, range(self.n_iterations), y, self.start(y)))

    def run(self, iterations: range, y: Tensor, state: S) -> S:
        """The state after some consecutive iterations."""
        for t in iterations:
            state = self.step(t, y, state)
        return state

    def states(self, y: Tensor) -> Iterator[S]:
        """Yield the T + 1 states, from that of x₀ on."""
        state = self.start(y)
        yield state
        for t in range(self.n_iterations):
            state = self.loop(self, range(t, t + 1), y, state)  # so a loss on the iterates may recompute them too
            yield state

    def trajectory(self, y: Tensor, shown: Container[int] | None = None) -> tuple[S, list[Tensor]]:
        """The last state, and x_t for each t, or for each t in `shown`: a solver may take thousands of iterations."""
        images = []
        for t, state in enumerate(self.states(y)):
            if shown is None or t in shown:
                images.append(self.image(state))
        return state, images

    def iterates(self, y: Tensor) -> list[Tensor]:
        """The `image` of each state, from x₀ to x_T: T + 1 images [B, 1, H, W].

        An image may be max(0, x_t), as QN-Mixer's. x_t itself is in `states`.
        """
        return self.trajectory(y)[1]


def at_image(state: Any, x: Tensor) -> Any:
    """The state of a network, with x [B, 1, H, W] in place of its image."""
    if isinstance(state, Tensor):
        return x.expand_as(state)
    x = x.expand_as(state[0])  # Learned Primal-Dual has several
    return state._replace(**{state._fields[0]: x}) if hasattr(state, "_replace") else (x, *state[1:])


def with_random_turns(regularization: Regularization) -> Regularization:
    """A method of a network that gives g⁻¹ G_t(g x) in training, with g one of the eight turns and flips of a square.

    If `network.symmetric`, g is another one in each iteration and optimizer step, after Terris, Moreau, Pustelnik and
    Tachella, "Equivariant plug-and-play image reconstruction", CVPR 2024, who draw it in reconstruction. Here g is the
    identity then: the network has learned to do without. All images of a batch have one g, which follows from
    `network.step_key` and t. So it does not depend on the number of devices, and is drawn again where an iteration is
    computed again.
    """

    @wraps(regularization)
    def under_a_turn(network: Any, t: int, *images: Tensor) -> Tensor:
        if not (network.symmetric and network.training):
            return regularization(network, t, *images)
        g = random_turn(*network.step_key, t)
        return g.turn_back(regularization(network, t, *map(g.turn, images)))

    return under_a_turn


def check_choices(network: type[nn.Module], arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value that is not in the Literal of its argument: it would silently mean another one."""
    for name, hint in network.__init__.__annotations__.items():
        if getattr(hint, "__origin__", None) is Literal and arguments[name] not in (choices := get_args(hint)):
            raise ConfigError(f"{name}={arguments[name]} is not known: choose {' or '.join(map(str, choices))}")
