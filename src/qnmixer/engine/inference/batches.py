"""Reconstruct scans in batches: smaller batches if memory is short, half precision if it changes no pixel visibly."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qnmixer.engine.data.slices import FloatArray
from qnmixer.engine.inference.scan import Scan, warn
from qnmixer.engine.memory.limits import is_out_of_memory
from qnmixer.engine.parallel.devices import check_precision
from qnmixer.engine.reconstructor import AUTOCAST, Reconstructor
from qnmixer.errors import OutOfMemory, first_line

MAX_HU = 1.0
"""The most that half precision may change a pixel."""
_CHECKED = 16
"""One in this many batches is computed in both precisions, and before that batches 1, 2, 3, 5 and 9."""
_REFILLS = 2


class BatchedNetwork:
    """x_T of scans, `batch_size` at a time, in the given precision if the images allow it.

    Some batches are computed in both precisions, and their result is the float32 image. As soon as half precision
    changes a pixel of one by more than `MAX_HU`, all further batches are computed in float32.

    Raises ConfigError for a precision that the device does not support.
    """

    def __init__(self, module: Reconstructor, batch_size: int, precision: str) -> None:
        check_precision(module.device, precision)
        self.module, self.batch_size, self.precision = module, batch_size, precision
        self._n_batches = 0

    @torch.no_grad()
    def __call__(self, scans: Sequence[Scan]) -> list[FloatArray]:
        """Images of scans in HU, [S, S] each. Raises OutOfMemory if the memory is too small for a single scan."""
        images: list[FloatArray] = []
        while len(images) < len(scans):
            part = scans[len(images) : len(images) + self.batch_size]
            try:
                x = self._images(part)[:, 0].cpu().numpy()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(len(part), error)
                continue  # with the same scans, in smaller batches
            images += [(s.offset + s.scale * image).astype(np.float32) for s, image in zip(part, x, strict=True)]
        return images

    def _halve(self, tried: int, error: Exception) -> None:
        if tried == 1:
            size = self.module.config.data.image_size
            raise OutOfMemory(
                f"out of memory with a single slice of {size} × {size} ({first_line(error)}): close other programs, or "
                "use a machine with more memory (if the GPU is full: accelerator=cpu)"
            ) from error
        self.batch_size = tried // 2
        warn(f"out of memory with {tried} slices at once: continuing with batch_size={self.batch_size}")

    def _images(self, scans: Sequence[Scan]) -> Tensor:
        """x_T [B, 1, S, S] in the chosen precision. Some batches are in float32, to check that choice."""
        if self.precision == "32":
            return self._run(scans, "32")
        number, self._n_batches = self._n_batches, self._n_batches + 1
        # Differences grow with contrast, which a series may show late. So checks never end, but become rare.
        is_power_of_two = number & (number - 1) == 0
        half = self._run(scans, self.precision)
        if number % _CHECKED and not is_power_of_two and half.isfinite().all():
            return half
        exact = self._run(scans, "32")
        scale = torch.tensor([scan.scale for scan in scans], device=exact.device)[:, None, None, None]
        most = float(((half - exact).abs() * scale).max())
        if not most <= MAX_HU:  # also if it is NaN
            warn(
                f"precision={self.precision} would change a slice by {most:.2f} HU, over the {MAX_HU:g} HU allowed: "
                "this and all further slices are computed in 32"
            )
            self.precision = "32"
        return exact

    def _run(self, scans: Sequence[Scan], precision: str) -> Tensor:
        """x_T. Missing views are replaced by A x_T in further passes: their interpolated values then matter less."""
        y = torch.cat([scan.sinogram for scan in scans])
        gaps = [k for k, scan in enumerate(scans) if scan.missing is not None]
        dtype = AUTOCAST[precision]
        with torch.autocast(y.device.type, dtype, enabled=dtype is not None):
            x = self.module(y).float()
            if gaps:
                missing = torch.stack([s.missing for s in scans if s.missing is not None])[:, None, :, None]
                for _ in range(_REFILLS):
                    x[gaps] = self.module(torch.where(missing, self.module.projector(x[gaps]), y[gaps])).float()
        return x
