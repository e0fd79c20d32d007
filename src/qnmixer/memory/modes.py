"""Memory modes: the graph of the T iterations is stored, recomputed, or moved to the host until the backward pass.

All three give the same loss and the same gradients. They trade device memory for time. A network without a mode stores
what autograd stores: `keep`.
"""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from qnmixer.memory.recomputation import Recomputation
from qnmixer.models.unrolled import S, UnrolledNetwork
from qnmixer.settings.sections import MemoryConfig

# Copying smaller tensors to the host and back costs more than it frees.
_SMALLEST_OFFLOADED = 2**18  # bytes in full precision


def apply_memory_mode(network: UnrolledNetwork[Any], config: MemoryConfig, host: str = "cpu") -> None:
    """Apply the memory mode that `memory` names to a network, in place, before training.

    Offloading moves tensors to `host`. The plan has another place for their shapes.
    """
    match config.name:
        case "keep":  # autograd stores the graph by itself
            pass
        case "recompute":
            recomputation = Recomputation(network)
            network.loop = partial(_recomputing_loop, recomputation=recomputation)
            # Also inside an iteration, because the one that is computed again stores its graph. A network of one
            # iteration has nothing else to recompute.
            parts = network.large_parts()
            _recompute_forward(parts + (network.blocks() if network.n_iterations == 1 else []), recomputation)
        case "offload":
            network.loop = partial(_offloading_loop, host=host)
            _recompute_forward(network.large_parts(), Recomputation(network))  # quicker than copies


def _recompute_forward(modules: list[nn.Module], recomputation: Recomputation) -> None:
    """Make each of these modules a checkpoint, in place."""

    def forward(module: nn.Module, *inputs: Tensor) -> Any:  # one function for all, so torch.compile makes one graph
        return recomputation.run(type(module).forward, module, *inputs)

    for module in modules:
        module.forward = MethodType(forward, module)


def _recomputing_loop(
    network: UnrolledNetwork[S], iterations: range, y: Tensor, state: S, recomputation: Recomputation
) -> S:
    """Run some iterations, each as a checkpoint, which stores its state only.

    The last iteration of the network stores its graph, because the backward pass starts there.
    """
    for t in iterations:
        is_last = t == network.n_iterations - 1
        state = network.step(t, y, state) if is_last else recomputation.run(network.step, t, y, state)
    return state


def _offloading_loop(network: UnrolledNetwork[S], iterations: range, y: Tensor, state: S, host: str) -> S:
    """Run some iterations. What the backward pass needs is moved to the host.

    torch's `save_on_cpu` would move all weights at each use, and all small tensors. It also changes strides, and with
    them the rounding.
    """
    with torch.autograd.graph.saved_tensors_hooks(partial(_to_host, host=host), _from_host):
        return network.run(iterations, y, state)


def _stays(tensor: Tensor) -> bool:
    """Whether offloading leaves a saved tensor on its device: weights and small tensors.

    A half-precision tensor counts as if it were in full precision. Half precision then moves the same tensors, and
    never leaves more on the device.
    """
    is_weight = tensor.is_leaf and tensor.requires_grad
    return is_weight or tensor.numel() * max(4, tensor.itemsize) < _SMALLEST_OFFLOADED


def _to_host(tensor: Tensor, host: str) -> tuple[torch.device, Tensor]:
    if _stays(tensor):
        # Detached: the graph of an output that holds itself would live until its backward pass, if there is one.
        return tensor.device, tensor.detach()
    # torch caches pinned memory, and reuses it only when all copies from and to it are done. So from the second step on
    # no page is pinned again, and the host waits for no copy. Strides stay, and so the rounding stays too.
    host_tensor = torch.empty_like(tensor, device=host, pin_memory=tensor.is_cuda)
    return tensor.device, host_tensor.copy_(tensor, non_blocking=True)


def _from_host(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor.to(device, non_blocking=True)
