"""Slices with their noisy sinograms, which the workers of a loader make ahead of time: A x + noise → y."""

from typing import Any

import torch

from qnmixer.data.dataset import Pick, Sample, SliceDataset
from qnmixer.measurement.measurement import STREAMS
from qnmixer.physics import KeyedNoise
from qnmixer.physics.scan import ScanMatrix
from qnmixer.physics.sparse import apply_linear


class MeasuredSlices(SliceDataset):
    """Slices, each with its sinogram. A measured sinogram gets only noise that is for measured ones.

    Noise is drawn on the host. With sinograms on a GPU, the host would have to wait for each of them. The values equal
    those of `Measurement` on a CPU to the last bit.

    Args:
        slices: the positional arguments of `SliceDataset`.
        noise: with the keys (seed, stream, sample).
        seed: of the noise.
        matrix: A for the images from which y is simulated; None: a scanner has measured all sinograms.
        options: of `SliceDataset`.
    """

    def __init__(self, *slices: Any, noise: KeyedNoise, seed: int, matrix: ScanMatrix | None, **options: Any) -> None:
        super().__init__(*slices, **options)
        self.noise, self.seed, self.matrix = noise, seed, matrix

    @torch.no_grad()
    def __getitem__(self, item: Pick | int) -> Sample:
        sample = super().__getitem__(item)
        # The finer image is large, and no longer needed: workers would send it to the training process.
        image = sample.pop("fine", sample["image"])
        if self.matrix is not None and "sinogram" not in sample:
            y = apply_linear(image[None], self.matrix, self.matrix.transpose)
        elif self.noise.for_measured:
            y = sample["sinogram"][None]
        else:
            return sample
        sample["sinogram"] = self.noise(y, [(self.seed, STREAMS[self.stream], sample["sample"])])[0]
        return sample
