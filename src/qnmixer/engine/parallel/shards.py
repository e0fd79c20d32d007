"""Tensors in shards, made whole, and files of torch.save, checked. Without torch's distributed tensors, which take long
to import.
"""

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MOST_VALUES, _DEEPEST = 1_000_000, 32
"""Limits of a file. Measured in checkpoints: 16 values for each tensor of weights, 7 levels deep."""


def gather(tensor: Tensor) -> Tensor:
    """The full tensor. If the tensor is in shards, all devices must call this together."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def load_checked(path: Path) -> dict[str, Any]:
    """Load a file of torch.save. Raises zipfile.BadZipFile if a byte has changed, which torch.load does not notice.

    torch.save writes a checksum of each tensor. Checking them costs 0.3 s for 1 GB. It compresses nothing. So a file
    that grows when it is read is refused: 1 MB could become 1 GB.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                raise zipfile.BadZipFile("it is larger when unpacked")
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    _require_few_values(content)
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"the checksum of {damaged} does not match")
    return content


def _require_few_values(content: Any) -> None:
    """Raise ValueError for endless unpickled values: a few bytes can hold one list a billion times, or itself."""
    stack = [(content, 0)]
    for _ in range(_MOST_VALUES):
        if not stack:
            return
        value, depth = stack.pop()
        if isinstance(value, dict | list | tuple | set) and depth < _DEEPEST:
            stack += [(child, depth + 1) for child in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, dict | list | tuple | set):
            break
    raise ValueError("it has too many values")
