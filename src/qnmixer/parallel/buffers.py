"""Buffers that a network changes as it runs: running means of BatchNorm, counters, means of its own.

Each device changes its own copy, by its own slices or its own iterations. `BufferMeans` makes the copies equal. A
second forward pass must change none: see `memory/recomputation.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from qnmixer.parallel.torch_private import is_saved_buffer
from qnmixer.settings.run import Config


class Place(NamedTuple):
    """Where a buffer is in a network. The tensor itself may be replaced there."""

    name: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor:
        """The buffer."""
        return self.module.get_buffer(self.key)

    @property
    def is_saved(self) -> bool:
        """Whether it is in checkpoints."""
        return is_saved_buffer(self.module, self.key)

    @torch.no_grad()
    def write(self, numbers: Tensor) -> None:
        """Write values into the tensor, from a vector; complex ones as pairs."""
        target = torch.view_as_real(self.tensor) if self.tensor.is_complex() else self.tensor
        target.copy_(numbers.view(target.shape))

    def put(self, tensor: Tensor) -> None:
        """Replace the tensor."""
        setattr(self.module, self.key, tensor)


def places_of(network: nn.Module) -> list[Place]:
    """The buffers of a network outside of its projector, whose matrices are large and do not change."""
    projector = getattr(network, "projector", None)
    fixed = set(projector.modules()) if isinstance(projector, nn.Module) else set()
    return [
        Place(f"{name}.{key}".lstrip("."), module, key)
        for name, module in network.named_modules()
        if module not in fixed
        for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.layout is torch.strided
    ]


@contextmanager
def unchanged_buffers(network: nn.Module) -> Iterator[None]:
    """What runs in the block sees the buffers of a network, and changes copies of them only."""
    with replaced({place: place.tensor for place in places_of(network)}):
        yield


@contextmanager
def replaced(values: dict[Place, Tensor]) -> Iterator[None]:
    """Put copies of these values into their places, and what is there now back after the block."""
    originals = {place: place.tensor for place in values}
    for place, value in values.items():
        place.put(value.detach().clone())
    try:
        yield
    finally:
        for place, tensor in originals.items():
            place.put(tensor)


class BufferMeans(Callback):
    """After each batch, makes the saved buffers equal on all devices.

    With ddp and fsdp a buffer becomes the mean over the devices. So a running mean of something that does not depend on
    other slices is that of one process. In a pipeline it becomes the mean over those devices that changed it. So a
    buffer that only one of them changes is as that device has it. Whole numbers count on: their changes are added over
    the stages of a pipeline, and averaged over its replicas: the devices, or groups of them, with different slices.
    """

    def __init__(self, n_replicas: int) -> None:
        self.n_replicas = n_replicas
        self._start_tensors: dict[Place, Tensor] = {}

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Remember the buffers, which are equal on all devices."""
        network: Any = pl_module.network
        places = [*self._start_tensors] or [place for place in places_of(network) if place.is_saved]
        self._start_tensors = {place: place.tensor.detach().clone() for place in places}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Give each buffer its mean over the devices."""
        if not self._start_tensors:
            return
        change_flags = [(place.tensor != start_tensor).any() for place, start_tensor in self._start_tensors.items()]
        values = [
            # Not times 0: a mask may hold infinite values.
            torch.where(change, _numbers(place.tensor), 0.0)
            for place, change in zip(self._start_tensors, change_flags, strict=True)
        ]
        # One message: many small ones would cost more than their bytes. float64 has every counter below 2**53 exactly.
        message = torch.cat([torch.stack(change_flags).double(), *values])
        dist.all_reduce(message)
        counts, *sums = message.split([len(change_flags), *map(len, values)])
        for (place, start_tensor), total, count in zip(self._start_tensors.items(), sums, counts, strict=True):
            place.write(self._mean(start_tensor, total, count))

    def _mean(self, start_tensor: Tensor, total: Tensor, count: Tensor) -> Tensor:
        """The new values from the sum of those on the devices that changed them, and the number of these devices."""
        start_numbers = _numbers(start_tensor)
        if not (start_tensor.is_floating_point() or start_tensor.is_complex()):
            return start_numbers + ((total - count * start_numbers) / self.n_replicas).round()
        # A replica that has left the value unchanged counts with the value at the start.
        n = count.clamp_min(self.n_replicas)
        return torch.where(count < n, total / n + (1 - count / n) * start_numbers, total / n)


def _numbers(tensor: Tensor) -> Tensor:
    """Its values as one vector of float64."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().double().flatten()


def buffer_means(config: Config) -> list[Callback]:
    """The callback of a run with several devices."""
    n_devices = config.trainer.n_devices
    return [BufferMeans(n_devices // config.strategy.devices_per_replica(config))] if n_devices > 1 else []


def line_on_buffers(config: Config, network: nn.Module) -> str | None:
    """What the buffers of a network mean if several devices change them; None if there are none."""
    names = [place.name for place in places_of(network) if place.is_saved]
    if not names or config.trainer.n_devices == 1:
        return None
    suffix = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"buffers {', '.join(names[:4])}{suffix}: {config.strategy.on_buffers}"
