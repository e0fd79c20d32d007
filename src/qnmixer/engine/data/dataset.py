"""Slices in the form that the network needs: scaled and square. Each sample has what converts it back to HU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from qnmixer.engine.config.data import DataConfig
from qnmixer.engine.data.sampler import Pick
from qnmixer.engine.data.scaling import Scaling, build_scaling, scaled_like
from qnmixer.engine.data.slices import FloatArray, SliceSource

_DISC_CENTRE, _DISC_RADIUS = (0.75, 0.25), 0.085
"""Row and column, and radius, in widths of the image: from the paper's figure, the exact place inferred."""
_SUBPIXELS = 8


class Sample(TypedDict):
    """One slice: image [1, S, S] float32 in [0, 1], its number n and its name. HU = hu_offset + hu_scale · image.

    `fine`: the same slice [1, f·S, f·S] with the same offset and scale, from which sinograms are simulated. `sinogram`:
    [1, V, D], value × mm, in place of `fine`: measured by a scanner, or simulated with noise by the dataset. `weight`:
    its weight in the loss or the metric; 0 for a sample that only fills a batch.
    """

    image: Tensor
    fine: NotRequired[Tensor]
    sinogram: NotRequired[Tensor]
    hu_offset: Tensor
    hu_scale: Tensor
    sample: int
    weight: Tensor
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
    """Slices [S, S] in HU of train, val or test.

    Attributes:
        source: the slices. An endless source has new ones in every epoch.
        patients: the number of the patient that each slice shows; empty if nobody knows.
        fine: the same slices on a finer grid, [f·S, f·S].
        measured: whether the source has `sinogram(index)`, [V, D], value × mm; otherwise sinograms are simulated.
        scaling: that of slices with a unit of their own.
    """

    source: SliceSource
    patients: Sequence[int | None] = ()
    fine: SliceSource | None = None
    measured: bool = False
    scaling: Scaling | None = None

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
    """Slices by global sample number n = epoch · length + index.

    Args:
        part: the slices.
        config: what is done with them: scaling, augment, disc, seed.
        augment: flip and turn by (seed, n).
        measure: makes the sinogram of a sample, in place of `fine`. Measured sinograms are taken as they are.
    """

    def __init__(
        self, part: Part, config: DataConfig, *, augment: bool, measure: Callable[[Sample], Tensor] | None = None
    ) -> None:
        self.part, self.config, self.augment, self.measure = part, config, augment, measure
        self.source: Any = part.source  # has `sinogram` too, if it has measured ones
        self.scaling = part.scaling or build_scaling(config.scaling, config.hu_max)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, item: Pick | int) -> Sample:
        n, weight = item if isinstance(item, Pick) else (item, 1.0)
        index = n if self.source.endless else n % len(self.source)
        hu = self._turned(self.source.load(index), n)
        brightest = float(hu.max())
        x, offset, scale = self.scaling.to_unit(paste_disc(hu, brightest) if self.config.disc else hu)
        sample: Sample = {
            "image": _to_tensor(x),
            "hu_offset": torch.tensor(offset, dtype=torch.float32),
            "hu_scale": torch.tensor(scale, dtype=torch.float32),
            "sample": n,
            "weight": torch.tensor(weight, dtype=torch.float32),
            "name": self.source.name(index),
        }
        if self.part.fine is not None:
            hu = self._turned(self.part.fine.load(index), n)
            hu = paste_disc(hu, brightest) if self.config.disc else hu
            sample["fine"] = _to_tensor(scaled_like(hu, offset, scale))
        if self.part.measured:
            sample["sinogram"] = _to_tensor(self.source.sinogram(index))
        elif self.measure is not None:
            sample["sinogram"] = self.measure(sample)
            sample.pop("fine", None)  # large, and no longer needed: workers would send it to the training process
        return sample

    def _turned(self, hu: FloatArray, n: int) -> FloatArray:
        """The slice of sample number n; with augmentation in one of the eight symmetries of the square."""
        if not self.augment:
            return hu
        rng = np.random.default_rng([self.config.seed, n, 0xF11B])
        turned = np.rot90(hu, k=int(rng.integers(4)))
        return turned[:, ::-1] if rng.random() < 0.5 else turned


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
