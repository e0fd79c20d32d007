"""The Lightning strategy and the precision plugin that a config names; and FSDP2.

With fsdp, weights, gradients and optimizer state are in shards over the devices. Each regulariser is one unit, and the
rest of the network another. Checkpoints are those of one device: full tensors, and the optimizer state with torch's
numbering.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import lightning as L
from lightning.pytorch import strategies
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from qnmixer.errors import ConfigError
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.parallel.lightning_private import find_unused_parameters
from qnmixer.parallel.pipeline import TIMEOUT, PipelineStrategy
from qnmixer.parallel.shards import gather
from qnmixer.parallel.torch_private import tree_map
from qnmixer.settings.sections import DDPConfig, FSDPConfig, PipelineConfig, SingleConfig, StrategyConfig, TrainerConfig

# The strategy of a run

# Else ddp sends the scan's matrices at every forward, 30 MB at the default size. Every process has built the same.
_BUFFER_OPTION = "forward_sync_buffers"  # called broadcast_buffers before torch 2.13
_NO_BUFFERS: dict[str, Any] = {
    _BUFFER_OPTION if _BUFFER_OPTION in signature(DistributedDataParallel).parameters else "broadcast_buffers": False
}


def build_strategy(config: StrategyConfig, trainer: TrainerConfig, batch_size: int) -> Strategy | str:
    """The strategy for Lightning's Trainer.

    Args:
        trainer: with the number of devices filled in.
        batch_size: samples of one device.

    Raises ConfigError for a name without a strategy.
    """
    match config:
        case SingleConfig():
            return "auto"
        case DDPConfig():
            return DDPStrategy(config.find_unused_parameters)
        case FSDPConfig():
            return FSDPStrategy(trainer.n_devices)
        case PipelineConfig():
            n_devices = config.devices_per_replica(trainer)
            accumulate = trainer.accumulate_grad_batches
            return PipelineStrategy(n_devices, batch_size, accumulate, config.schedule, config.microbatch_size)
    raise ConfigError(f"strategy={config.name} is not known: choose single, ddp, fsdp or pipeline")


def build_precision(trainer: TrainerConfig, accelerator: str) -> Precision:
    """Autocast, and a GradScaler for fp16, on a CPU too: there Lightning would silently use bf16 for 16-mixed."""
    precision = trainer.precision
    # A plugin, because the Trainer's own `precision="16-mixed"` is refused by Lightning's FSDP2 strategy.
    return Precision() if precision == "32" else MixedPrecision(precision, accelerator)


# ddp


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's strategy for ddp. It looks for weights without a gradient if the module optimizes by itself.

    Args:
        find_unused_parameters: look for them at every step, if a loss does not depend on all weights.
    """

    def __init__(self, find_unused_parameters: bool = False) -> None:
        # Gradients that are views of ddp's buckets save a copy of all gradients.
        super().__init__(
            gradient_as_bucket_view=True,
            timeout=TIMEOUT,
            find_unused_parameters=find_unused_parameters,
            **_NO_BUFFERS,
        )

    def setup(self, trainer: L.Trainer) -> None:
        """Wrap the module. A backward pass of one of several optimizers leaves the weights of others out."""
        if not trainer.lightning_module.automatic_optimization:
            find_unused_parameters(self)
        super().setup(trainer)


# FSDP2


class FSDPStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2. It sends no gradients while it accumulates, and writes standard checkpoints.

    Args:
        n_processes: of the Trainer, on all machines.
    """

    def __init__(self, n_processes: int) -> None:
        # One file, as with the other strategies: Lightning's distributed checkpoint is a folder that only FSDP2 reads.
        super().__init__(
            data_parallel_size=n_processes,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            timeout=TIMEOUT,
        )

    def shard(self, network: nn.Module, mesh: Any) -> None:
        """Put the blocks of a network, and then the rest of it, into shards over a mesh, in place."""
        if isinstance(network, FSDPModule):  # Lightning calls `configure_model` again before validation and test
            return
        mesh = mesh["data_parallel"]
        # Blocks first: the last call takes all weights that are in no unit yet.
        if not isinstance(network, UnrolledNetwork):
            fully_shard(network, mesh=mesh, reshard_after_forward=True)
            return
        for block in network.blocks():
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
        # FSDP2 gathers weights before `forward` only. Any other entry point must be registered.
        register_fsdp_forward_method(network, "trajectory")

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Store full gradients on each device. Lightning enters this in every batch of a window except the last."""
        # Without this FSDP2 reduces the gradients in every backward pass, and accumulating saves no traffic.
        units = self._units()
        for unit in units:
            unit.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit in units:
                unit.set_requires_gradient_sync(True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The shards of this rank; `save_checkpoint` gathers them."""
        assert self.model is not None
        return self.model.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer state of this rank, in shards too."""
        return optimizer.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one full file on rank 0."""
        gathered = tree_map(_gathered, checkpoint)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(gathered, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the full file on every rank."""
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: Lightning then calls the two methods below in its own order."""
        return True

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load the shards of this rank from the full weights."""
        assert self.model is not None
        shards = self.model.state_dict()
        self.model.load_state_dict(
            {k: _sharded(shards.get(k), v) for k, v in checkpoint["state_dict"].items()}, strict=strict
        )

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the shards of this rank from the full optimizer state."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            # torch numbers parameters in the order of the groups, so the state of one device fits by number.
            parameter_of = dict(zip(numbers, parameters, strict=True))
            sharded = {
                n: {k: _sharded(parameter_of[n], v) for k, v in entry.items()} for n, entry in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": sharded})

    def _units(self) -> list[FSDPModule]:
        assert self.model is not None
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]


def _gathered(value: Any) -> Any:
    return gather(value).cpu() if isinstance(value, DTensor) else value


def _sharded(target: Any, value: Any) -> Any:
    """A full tensor in the shards of `target`, if that has shards and the same shape."""
    if isinstance(target, DTensor) and isinstance(value, Tensor) and value.shape == target.shape:
        return distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
    return value
