"""The share of a process in a user's loader: every batch of its own sampler once, whatever the sampler is."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from qnmixer.data.samplers import drawn_alike, share_of, shared

SLICES = torch.arange(10.0)
SKEWED = [0.0, 0, 0, 0, 1, 1, 1, 1, 1, 5]


class Shuffled(Sampler[int]):
    """Draws from Python and NumPy, and while it yields."""

    def __iter__(self) -> Iterator[int]:
        for k in range(7):
            yield (k + random.randrange(10) + int(np.random.randint(10))) % 10  # noqa: NPY002

    def __len__(self) -> int:
        return 7


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(SLICES, 2),
    "shuffled": lambda: DataLoader(SLICES, 3, shuffle=True),
    "without the rest": lambda: DataLoader(SLICES, 3, drop_last=True),
    "subset": lambda: DataLoader(SLICES, 2, sampler=SubsetRandomSampler(range(5))),
    "weighted": lambda: DataLoader(SLICES, 2, sampler=WeightedRandomSampler(SKEWED, 9)),
    "with replacement": lambda: DataLoader(SLICES, 2, sampler=RandomSampler(SLICES, replacement=True, num_samples=70)),
    "its own": lambda: DataLoader(SLICES, 2, sampler=Shuffled()),
    "batch_sampler": lambda: DataLoader(SLICES, batch_sampler=BatchSampler(SequentialSampler(SLICES), 4, False)),
    "batches of other sizes": lambda: DataLoader(SLICES, batch_sampler=[[0], [1, 2, 3], [4, 5]]),
    "whole batches": lambda: DataLoader(SLICES.reshape(5, 2), batch_size=None),
    "with workers": lambda: DataLoader(SLICES, 2, shuffle=True, num_workers=1, persistent_workers=True),
}


def of_rank(loader: DataLoader[Any], rank: int, n: int) -> list[tuple[list[float], float]]:
    """The batches of a process with their weights. Each process has random numbers in another state."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002
    own = shared(loader, lambda: [1, 2], n, rank)
    assert type(own) is type(loader)
    batches = []
    for k, batch in enumerate(own):
        assert k < len(own)
        batches.append((batch.reshape(-1).tolist(), share_of(own).weights.popleft()))
        torch.rand(rank + 1)  # dropout draws other numbers on each
        random.random()
    assert len(batches) == len(own)
    return batches


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_each_batch_of_the_sampler_is_on_one_device(name: str, n: int) -> None:
    loader: Any = LOADERS[name]()
    indices = drawn_alike(loader.batch_sampler or loader.sampler, [1, 2])
    drawn = [loader.dataset[torch.as_tensor(index)].reshape(-1).tolist() for index in indices]
    ranks = [of_rank(LOADERS[name](), rank, n) for rank in range(n)]
    assert len({len(batches) for batches in ranks}) == 1
    in_turn = [batch for a_round in zip(*ranks, strict=True) for batch in a_round]
    assert [batch for batch, weight in in_turn if weight] == drawn
    for a_round in zip(*ranks, strict=True):  # the mean over devices of weighted means is that over the slices
        mean = sum(weight * np.mean(batch) for batch, weight in a_round) / n
        assert mean == pytest.approx(np.mean([value for batch, weight in a_round if weight for value in batch]))


def test_the_random_numbers_of_a_run_stay_as_they_are() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    list(drawn_alike(DataLoader(SLICES, 2, sampler=Shuffled()).batch_sampler, [3]))
    list(drawn_alike(WeightedRandomSampler(SKEWED, 9), [3]))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # noqa: NPY002


def test_a_distributed_sampler_and_a_stream_share_themselves() -> None:
    sampler: Any = DistributedSampler(SLICES, num_replicas=2, rank=0)
    nested = DataLoader(SLICES, batch_sampler=BatchSampler(sampler, 2, False))
    for loader in (DataLoader(SLICES, 2, sampler=sampler), nested, DataLoader(ChainDataset([]), 2)):
        assert shared(loader, lambda: [1], 2, 0) is loader


def test_lightning_finds_the_sampler_whose_epoch_it_sets() -> None:
    sampler = Shuffled()
    batches = BatchSampler(sampler, 2, False)
    for loader in (DataLoader(SLICES, 2, sampler=sampler), DataLoader(SLICES, batch_sampler=batches)):
        assert shared(loader, lambda: [1], 2, 0).batch_sampler.sampler is sampler
