"""Memory modes: the graph of the T iterations is stored, recomputed, or moved to the host until the backward pass.

All three give the same loss and the same gradients. They trade device memory for time.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from qnmixer.config.memory import MemoryConfig, RecomputeConfig
from qnmixer.config.option import suggest
from qnmixer.errors import ConfigError
from qnmixer.models.shared_weights import SharedWeights, is_shared_weight
from qnmixer.models.unrolled import S, UnrolledNetwork

# Copying smaller tensors to the host and back costs more than it frees.
_SMALLEST_OFFLOADED = 2**18  # bytes in full precision


def apply_memory_mode(network: UnrolledNetwork[Any], config: MemoryConfig) -> None:
    """Apply the memory mode that `memory` names to a network, in place, before training.

    Raises ConfigError for a name without a mode.
    """
    if config.name not in _MODES:
        raise ConfigError(f"memory={config.name} is not known: {suggest(config.name, _MODES)}")
    _MODES[config.name](network, config)


def _keep(network: UnrolledNetwork[Any], config: MemoryConfig) -> None:
    """Do nothing: autograd stores the graph by itself."""


def _recompute(network: UnrolledNetwork[Any], config: MemoryConfig) -> None:
    assert isinstance(config, RecomputeConfig)
    network.loop = partial(_recomputing_loop, segment=config.segment)
    for part in network.recomputed_parts():
        part.forward = MethodType(_recomputed_forward, part)


def _offload(network: UnrolledNetwork[Any], config: MemoryConfig) -> None:
    network.loop = partial(offloading_loop, pack=_to_host, unpack=_from_host)


_MODES = {"keep": _keep, "recompute": _recompute, "offload": _offload}


def _recomputed_forward(part: nn.Module, *inputs: Tensor) -> Tensor:
    """The output of `part`. All parts share this function, so torch.compile makes one graph."""
    # These parts draw no random numbers, so no state of a generator must be saved and restored.
    return checkpoint(type(part).forward, part, *inputs, use_reentrant=False, preserve_rng_state=False)


def _recomputing_loop(network: UnrolledNetwork[S], iterations: range, y: Tensor, state: S, segment: int) -> S:
    """Run some iterations in segments, and store only the state before each segment.

    The last segment of the network stores its graph, because the backward pass starts there.
    """
    T, weights = network.n_iterations, network.shared_weights(iterations)
    # ddp and fsdp have hooks on weights, and expect all uses of a weight in one graph.
    one_graph = torch.distributed.is_available() and torch.distributed.is_initialized()
    for first in range(iterations.start, iterations.stop, segment):
        part = range(first, min(first + segment, iterations.stop))
        run = partial(network.run, part)
        if part.stop == T or not torch.is_grad_enabled():
            state = run(y, state, weights)
        elif one_graph:
            state = checkpoint(run, y, state, weights, use_reentrant=False)
        else:
            state = _recomputed(run, y, state, weights)
    return state


def _recomputed(run: Callable[[Tensor, S, SharedWeights], S], y: Tensor, state: S, weights: SharedWeights) -> S:
    """The state after `run`, whose graph is made in backward only.

    The other kind of checkpoint makes a graph in forward too, and takes a tenth more time for a step on small images.
    This kind needs tensors as inputs and outputs. An input and an output must require a gradient: x₀ and frozen weights
    do not, so the end of the weights goes in and out.
    """
    inputs, spec = tree_flatten(state)
    places: list[int | None] = []
    specs: list[TreeSpec] = []

    def on_leaves(end: Tensor, y: Tensor, *leaves: Any) -> tuple[Any, ...]:
        results, of_result = tree_flatten(run(y, tree_unflatten(leaves, spec), weights.ending_at(end)))
        # A constant such as x₀ is taken from the input: as an output of the checkpoint it would require a gradient.
        places[:] = [next((k for k, leaf in enumerate(leaves) if leaf is result), None) for result in results]
        specs[:] = [of_result]
        return end.clone(), *(result for result, place in zip(results, places, strict=True) if place is None)

    _, *outputs = checkpoint(on_leaves, weights.end, y, *inputs, use_reentrant=True)
    # Autocast keeps half-precision copies of weights. In older torch, copies made without a graph cut later graphs.
    torch.clear_autocast_cache()
    new = iter(outputs)
    return tree_unflatten([next(new) if place is None else inputs[place] for place in places], specs[0])


def offloading_loop(
    network: UnrolledNetwork[S],
    iterations: range,
    y: Tensor,
    state: S,
    pack: Callable[[Tensor], Any],
    unpack: Callable[[Any], Tensor],
) -> S:
    """Run some iterations. `pack` moves the tensors away that the backward pass needs."""
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return network.run(iterations, y, state)


def stays(tensor: Tensor) -> bool:
    """Whether offloading leaves a saved tensor on its device: weights and small tensors.

    A half-precision tensor counts as if it were in full precision. Half precision then moves the same tensors, and
    never leaves more on the device.
    """
    is_weight = (tensor.is_leaf and tensor.requires_grad) or is_shared_weight(tensor)
    return is_weight or tensor.numel() * max(4, tensor.itemsize) < _SMALLEST_OFFLOADED


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    if stays(tensor):
        return tensor.device, tensor
    # torch caches pinned memory, and reuses it only when all copies from and to it are done. So from the second step on
    # no page is pinned again, and the host waits for no copy. Strides stay, and so the rounding stays too.
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _from_host(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor.to(device, non_blocking=True)
