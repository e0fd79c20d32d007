"""The share of a process in the batches of a user's loader, whatever sampler that has."""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

T = TypeVar("T")


class Share(Sampler[Any]):
    """Every N-th of the batches that a user's sampler yields. All processes draw the same ones.

    In the last round there may be fewer batches than processes. The others repeat one, with a weight of 0. `batches`:
    the sampler, which yields the indices of a batch; `seed`: gives that of its random numbers, for each epoch.
    """

    def __init__(self, batches: Any, seed: Callable[[], Sequence[int]], num_replicas: int, rank: int) -> None:
        self.batches, self.seed, self.num_replicas, self.rank = batches, seed, num_replicas, rank
        self.sampler = getattr(batches, "sampler", batches)  # Lightning looks here for one whose epoch it sets
        # Of the batches that were yielded and not yet used: with them the mean over all processes of the loss of a
        # batch is the mean over the slices of a round.
        self.weights: deque[float] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.weights.clear()
        drawn = drawn_alike(self.batches, self.seed())
        while a_round := [*islice(drawn, self.num_replicas)]:
            sizes = [len(batch) if isinstance(batch, Sequence) else 1 for batch in a_round]
            mine = min(self.rank, len(a_round) - 1)
            self.weights.append(self.num_replicas * sizes[mine] / sum(sizes) if mine == self.rank else 0.0)
            yield a_round[mine]

    def __len__(self) -> int:
        return -(-len(self.batches) // self.num_replicas)


def shared(loader: Any, seed: Callable[[], Sequence[int]], num_replicas: int, rank: int) -> Any:
    """A loader with the share of this process; the same loader, if it shares itself."""
    if shares_itself(loader):
        return loader
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    loader_of_share = copy.copy(loader)
    # A DataLoader refuses to set them. To build another one would lose what a subclass or a later torch adds.
    vars(loader_of_share)[name] = Share(getattr(loader, name), seed, num_replicas, rank)
    return loader_of_share


def shares_itself(loader: Any) -> bool:
    """Whether a loader has a DistributedSampler, also inside of its batch_sampler, or no sampler that we know."""
    has_known_sampler = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return not has_known_sampler or has_distributed_sampler(loader)


def has_distributed_sampler(loader: Any) -> bool:
    """Whether a loader has a DistributedSampler, also inside of its batch_sampler."""
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def share_of(loader: Any) -> Share | None:
    """The share of a loader from `shared`; None if it has none."""
    samplers = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    return next((sampler for sampler in samplers if isinstance(sampler, Share)), None)


def drawn_by(loader: DataLoader[Any], seed: Callable[[], Sequence[int]]) -> Any:
    """A loader whose batches are drawn with random numbers of their own, by a seed for each of its iterators.

    Of several workers each has other numbers: torch derives theirs from one that an iterator draws, Lightning adds the
    rank.
    """
    kind: Any = type(loader)

    class Drawn(kind):  # type: ignore[misc]  # of the user's kind: Lightning and callbacks may ask for it
        def _batches(self) -> Iterator[Any]:
            yield from kind.__iter__(self)

        def __iter__(self) -> Iterator[Any]:
            return drawn_alike(self._batches(), seed())

    drawn = copy.copy(loader)
    drawn.__class__ = Drawn
    return drawn


@contextmanager
def draws(seed: Sequence[int]) -> Iterator[None]:
    """Random numbers of its own for a block. Then Python's, NumPy's and torch's generators go on as they were."""
    outside = random_states()
    number = number_of(seed)
    torch.default_generator.manual_seed(number)  # not torch.manual_seed, which seeds the GPUs too
    np.random.seed(number)  # noqa: NPY002  # classes and samplers of users draw from it
    random.seed(number)
    try:
        yield
    finally:
        set_random_states(outside)


def drawn_alike(items: Iterable[T], seed: Sequence[int]) -> Iterator[T]:
    """The items, drawn with random numbers of their own: alike in all processes, whatever else these draw."""
    iterator: Iterator[T] | None = None
    with draws(seed):
        own = random_states()
    while True:
        outside = random_states()
        set_random_states(own)
        try:
            iterator = iter(items) if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        finally:
            own = random_states()
            set_random_states(outside)
        yield item


def number_of(seed: Sequence[int]) -> int:
    """A seed of 32 bits from several numbers."""
    return int(np.random.SeedSequence([*seed]).generate_state(1)[0])


def random_states() -> dict[str, Any]:
    """The states of Python, of torch on the CPU, and of NumPy, as plain data for weights_only=True."""
    # NumPy's global generator, because libraries draw from it.
    name, keys, *others = np.random.get_state(legacy=True)  # noqa: NPY002
    numpy = (name, np.asarray(keys).tolist(), *others)
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore what `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
