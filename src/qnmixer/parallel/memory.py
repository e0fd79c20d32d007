"""Where the graph of the T iterations stays until backward: kept, recomputed, or moved to the host.

The three give the same loss and the same gradients; they trade memory on the device against time.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qnmixer.config import MemoryConfig, RecomputeConfig
from qnmixer.models.unrolled import S, UnrolledNetwork

# Copying smaller tensors to the host and back costs more than it frees.
_SMALLEST_OFFLOADED = 2**18  # bytes


def apply_memory_mode(network: UnrolledNetwork[Any], config: MemoryConfig) -> None:
    """Put the memory mode that `memory` names on a network, in place, before it is trained."""
    if isinstance(config, RecomputeConfig):
        network.loop = partial(_recomputing_loop, segment=config.segment)
        for part in network.recomputed_parts():
            part.forward = partial(_recomputed, part.forward)
    elif config.name == "offload":
        network.loop = _offloading_loop


def _recomputing_loop(network: UnrolledNetwork[S], y: Tensor, state: S, segment: int) -> S:
    """All iterations, of which only the state before each segment is kept."""
    for first in range(0, network.n_iterations, segment):
        iterations = range(first, min(first + segment, network.n_iterations))
        state = _recomputed(network.run, iterations, y, state)
    return state


def _recomputed(function: Any, *arguments: Any) -> Any:
    """Call a function whose graph is dropped, and built again in backward from the same random numbers.

    Not the reentrant kind: x₀, H₀ and r₀ need no gradient, and it would return none for anything.
    """
    return checkpoint(function, *arguments, use_reentrant=False)


def _offloading_loop(network: UnrolledNetwork[S], y: Tensor, state: S) -> S:
    """All iterations, with what backward will need in host memory."""
    with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
        return network.run(range(network.n_iterations), y, state)


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """Move a saved tensor off its device; weights and small things stay."""
    is_weight = tensor.is_leaf and tensor.requires_grad
    if is_weight or tensor.nbytes < _SMALLEST_OFFLOADED:
        return tensor.device, tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)  # keeps the strides, and so the rounding
    return tensor.device, host.copy_(tensor)


def _from_host(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor.to(device, non_blocking=True)
