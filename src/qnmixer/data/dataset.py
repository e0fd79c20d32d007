"""Slices in the form that the network needs, and their order.

Each is square and scaled: HU = offset + scale · x, and a sample has both numbers. The order is one of numbers that mean
the same in every worker, rank and resumed run.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from qnmixer.data.samplers import draws
from qnmixer.data.slices import SliceSource
from qnmixer.physics.units import FloatArray
from qnmixer.settings.data import DataConfig


class Scaling(NamedTuple):
    """HU = offset + scale · x."""

    offset: float
    scale: float

    def to_unit(self, hu: FloatArray, *, clip: bool = True) -> FloatArray:
        """x of a slice; with `clip`, HU beyond x = 0 or 1 count as 0 or 1."""
        x = (hu - np.float32(self.offset)) / np.float32(self.scale)
        return np.clip(x, 0, 1) if clip else x


def scaling_of(config: DataConfig, hu: FloatArray) -> Scaling:
    """The scaling of a slice by `data.scaling`: with "attenuation" the same for all slices, air is 0 and hu_max is 1.

    With "minmax", as in the paper, its lowest value is 0 and its highest is 1. A constant slice becomes 0.
    """
    if config.scaling == "attenuation":
        return Scaling(-1000.0, config.hu_max + 1000.0)
    low, high = float(hu.min()), float(hu.max())
    return Scaling(low, high - low or 1.0)


class Pick(NamedTuple):
    """A global sample number n = epoch · length + index, the weight of the sample in the loss or the metric, and the
    number of the optimizer step that it is for."""

    n: int
    weight: float
    step: int = 0


class EpochSampler(DistributedSampler[Pick]):
    """Shares an epoch so that optimizer step k sees the same samples with any number of processes.

    Step k takes the next num_replicas · batch_size · accumulate samples of the epoch's order. In each batch over all
    processes the first process gets the first batch_size samples, and so on. No sample is left out or counted twice. A
    process without a sample gets samples of weight 0, so it takes part in the collectives of the others.

    Weights are such that the mean of weight · loss over a batch, averaged over processes and accumulated batches, is
    the mean over the samples of the step. In the last, smaller step of an epoch they may be above or below 1.

    Lightning does not replace this sampler, because it is a DistributedSampler, and calls its `set_epoch`. Lightning's
    own sampler would pad and reshuffle.
    """

    def __init__(
        self,
        length: int,  # samples of one epoch
        *,
        shuffle: bool,  # a new order every epoch, by (seed, epoch)
        batch_size: int = 1,  # of one process
        seed: int = 0,  # of the order
        fixed: bool = False,  # the same numbers every epoch, and every sample of weight 1: for validation and test
        num_replicas: int = 1,  # processes that share the samples
        rank: int = 0,  # the number of this process
        accumulate: int = 1,  # batches of an optimizer step
        overfit: int | None = None,  # use only this number of samples, again and again, with the same numbers
        batches: int | float | None = None,  # an epoch ends after so many, or this share of its steps; None: never
        fill: bool = False,  # fill the last batch with samples of weight 0, for code that needs fixed shapes
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
        start = 0 if self.fixed or self.overfit is not None else self.epoch * self.length
        skipped = self._start[1] if self.epoch == self._start[0] else 0
        # Skipped by number, so a resumed run loads nothing that it will not use.
        for positions in self._batches()[skipped:]:
            for position in positions:
                n = start + int(order[min(position, self.length - 1)])
                step = 0 if self.fixed else self.epoch * self.steps + position // self.step_size
                yield Pick(n, self._weight(position, len(positions)), step)

    def _batches(self) -> list[range]:
        """Positions of this process's samples in the epoch's order. Positions from `length` on are fillers."""
        stride = self.num_replicas * self.batch_size
        starts = range(self.rank * self.batch_size, self.steps * self.step_size, stride)
        ends = (start + self.batch_size for start in starts)
        return [
            range(start, end if self.fill else max(start + 1, min(end, self.length)))
            for start, end in zip(starts, ends, strict=True)
        ]

    def _weight(self, position: int, n_in_batch: int) -> float:
        """The weight of a sample, so that batches and devices together give the mean over the slices of a step."""
        if position >= self.length or self.fixed:
            return float(position < self.length)
        begin_of_step = position - position % self.step_size
        return self.step_size / min(self.step_size, self.length - begin_of_step) * (n_in_batch / self.batch_size)

    def __len__(self) -> int:
        return sum(map(len, self._batches()))


class Sample(TypedDict):
    """One slice. HU = hu_offset + hu_scale · image."""

    image: NotRequired[Tensor]  # [1, S, S] float32 in [0, 1]; not where sinograms alone were measured
    fine: NotRequired[Tensor]  # the same slice in the same scale, [1, f·S, f·S], from which sinograms are simulated
    sinogram: NotRequired[Tensor]  # [1, V, D], value × mm, in place of `fine`: of a scanner, or simulated with noise
    scan: NotRequired[int]  # the number of the scan of its step, with data.views or data.arcs
    hu_offset: Tensor
    hu_scale: Tensor
    sample: int  # its number n
    weight: Tensor  # in the loss or the metric; 0 for a sample that only fills a batch
    name: str


class SliceView:
    """A part of a source. It is a source itself."""

    endless = False

    def __init__(self, source: SliceSource, indices: Sequence[int]) -> None:
        self.source: Any = source
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def load(self, index: int) -> FloatArray:
        """Slice [S, S] in HU."""
        return self.source.load(self.indices[index])

    def sinogram(self, index: int) -> FloatArray:
        """Measured sinogram [V, D], value × mm, of a source that has some."""
        return self.source.sinogram(self.indices[index])

    def name(self, index: int) -> str:
        """The name of the file or phantom."""
        return self.source.name(self.indices[index])


@dataclass(frozen=True)
class Part:
    """Slices [S, S] in HU of train, val or test."""

    source: SliceSource  # an endless one has new slices in every epoch
    patients: Sequence[int] = ()  # the number of the patient that each slice shows; empty if nobody knows
    fine: SliceSource | None = None  # the same slices on a finer grid, [f·S, f·S]
    # Whether the source has `sinogram(index)`, [V, D], value × mm; otherwise sinograms are simulated
    measured: bool = False
    scaling: Scaling | None = None  # that of slices with a unit of their own, whose x may be below 0 or above 1

    def __str__(self) -> str:
        n = len({*self.patients})
        people = f" of {n} patient{'s' * (n > 1)}" if n else ""
        return f"{len(self.source)} slices{people}"

    def only(self, indices: Sequence[int]) -> "Part":
        """Some of its slices."""
        return replace(
            self,
            source=SliceView(self.source, indices),
            patients=[self.patients[i] for i in indices] if self.patients else (),
            fine=self.fine and SliceView(self.fine, indices),
        )


class SliceDataset(Dataset[Sample]):
    """Slices by global sample number n = epoch · length + index."""

    def __init__(
        self,
        part: Part,
        config: DataConfig,  # what is done with them: scaling, augment, disc, seed
        stream: str,  # train, val or test: each has random numbers of its own
        *,
        augment: bool,  # flip and turn by (seed, n)
        measure: Callable[[Sample], Tensor] | None = None,  # makes a sinogram from `fine`, or from the measured one
    ) -> None:
        self.part, self.config, self.augment, self.measure = part, config, augment, measure
        self.stream, self.has_truth = stream, config.has_truth
        self.source: Any = part.source  # has `sinogram` too, if it has measured ones

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, item: Pick | int) -> Sample:
        n, weight, step = item if isinstance(item, Pick) else Pick(item, 1.0)
        index = n if self.source.endless else n % len(self.source)
        scaling, hu = self.part.scaling or Scaling(*self.config.hu_scaling), None
        if self.has_truth:
            hu = self._turned(self._drawn(self.source.load, index, n), n)
            brightest = float(hu.max())
            hu = paste_disc(hu, brightest) if self.config.disc else hu
            scaling = self.part.scaling or scaling_of(self.config, hu)
        sample: Sample = {
            "hu_offset": torch.tensor(scaling.offset, dtype=torch.float32),
            "hu_scale": torch.tensor(scaling.scale, dtype=torch.float32),
            "sample": n,
            "weight": torch.tensor(weight, dtype=torch.float32),
            "name": self.source.name(index),
        }
        if hu is not None:
            sample["image"] = _to_tensor(scaling.to_unit(hu, clip=self.part.scaling is None))
        if self.part.fine is not None:
            hu = self._turned(self._drawn(self.part.fine.load, index, n), n)
            hu = paste_disc(hu, brightest) if self.config.disc else hu
            sample["fine"] = _to_tensor(scaling.to_unit(hu))
        if self.stream == "train" and (n_scans := self.config.n_scans):
            # By the step: all samples of a step have one scan, on all devices, and again after a resume.
            sample["scan"] = int(np.random.default_rng([self.config.seed, step, 0x5CA4]).integers(n_scans))
        if self.part.measured:
            sample["sinogram"] = _to_tensor(self._drawn(self.source.sinogram, index, n))
        if self.measure is not None:
            sample["sinogram"] = self.measure(sample)
            sample.pop("fine", None)  # large, and no longer needed: workers would send it to the training process
        return sample

    def _drawn(self, method: Callable[[int], FloatArray], index: int, n: int) -> FloatArray:
        """What a method of the source returns. The random numbers that it draws depend on (seed, stream, n) only.

        So they are the same with any number of workers and processes, and after a resume. For one sample, `load` of
        both grids and `sinogram` draw the same ones: all three are of the same slice.
        """
        with draws([self.config.seed, zlib.crc32(self.stream.encode()), n]):
            return method(index)

    def _turned(self, hu: FloatArray, n: int) -> FloatArray:
        """The slice of sample number n; with augmentation in one of the eight symmetries of the square."""
        if not self.augment:
            return hu
        rng = np.random.default_rng([self.config.seed, n, 0xF11B])
        turned = np.rot90(hu, k=int(rng.integers(4)))
        return turned[:, ::-1] if rng.random() < 0.5 else turned


_DISC_CENTRE, _DISC_RADIUS = (0.75, 0.25), 0.085
"""Row and column, and radius, in widths of the image: from the paper's figure, the exact place inferred."""
_SUBPIXELS = 8


def paste_disc(hu: FloatArray, value: float) -> FloatArray:
    """A slice [S, S] with a disc of this value at its lower left. Pixels on the rim get a partial value."""
    size = len(hu)
    axis = (np.arange(size * _SUBPIXELS) + 0.5) / (size * _SUBPIXELS)
    row, column = (axis - centre for centre in _DISC_CENTRE)
    inside = row[:, None] ** 2 + column**2 < _DISC_RADIUS**2
    share = inside.reshape(size, _SUBPIXELS, size, _SUBPIXELS).mean(axis=(1, 3), dtype=np.float32)
    return hu + share * (np.float32(value) - hu)


def _to_tensor(x: FloatArray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))[None]
