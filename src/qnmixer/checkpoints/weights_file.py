"""Weights files: the tensors of a network as safetensors, and in their metadata the config that it is built from."""

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from qnmixer.config import Config, to_plain, without_places
from qnmixer.files import digest

CHECKPOINT_KEY = "qnmixer"
RUN_KEY = "qnmixer_run"
"""Of what a run goes on with; no weights file has it."""


def encode(config: Config, state: dict[str, Tensor]) -> bytes:
    """A weights file: float32 tensors by their names in the state dict, and what a checkpoint says of its config.

    The same weights and config give the same bytes. A digest of both is beside them.
    """
    ours = {"format": 1, "config": to_plain(without_places(config))}
    ours["digest"] = _digest(ours, state)
    return _encode(state, {CHECKPOINT_KEY: json.dumps(ours)})  # one key, as safetensors writes several in any order


def _digest(ours: dict[str, Any], state: dict[str, Tensor]) -> str:
    return digest([ours["config"], digest_of_weights(state)])


def digest_of_weights(state: dict[str, Tensor]) -> str:
    """SHA-256 of the weights alone: the same from a checkpoint and from the weights file that was made of it."""
    return hashlib.sha256(_encode(state)).hexdigest()


def _encode(state: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    # Copies, as the format has no two names for one tensor.
    tensors = {name: tensor.to(torch.float32, copy=True).contiguous() for name, tensor in state.items()}
    return safetensors.torch.save(tensors, metadata)


def decode(path: Path) -> dict[str, Any]:
    """What `encode` was given, as a checkpoint has it; the config is None in a file of another program.

    Raises safetensors.SafetensorError, ValueError or OSError for a file that is damaged.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        ours = json.loads((file.metadata() or {}).get(CHECKPOINT_KEY, "null"))
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    if isinstance(ours, dict) and "config" in ours and ours.get("digest") != _digest(ours, state):
        raise ValueError("its digest is another")
    return {CHECKPOINT_KEY: ours, "state_dict": state}
