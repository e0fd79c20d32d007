"""The order of samples, as numbers that mean the same on every worker, rank and resumed run."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset, DistributedSampler


class Pick(NamedTuple):
    """A global sample number n = epoch · length + index, and what the sample counts for in the loss or the metric."""

    n: int
    weight: float


class _Numbered(Dataset[int]):
    """As many items as the sampler shares out; all that its base class asks of a dataset."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class EpochSampler(DistributedSampler[Pick]):
    """Shares an epoch out so that optimizer step k sees the same samples however many processes there are.

    Step k takes the next num_replicas · batch_size · accumulate samples of the epoch's order: of each batch of all
    processes the first gets the first batch_size, and so on. Nothing is left out, and nothing counts twice: where a
    process would have no part in a batch of the others, and so in their collectives, or a step fewer batches than all
    before it, there are samples of weight 0 instead.

    Weights are such that Σ weight · loss / batch_size, averaged over processes and accumulated batches, is the mean
    over the samples of the step; in the last, smaller step of an epoch they are above 1. Everything random is keyed by
    n, so workers hold no state.

    Being a DistributedSampler, Lightning leaves it alone (its own would pad and reshuffle) and calls `set_epoch`.

    Args:
        length: samples of one epoch.
        shuffle: a new order every epoch, by (seed, epoch).
        batch_size: of one process.
        seed: of the order.
        fixed: the same numbers every epoch, and every sample of weight 1: for validation and test.
        num_replicas: processes that share the samples; 1 for a single one.
        rank: which of them this is.
        accumulate: batches of an optimizer step.
        overfit: take the first so many samples over and over, with the same numbers, in place of all.
        batches: an epoch ends after so many batches of each process, or after this share of its steps; None: never.
        fill: make the last batch as large as all others, with samples of weight 0, for what needs fixed shapes.
    """

    def __init__(
        self,
        length: int,
        *,
        shuffle: bool,
        batch_size: int = 1,
        seed: int = 0,
        fixed: bool = False,
        num_replicas: int = 1,
        rank: int = 0,
        accumulate: int = 1,
        overfit: int | None = None,
        batches: int | float | None = None,
        fill: bool = False,
    ) -> None:
        super().__init__(_Numbered(length), num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        self.length, self.batch_size, self.fixed = length, batch_size, fixed
        self.overfit = overfit
        self.step_size = num_replicas * batch_size * accumulate
        self.fill = fill or accumulate > 1
        self.steps = -(-length // self.step_size)  # of an epoch
        if isinstance(batches, float):
            self.steps = max(1, int(batches * self.steps))
        elif batches is not None:
            self.steps = min(self.steps, max(1, batches // accumulate))
        self._start = (0, 0)

    def start_at(self, epoch: int, n_batches: int) -> None:
        """Begin in the middle: this epoch without its first batches; all later ones are whole."""
        self.epoch, self._start = epoch, (epoch, n_batches)

    def samples_until(self, step: int) -> int:
        """Samples that all processes together have been given after so many optimizer steps of a run."""
        epochs, steps = divmod(step, self.steps)
        return epochs * min(self.length, self.steps * self.step_size) + steps * self.step_size

    def __iter__(self) -> Iterator[Pick]:
        order = np.arange(self.length)
        if self.overfit is not None:
            order %= self.overfit
        elif self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.length)
        first = 0 if self.fixed or self.overfit is not None else self.epoch * self.length
        skipped = self._start[1] if self.epoch == self._start[0] else 0
        for position in list(self._positions())[skipped * self.batch_size :]:
            yield Pick(first + int(order[min(position, self.length - 1)]), self._weight(position))

    def _positions(self) -> Iterator[int]:
        """Places in the epoch's order that are this process's; those from `length` on are fillers."""
        stride = self.num_replicas * self.batch_size
        for start in range(self.rank * self.batch_size, self.steps * self.step_size, stride):
            end = start + self.batch_size
            yield from range(start, end if self.fill else max(start + 1, min(end, self.length)))

    def _weight(self, position: int) -> float:
        if position >= self.length:
            return 0.0
        begin_of_step = position - position % self.step_size
        return 1.0 if self.fixed else self.step_size / min(self.step_size, self.length - begin_of_step)

    def __len__(self) -> int:
        return sum(1 for _ in self._positions())
