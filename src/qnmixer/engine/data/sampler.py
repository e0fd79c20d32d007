"""The order of samples, as numbers that mean the same in every worker, rank and resumed run."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DistributedSampler


class Pick(NamedTuple):
    """A global sample number n = epoch · length + index, and the weight of the sample in the loss or the metric."""

    n: int
    weight: float


class EpochSampler(DistributedSampler[Pick]):
    """Shares an epoch so that optimizer step k sees the same samples with any number of processes.

    Step k takes the next num_replicas · batch_size · accumulate samples of the epoch's order. In each batch over all
    processes the first process gets the first batch_size samples, and so on. No sample is left out or counted twice. A
    process without a sample gets samples of weight 0, so it takes part in the collectives of the others.

    Weights are such that the mean of weight · loss over a batch, averaged over processes and accumulated batches, is
    the mean over the samples of the step. In the last, smaller step of an epoch they may be above or below 1.

    Lightning does not replace this sampler, because it is a DistributedSampler, and calls its `set_epoch`. Lightning's
    own sampler would pad and reshuffle.

    Args:
        length: samples of one epoch.
        shuffle: a new order every epoch, by (seed, epoch).
        batch_size: of one process.
        seed: of the order.
        fixed: the same numbers every epoch, and every sample of weight 1: for validation and test.
        num_replicas: processes that share the samples.
        rank: the number of this process.
        accumulate: batches of an optimizer step.
        overfit: use only this number of samples, again and again, with the same numbers.
        batches: an epoch ends after this number of batches of each process, or this share of its steps; None: never.
        fill: fill the last batch with samples of weight 0, for code that needs fixed shapes.
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
        dataset: Any = range(length)  # the base class needs nothing but its length
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
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
        """Start in the middle of this epoch, without its first batches. All later epochs are complete."""
        self.epoch, self._start = epoch, (epoch, n_batches)

    def samples_until(self, step: int) -> int:
        """Samples that all processes together have had after this number of optimizer steps of a run."""
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
        # Skipped by number, so a resumed run loads nothing that it will not use.
        for positions in self._batches()[skipped:]:
            for position in positions:
                yield Pick(first + int(order[min(position, self.length - 1)]), self._weight(position, len(positions)))

    def _batches(self) -> list[range]:
        """Positions of this process's samples in the epoch's order. Positions from `length` on are fillers."""
        stride = self.num_replicas * self.batch_size
        starts = range(self.rank * self.batch_size, self.steps * self.step_size, stride)
        ends = (start + self.batch_size for start in starts)
        return [
            range(start, end if self.fill else max(start + 1, min(end, self.length)))
            for start, end in zip(starts, ends, strict=True)
        ]

    def _weight(self, position: int, n: int) -> float:
        """The weight of a sample in its batch of n."""
        if position >= self.length or self.fixed:
            return float(position < self.length)
        begin_of_step = position - position % self.step_size
        return self.step_size / min(self.step_size, self.length - begin_of_step) * (n / self.batch_size)

    def __len__(self) -> int:
        return sum(map(len, self._batches()))
