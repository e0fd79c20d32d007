"""The states of all random generators of a process, as plain data that loads without unpickling code."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of Python, NumPy, torch, and of the device if it is a GPU."""
    # Lists and tensors only: a checkpoint with other objects does not load with weights_only=True.
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one is what libraries draw from
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def of_all_ranks(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of all processes, by rank, on each of them."""
    if not dist.is_initialized():
        return [state]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states
