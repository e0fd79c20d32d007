"""FSDP2: weights, gradients and optimizer state are in shards over the devices.

Each regulariser is one unit, and the rest of the network another. Checkpoints are those of one device: full tensors,
and the optimizer state with torch's numbering.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate

from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.parallel.device_memory import Footprint
from qnmixer.parallel.gather import gather
from qnmixer.parallel.parallelism import TIMEOUT, Parallelism
from qnmixer.parallel.torch_private import tree_map_only
from qnmixer.parallel.tracker import n_bytes
from qnmixer.settings.strategies import FSDPConfig


class ShardedDataParallel(Parallelism[FSDPConfig]):
    """How fsdp trains, and what the plan counts for it."""

    def strategy(self) -> "FSDPStrategy":
        """FSDP2 over all devices."""
        return FSDPStrategy(self.config.trainer.n_devices)

    def footprint(self, alone: Footprint, network: Any) -> Footprint:
        """The footprint by arithmetic. It is too large rather than too small.

        `strategy` counts the full tensors that exist at once. These are the weights of the root unit and of one block.
        Messages that gather weights and reduce gradients are twice the largest unit. While accumulating, all gradients
        are full.
        """
        n_shards = self.config.trainer.n_devices
        blocks = [n_bytes(block.parameters()) for block in network.blocks()]
        all_bytes = n_bytes(network.parameters())
        root = all_bytes - sum(blocks)
        gathered = root + max(blocks, default=0)
        unreduced = all_bytes if self.config.trainer.accumulate_grad_batches > 1 else 0
        return replace(
            alone,
            parameters=alone.parameters / n_shards,
            gradients=alone.gradients / n_shards,
            optimizer=alone.optimizer / n_shards,
            strategy=gathered + 2 * max([root, *blocks]) + unreduced,
        )


class FSDPStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2. It sends no gradients while it accumulates, and writes standard checkpoints.

    Args:
        n_processes: of the Trainer, on all machines.
    """

    def __init__(self, n_processes: int) -> None:
        # One file, as with the other strategies: Lightning's distributed checkpoint is a folder that only FSDP2 reads.
        super().__init__(
            data_parallel_size=n_processes, tensor_parallel_size=1, save_distributed_checkpoint=False, timeout=TIMEOUT
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
        assert self.model is not None
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit in units:
                unit.set_requires_gradient_sync(True)

    # As without shards: state is that of this rank, which `save_checkpoint` gathers. Every rank reads the full file.
    lightning_module_state_dict = Strategy.lightning_module_state_dict
    optimizer_state = Strategy.optimizer_state
    load_checkpoint = Strategy.load_checkpoint
    # True: Lightning calls `load_model_state_dict` and `load_optimizer_state_dict` in its own order.
    lightning_restore_optimizer = Strategy.lightning_restore_optimizer

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one full file on rank 0."""
        gathered = tree_map_only(DTensor, lambda shards: gather(shards).cpu(), checkpoint)
        Strategy.save_checkpoint(self, gathered, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load the shards of this rank from the full weights."""
        assert self.model is not None
        shards = self.model.state_dict()
        weights = {k: _sharded(shards.get(k), v) for k, v in checkpoint["state_dict"].items()}
        self.model.load_state_dict(weights, strict=strict)

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


def _sharded(target: Any, value: Any) -> Any:
    """A full tensor in the shards of `target`, if that has shards and the same shape."""
    if isinstance(target, DTensor) and isinstance(value, Tensor) and value.shape == target.shape:
        # Not `distribute_tensor`, which sends the parts: every device has read the whole.
        whole = DTensor.from_local(value.to(target.device), target.device_mesh, [Replicate()])
        return whole.redistribute(placements=target.placements)
    return value
