"""Tensors in shards, made whole. Without torch's distributed tensors, which take long to import."""

from torch import Tensor


def gather(tensor: Tensor) -> Tensor:
    """The full tensor. If the tensor is in shards, all devices must call this together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
