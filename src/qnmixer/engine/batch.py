"""A batch of slices, as the loaders give it."""

from typing import NotRequired, TypedDict

from torch import Tensor


class Batch(TypedDict):
    """Collated samples of `SliceDataset`; HU = hu_offset + hu_scale · image."""

    image: Tensor  # [B, 1, S, S]
    fine: NotRequired[Tensor]  # [B, 1, f·S, f·S], to simulate from; with data.simulation_factor = f above 1
    sinogram: NotRequired[Tensor]  # [B, 1, V, D], value × mm; where a scanner or the loader has measured
    hu_offset: Tensor  # [B]
    hu_scale: Tensor  # [B]
    sample: Tensor  # [B], int64: epoch · length + index; on the host in training and evaluation
    weight: Tensor  # [B], weight in the loss; 0 for a sample that only fills the batch
    name: list[str]
    unscored: NotRequired[Tensor]  # [B or 1, 1, S, S] bool: pixels that no metric sees, as those of metal


def to_hu(batch: Batch, image: Tensor) -> Tensor:
    """HU of images [B, 1, H, W], from the scaling of their slices."""
    return batch["hu_offset"][:, None, None, None] + batch["hu_scale"][:, None, None, None] * image
