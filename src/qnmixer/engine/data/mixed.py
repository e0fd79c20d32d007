"""Slices of several sources, each with its share of an epoch."""

from collections.abc import Sequence

import numpy as np

from qnmixer.engine.data.slices import FloatArray, SliceSource


class MixedSource:
    """A fixed number of slices per epoch from each of several sources, evenly interleaved.

    Slice n is in epoch n // length. The number n alone decides which slice it is: no process or worker can change that.
    An endless source gives new slices in each epoch. Slices of any other source are repeated in a new order each time.

    Args:
        sources: slices [S, S] in HU.
        counts: slices of each source in an epoch; 0 for an empty source.
        seed: of the orders.
    """

    endless = True

    def __init__(self, sources: Sequence[SliceSource], counts: Sequence[int], *, seed: int) -> None:
        self.sources, self.counts, self.seed = sources, counts, seed
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count])
        order = np.argsort(places, kind="stable")
        self._source = np.repeat(np.arange(len(counts)), counts)[order]  # of each slice of an epoch
        self._number = np.concatenate([np.arange(count) for count in counts])[order]  # within its source's part

    def __len__(self) -> int:
        return len(self._source)

    def load(self, index: int) -> FloatArray:
        """Slice [S, S] in HU."""
        k, of_source = self.place(index)
        return self.sources[k].load(of_source)

    def name(self, index: int) -> str:
        """The name that its source gives."""
        k, of_source = self.place(index)
        return self.sources[k].name(of_source)

    def place(self, index: int) -> tuple[int, int]:
        """The number of a slice's source, and its index there."""
        epoch, slot = divmod(index, len(self))
        k = int(self._source[slot])
        source, number = self.sources[k], epoch * self.counts[k] + int(self._number[slot])
        if source.endless:
            return k, number
        if self.counts[k] == len(source):
            return k, number % len(source)  # every epoch has all of them; the sampler sets their order
        turn, place = divmod(number, len(source))
        return k, int(np.random.default_rng([self.seed, k, turn, 0x313D]).permutation(len(source))[place])


def counts_of(shares: Sequence[float], lengths: Sequence[int]) -> list[int]:
    """Slices of each source in an epoch. The first source with a share is used exactly once; shares add up to 1."""
    length = next(round(n / share) for share, n in zip(shares, lengths, strict=True) if share)
    ends = [round(length * end) for end in np.cumsum(shares)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
