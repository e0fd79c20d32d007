"""A batch of slices, as the loaders give it."""

from typing import NotRequired, TypedDict

from torch import Tensor

SHAPES = {
    "image": "[B, 1, S, S]",
    "fine": "[B, 1, f·S, f·S]",
    "sinogram": "[B, 1, V, D]",
    "hu_offset": "[B]",
    "hu_scale": "[B]",
    "sample": "[B]",
    "weight": "[B]",
    "name": "[B]",
}
"""The shapes of a batch of B slices: S = data.image_size, V views of D detector bins, any f above 1."""


class Batch(TypedDict):
    """Collated samples of `SliceDataset`, of the shapes in `SHAPES`; HU = hu_offset + hu_scale · image."""

    image: NotRequired[Tensor]  # the truth; not where a scanner has measured sinograms alone
    fine: NotRequired[Tensor]  # to simulate from; with data.simulation_factor = f above 1
    sinogram: NotRequired[Tensor]  # value × mm; where a scanner or the loader has measured
    scan: NotRequired[Tensor]  # [B] int64 on the host, all equal: the scan of the step, with data.views or data.arcs
    hu_offset: Tensor
    hu_scale: Tensor
    sample: Tensor  # int64: epoch · length + index; on the host in training and evaluation
    weight: Tensor  # weight in the loss; 0 for a sample that only fills the batch
    name: list[str]
    unscored: NotRequired[Tensor]  # [B or 1, 1, S, S] bool: pixels that no metric sees, as those of metal


def to_hu(batch: Batch, image: Tensor) -> Tensor:
    """HU of images [B, 1, H, W], from the scaling of their slices."""
    return batch["hu_offset"][:, None, None, None] + batch["hu_scale"][:, None, None, None] * image
