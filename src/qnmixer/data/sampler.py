"""The order of samples, as numbers that mean the same on every worker, rank and resumed run."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Dataset, DistributedSampler


class _Numbered(Dataset[int]):
    """As many items as the sampler shares out; all that its base class asks of a dataset."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class EpochSampler(DistributedSampler[int]):
    """Yields global sample numbers n = epoch · length + index; everything random is keyed by n, so workers
    hold no state.

    Being a DistributedSampler, Lightning leaves it alone (its own would pad and reshuffle) and calls `set_epoch`.

    Args:
        length: samples of one epoch.
        shuffle: a new order every epoch, by (seed, epoch).
        seed: of the order.
        fixed: the same numbers every epoch, for validation and test.
        num_replicas: processes that share the samples; 1 for a single one.
        rank: which of them this is.
        even: leave out the few samples that would give some processes one more than others, as training needs.
    """

    def __init__(
        self,
        length: int,
        *,
        shuffle: bool,
        seed: int = 0,
        fixed: bool = False,
        num_replicas: int = 1,
        rank: int = 0,
        even: bool = False,
    ) -> None:
        super().__init__(_Numbered(length), num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        self.length, self.fixed = length, fixed
        self.used = length - length % num_replicas if even else length

    def __iter__(self) -> Iterator[int]:
        order = np.arange(self.length)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.length)
        first = 0 if self.fixed else self.epoch * self.length
        for index in order[self.rank : self.used : self.num_replicas]:
            yield first + int(index)

    def __len__(self) -> int:
        return len(range(self.rank, self.used, self.num_replicas))
