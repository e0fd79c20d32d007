"""ddp: the whole network on every device; each gets a part of the batch."""

from dataclasses import replace
from inspect import signature
from typing import Any

import lightning as L
from lightning.pytorch import strategies
from torch.nn.parallel import DistributedDataParallel

from qnmixer.parallel.device_memory import Footprint
from qnmixer.parallel.lightning_private import find_unused_parameters
from qnmixer.parallel.parallelism import TIMEOUT, Parallelism
from qnmixer.settings.strategies import DDPConfig


class DataParallel(Parallelism[DDPConfig]):
    """How ddp trains, and what the plan counts for it."""

    frees_gradients = False  # they are views of ddp's buckets, which stay when gradients are cleared

    def strategy(self) -> "DDPStrategy":
        """ddp, with this run's keys."""
        return DDPStrategy(self.keys.find_unused_parameters)

    def footprint(self, alone: Footprint, network: Any) -> Footprint:
        """While it accumulates, gradients are outside the buckets: `strategy` counts them as a copy."""
        accumulates = self.config.trainer.accumulate_grad_batches > 1
        return replace(alone, strategy=alone.gradients) if accumulates else alone


# Else ddp sends the scan's matrices at every forward, 30 MB at the default size. Every process has built the same.
_BUFFER_OPTION = "forward_sync_buffers"  # called broadcast_buffers before torch 2.13
_NO_BUFFERS: dict[str, Any] = {
    _BUFFER_OPTION if _BUFFER_OPTION in signature(DistributedDataParallel).parameters else "broadcast_buffers": False
}


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's strategy for ddp. It looks for weights without a gradient if the module optimizes by itself.

    Args:
        find_unused_parameters: look for them at every step, if a loss does not depend on all weights.
    """

    def __init__(self, find_unused_parameters: bool = False) -> None:
        # Gradients that are views of ddp's buckets save a copy of all gradients.
        super().__init__(
            gradient_as_bucket_view=True, timeout=TIMEOUT, find_unused_parameters=find_unused_parameters, **_NO_BUFFERS
        )

    def setup(self, trainer: L.Trainer) -> None:
        """Wrap the module. A backward pass of one of several optimizers leaves the weights of others out."""
        if not trainer.lightning_module.automatic_optimization:
            find_unused_parameters(self)
        super().setup(trainer)
