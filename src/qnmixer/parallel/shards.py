"""Checkpoints in shards, put together again; plain torch, without its distributed tensors, which load slowly."""

from pathlib import Path
from typing import Any

import torch

SHARD = "fsdp_shard_of_shape"


def merge_shards(folder: Path) -> dict[str, Any]:
    """The checkpoint that the shards in a folder make up, as one device would have written it."""
    ranks = [torch.load(path, map_location="cpu", weights_only=True) for path in sorted(folder.glob("rank_*.pt"))]
    return _merge(ranks)


def _merge(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, dict) and SHARD in first:
        return torch.cat([part["local"] for part in parts]).reshape(first[SHARD])
    if isinstance(first, dict):
        return {key: _merge([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_merge(list(items)) for items in zip(*parts, strict=True))
    return first
