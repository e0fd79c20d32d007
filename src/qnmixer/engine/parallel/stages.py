"""The T iterations of a network cut into stages, what they send to each other, and the loss at their end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from qnmixer.errors import ConfigError
from qnmixer.models.unrolled import UnrolledNetwork

Context = Callable[[], AbstractContextManager[Any]]
Logged = dict[str, tuple[Tensor, float, tuple[Any, ...], dict[str, Any]]]
"""What `training_step` logs in a batch, by name: the weighted sum over micro-batches, the sum of their weights, and the
other arguments of `log`."""

_OF_ITERATES = ("iterates", "states", "trajectory", "run")
"""Methods of a network that need all its iterations on one device."""


class Stage(nn.Module):
    """Consecutive iterations. The input and the output are one packed state [b, K]; y is an extra input.

    The first stage has no incoming state. The last stage returns x_T. The state is packed into one tensor, because
    every tensor costs a message each way.

    Args:
        network: of which it runs some iterations.
        iterations: these.
        incoming: the layout of the incoming state; None for the first stage.
        context: the autocast context of the forward pass.
    """

    def __init__(
        self,
        network: UnrolledNetwork[Any],
        iterations: range,
        incoming: "Packing | None",
        context: Context = nullcontext,
    ) -> None:
        super().__init__()
        self.network, self.iterations, self.incoming, self.context = network, iterations, incoming, context

    def forward(self, *packed: Tensor, y: Tensor) -> Tensor:
        """The state after these iterations; y [b, 1, V, D]."""
        with self.context():
            state = self.network.start(y) if self.incoming is None else self.incoming.unpack(packed[0])
            state = self.network.loop(self.network, self.iterations, y, state)
            if self.iterations.stop == self.network.n_iterations:
                return self.network.image(state)
            return Packing.of(state).pack(state)


def loss_of_part(module: Any, batch: Any, batch_idx: int, image: Tensor, first: int, logged: Logged) -> Tensor:
    """The part of a micro-batch in the loss of its batch, by the module's own `training_step`.

    Args:
        module: a LightningModule with `network` and `measure`. Its loss is a mean over the images of a batch.
        batch: with its sinograms.
        image: x_T of the micro-batch, which the stages have computed.
        first: position in the batch of the micro-batch's first sample.
        logged: takes what `training_step` logs.

    Raises ConfigError if `training_step` needs more of the network than x_T, or logs a torchmetrics Metric.
    """
    part = {key: value[first : first + len(image)] for key, value in batch.items()}
    share = len(image) / len(batch["image"])
    with _giving(module, part["sinogram"], image, partial(_add, logged, share)):
        return module.training_step(part, batch_idx) * share


@contextmanager
def _giving(module: Any, y: Tensor, image: Tensor, add: Callable[..., None]) -> Iterator[None]:
    """Within it, the module measures y, its network gives this image for y and no iterates, and `log` calls `add`."""

    def forward(given: Tensor) -> Tensor:
        if given is not y:
            raise ConfigError(
                "strategy=pipeline: training_step gives the network another sinogram than that of self.measure, but "
                "its iterations are on other devices: choose strategy=ddp"
            )
        return image

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError(
            "strategy=pipeline: training_step asks for the iterates, but they are on other devices: choose "
            "strategy=ddp memory=recompute"
        )

    # In the objects, so that hooks of `forward` still run.
    ours: list[tuple[Any, dict[str, Any]]] = [
        (module.network, {"forward": forward} | dict.fromkeys(_OF_ITERATES, refuse)),
        (module, {"measure": lambda batch, stream: y, "log": add}),
    ]
    for it, methods in ours:
        vars(it).update(methods)
    try:
        yield
    finally:
        for it, methods in ours:
            for name in methods:
                del vars(it)[name]


def _add(logged: Logged, share: float, name: str, value: Any, *args: Any, **options: Any) -> None:
    if isinstance(value, nn.Module):
        raise ConfigError(f"strategy=pipeline: training_step logs {name} as a metric object: log a number")
    number = torch.as_tensor(value, dtype=torch.float32).detach().reshape(())
    total, shares = logged[name][:2] if name in logged else (0, 0.0)  # perhaps in some micro-batches only
    logged[name] = (total + share * number, shares + share, args, options)


@dataclass(frozen=True)
class Packing:
    """The layout of a state, of any tensors [b, …], in one tensor [b, K]. Each tensor is stored once."""

    spec: TreeSpec
    places: tuple[int, ...]  # for each leaf, the index of its part
    parts: tuple["_Part", ...]
    dtype: torch.dtype

    @staticmethod
    def of(state: Any) -> "Packing":
        """The layout of states like this one."""
        leaves, spec = tree_flatten(state)
        unique = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        order = {key: k for k, key in enumerate(unique)}
        places = tuple(order[id(leaf)] if isinstance(leaf, Tensor) else -1 for leaf in leaves)
        parts = tuple(_Part(leaf.shape[1:], leaf.dtype, leaf.requires_grad) for leaf in unique.values())
        return Packing(spec, places, parts, torch.promote_types(torch.float32, parts[0].dtype))

    @property
    def width(self) -> int:
        """K, the number of values for each sample."""
        return sum(part.shape.numel() for part in self.parts)

    def pack(self, state: Any) -> Tensor:
        """Pack a state into [b, K]."""
        leaves, _ = tree_flatten(state)
        parts = {place: leaf for place, leaf in zip(self.places, leaves, strict=True) if place >= 0}
        return torch.cat([parts[k].reshape(len(parts[k]), -1).to(self.dtype) for k in range(len(parts))], dim=1)

    def unpack(self, packed: Tensor) -> Any:
        """Unpack the state. Constants become tensors that need no gradient again."""
        pieces = packed.split([part.shape.numel() for part in self.parts], dim=1)
        made = []
        for piece, part in zip(pieces, self.parts, strict=True):
            tensor = piece.view(-1, *part.shape).to(part.dtype)
            made.append(tensor if part.requires_grad else tensor.detach())
        return tree_unflatten([made[place] if place >= 0 else None for place in self.places], self.spec)


class _Part(NamedTuple):
    shape: torch.Size  # without the batch
    dtype: torch.dtype
    requires_grad: bool


def cut_evenly(n_iterations: int, n_stages: int) -> list[int]:
    """Iterations of each stage, as equal as possible. The last stage gets fewer, because it also computes the loss."""
    few, more = divmod(n_iterations, n_stages)
    return [few + 1] * more + [few] * (n_stages - more)


def ranges(cut: Sequence[int]) -> list[range]:
    """The iterations of each stage."""
    return [range(first, end) for first, end in pairwise([0, *accumulate(cut)])]


def layouts(network: UnrolledNetwork[Any], y: Tensor, context: Context) -> list[Packing]:
    """The layout of the state before each iteration, and after the last one: T + 1 of them.

    Iterations run one at a time, so this needs the memory of one iteration.
    """
    packings, state = [], None
    for t in range(network.n_iterations):
        with torch.enable_grad(), context():
            before = state if t else network.start(y)
            state = network.step(t, y, before)
        packings.append(Packing.of(before))
        state = _as_leaves(state)
    return [*packings, Packing.of(state)]


def _as_leaves(state: Any) -> Any:
    """The tensors of a state, detached from its graph, as another device would receive it."""
    leaves, spec = tree_flatten(state)
    known: dict[int, Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in known:
            known[id(leaf)] = leaf.detach().requires_grad_(leaf.requires_grad)
    return tree_unflatten([known[id(leaf)] if isinstance(leaf, Tensor) else None for leaf in leaves], spec)
