"""Networks whose buffers change as they run. Users write such ones, so they do it in every way that torch allows."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from qnmixer.models import UnrolledNetwork
from qnmixer.models.unrolled import Channels, Iterations, Projector


class Changing(UnrolledNetwork[Tensor]):
    """x − A†(A x − y)/2 − G(x); each subclass has buffers of its own."""

    at_start: ClassVar[dict[str, Tensor]] = {}

    def __init__(self, projector: Projector, n_iterations: Iterations, channels: Channels = 4) -> None:
        super().__init__(n_iterations)
        self.projector = projector
        self.regularizers = nn.ModuleList(self.regularizer(channels) for _ in range(self.n_regularizers()))
        for name, value in self.at_start.items():
            self.register_buffer(name, value.clone())

    def n_regularizers(self) -> int:
        """One for all iterations."""
        return 1

    def regularizer(self, channels: int) -> nn.Module:
        """G."""
        return nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, 1, 1))

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        state = state - 0.5 * self.projector.filtered_residual(state, y)
        return state - self.regularizers[t % len(self.regularizers)](state)


class BatchNorm(Changing):
    """Changes its running means without a new version, and a counter."""

    def regularizer(self, channels: int) -> nn.Module:
        kernels = [nn.Conv2d(n, m, 3, padding=1) for n, m in ((1, channels), (channels, 1))]
        return nn.Sequential(kernels[0], nn.BatchNorm2d(channels), nn.ReLU(), kernels[1])


class OwnBatchNorms(BatchNorm):
    """One for each iteration."""

    def n_regularizers(self) -> int:
        return self.n_iterations


class Spectral(Changing):
    """Each pass changes its vector u, on which its output depends."""

    def regularizer(self, channels: int) -> nn.Module:
        first = nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, channels, 3, padding=1))
        return nn.Sequential(first, nn.ReLU(), nn.Conv2d(channels, 1, 1))


class Counter(Changing):
    """Counts its iterations, which change its output."""

    at_start: ClassVar[dict[str, Tensor]] = {"count": torch.zeros((), dtype=torch.long)}

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return super().step(t, y, state) / (1 + 0.01 * self.count)


class Mean(Changing):
    """Holds an exponential mean of its images, which changes its output."""

    at_start: ClassVar[dict[str, Tensor]] = {"mean": torch.zeros(1)}

    def change(self, value: Tensor) -> None:
        """In place."""
        self.mean.mul_(0.9).add_(0.1 * value)

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        if self.training:
            self.change(state.detach().mean())
        return super().step(t, y, state) - 0.01 * self.mean.clone()


class MeanByData(Mean):
    """Writes to `.data`, which gives no new version."""

    def change(self, value: Tensor) -> None:
        self.mean.data.mul_(0.9).add_(0.1 * value)


class ReplacedMean(Mean):
    """Has another tensor each time."""

    def change(self, value: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * value


class LateMean(Mean):
    """Begins to change when a schedule says so."""

    begun = False

    def change(self, value: Tensor) -> None:
        if self.begun:
            super().change(value)


class Constant(Changing):
    """Has a buffer that never changes."""

    at_start: ClassVar[dict[str, Tensor]] = {"mask": torch.ones(16, 16)}

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        return self.mask * super().step(t, y, state)


class Watching(Mean):
    """The mean is that of the first iteration. Later ones only read it."""

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        if self.training and t == 0:
            self.change(state.detach().mean())
        return Changing.step(self, t, y, state) - 0.1 * self.mean.clone() * state


class Everything(OwnBatchNorms):
    """BatchNorm in each iteration, a counter of iterations, a mean in the first one, a mean in all, and a mask."""

    at_start: ClassVar[dict[str, Tensor]] = {
        "count": torch.zeros((), dtype=torch.long), "first": torch.zeros(1), "all": torch.zeros(1),
        "least": torch.full((1,), torch.inf), "mask": torch.tensor([0.0, -torch.inf]),
    }  # fmt: skip

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            for mean in [self.all] + [self.first] * (t == 0):
                mean.mul_(0.9).add_(0.1 * y.mean())
            if t == 0:
                self.least.copy_(torch.minimum(self.least, self.count))
        return super().step(t, y, state)
