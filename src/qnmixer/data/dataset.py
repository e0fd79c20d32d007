"""Slices as the network gets them: scaled, square, with the way back to HU."""

from typing import TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from qnmixer.data.sampler import Pick
from qnmixer.data.scaling import Scaling
from qnmixer.data.slices import FloatArray, SliceSource


class Sample(TypedDict):
    """One slice: image [1, S, S] float32 in [0, 1]; HU = hu_offset + hu_scale · image; n; where it came from.

    `weight`: what it counts for in the loss or the metric; 0 for one that only fills a batch.
    """

    image: Tensor
    hu_offset: Tensor
    hu_scale: Tensor
    sample: int
    weight: Tensor
    name: str


class SliceView:
    """Some slices of a source, as a source."""

    endless = False

    def __init__(self, source: SliceSource, indices: list[int]) -> None:
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        return len(self.indices)

    def load(self, index: int) -> FloatArray:
        """Slice [S, S] in HU."""
        return self.source.load(self.indices[index])

    def name(self, index: int) -> str:
        """File or phantom name."""
        return self.source.name(self.indices[index])


class SliceDataset(Dataset[Sample]):
    """Slices by global sample number n = epoch · length + index.

    Args:
        source: slices [S, S] in HU. An endless one is asked for slice n, so that every epoch brings new ones.
        scaling: HU to [0, 1].
        augment: flip and turn by (seed, n).
        seed: of the augmentation.
    """

    def __init__(self, source: SliceSource, scaling: Scaling, *, augment: bool = False, seed: int = 0) -> None:
        self.source, self.scaling, self.augment, self.seed = source, scaling, augment, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, item: Pick | int) -> Sample:
        n, weight = item if isinstance(item, Pick) else (item, 1.0)
        index = n if self.source.endless else n % len(self.source)
        hu = self.source.load(index)
        if self.augment:
            hu = _flip_and_turn(hu, np.random.default_rng([self.seed, n, 0xF11B]))
        x, offset, scale = self.scaling.to_unit(hu)
        return {
            "image": torch.from_numpy(np.ascontiguousarray(x))[None],
            "hu_offset": torch.tensor(offset, dtype=torch.float32),
            "hu_scale": torch.tensor(scale, dtype=torch.float32),
            "sample": n,
            "weight": torch.tensor(weight, dtype=torch.float32),
            "name": self.source.name(index),
        }


def _flip_and_turn(hu: FloatArray, rng: np.random.Generator) -> FloatArray:
    """One of the eight symmetries of the square."""
    turned = np.rot90(hu, k=int(rng.integers(4)))
    return turned[:, ::-1] if rng.random() < 0.5 else turned
