"""Weights files: the tensors of a network as safetensors, with the config that builds it as metadata."""

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from qnmixer.engine.config import Config, to_plain, without_places
from qnmixer.files import digest
from qnmixer.weights import CHECKPOINT_KEY


def encode(config: Config, state: dict[str, Tensor]) -> bytes:
    """Encode a weights file: tensors by their state-dict names, half precision as float32, and the config.

    The same weights and config give the same bytes. The metadata also has a digest of both.
    """
    ours = {"format": 1, "config": to_plain(without_places(config))}
    ours["digest"] = _digest(ours, state)
    return _encode(state, {CHECKPOINT_KEY: json.dumps(ours)})  # one key: safetensors writes several in random order


def _digest(ours: dict[str, Any], state: dict[str, Tensor]) -> str:
    return digest([ours["config"], digest_of_weights(state)])


def digest_of_weights(state: dict[str, Tensor]) -> str:
    """SHA-256 of the weights only: the same for a checkpoint and for the weights file that was exported from it."""
    return hashlib.sha256(_encode(state)).hexdigest()


def _encode(state: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    # Copies, because safetensors refuses two names for one tensor. A module may count in whole numbers: they stay.
    half = torch.float16, torch.bfloat16
    full = {name: torch.float32 if tensor.dtype in half else tensor.dtype for name, tensor in state.items()}
    tensors = {name: tensor.to(full[name], copy=True).contiguous() for name, tensor in state.items()}
    return safetensors.torch.save(tensors, metadata)


def decode(path: Path) -> dict[str, Any]:
    """Decode a weights file into the form of a checkpoint. The config is None for a file of another program.

    Raises safetensors.SafetensorError, ValueError or OSError for a damaged file.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        ours = json.loads((file.metadata() or {}).get(CHECKPOINT_KEY, "null"))
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    if isinstance(ours, dict) and "config" in ours and ours.get("digest") != _digest(ours, state):
        raise ValueError("its digest does not match")
    return {CHECKPOINT_KEY: ours, "state_dict": state}
