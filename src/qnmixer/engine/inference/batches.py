"""Reconstruct scans in batches: smaller batches if memory is short, half precision if it changes no pixel visibly."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qnmixer.engine.data.slices import FloatArray
from qnmixer.engine.inference.inputs import MeasuredScan, Scan, sinograms_of, warn
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

    Some batches are computed in both precisions: a few of the first, then one in `_CHECKED`. Half precision starts
    at the first iteration from which it changes no pixel of these batches by more than `MAX_HU`. The result of these
    batches is the float32 image. It is also the result of a batch in which half precision overflows.

    Raises ConfigError for a precision that the device does not support.
    """

    def __init__(self, module: Reconstructor, batch_size: int, precision: str) -> None:
        self.module, self.batch_size, self.precision = module, batch_size, precision
        self._dtype = AUTOCAST[precision]
        check_precision(module.device, precision)
        self._first_half = 0 if self._dtype else module.network.n_iterations
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
        y = sinograms_of(self.module, scans)
        n, number = self.module.network.n_iterations, self._n_batches
        self._n_batches += 1
        # Differences grow with contrast, which a series may show late. So checks never end, but become rare.
        is_power_of_two = number & (number - 1) == 0
        if self._first_half == n or (number % _CHECKED and not is_power_of_two):
            x = self._run(scans, y, self._first_half)
            return x if self._first_half == n or torch.isfinite(x).all() else self._run(scans, y, n)
        x = self._run(scans, y, n)
        self._check(scans, y, x)
        return x

    def _check(self, scans: Sequence[Scan], y: Tensor, exact: Tensor) -> None:
        """Find the first iteration from which half precision gives the same images, if the current one is too early."""
        scale = torch.tensor([[[[scan.scale]]] for scan in scans], dtype=exact.dtype, device=exact.device)
        differences: dict[int, float] = {}

        def is_same(first_half: int) -> bool:
            differences[first_half] = float(((self._run(scans, y, first_half) - exact).abs() * scale).max())
            return differences[first_half] <= MAX_HU

        before, n = self._first_half, self.module.network.n_iterations
        if is_same(before):
            return
        # By bisection, because each try runs the whole network.
        self._first_half = bisect_left(range(n), True, lo=before + 1, key=is_same)
        where = "all" if self._first_half == n else f"the first {self._first_half}"
        warn(
            f"precision={self.precision} would change a slice by {differences[before]:.2f} HU, over the {MAX_HU:g} HU "
            f"allowed: {where} of {n} iterations stay in 32"
        )

    def _run(self, scans: Sequence[Scan], y: Tensor, first_half: int) -> Tensor:
        """x_T, in half precision from a given iteration on.

        Missing views are replaced by A x_T in further passes. Their interpolated values then matter less.
        """
        x = self._pass(y, first_half)
        gaps = {
            k: scan.missing for k, scan in enumerate(scans) if isinstance(scan, MeasuredScan) and scan.missing.any()
        }
        if not gaps:
            return x
        rows, missing = [*gaps], torch.from_numpy(np.stack([*gaps.values()])).to(y.device)[:, None, :, None]
        for _ in range(_REFILLS):
            x[rows] = self._pass(torch.where(missing, self.module.projector(x[rows]), y[rows]), first_half)
        return x

    def _pass(self, y: Tensor, first_half: int) -> Tensor:
        network = self.module.network
        n = network.n_iterations
        state = network.run(range(first_half), y, network.start(y))
        with torch.autocast(y.device.type, self._dtype, enabled=first_half < n):
            return network.image(network.run(range(first_half, n), y, state)).float()
