"""Reconstruction networks in plain PyTorch: they know nothing of devices, Lightning or Hydra."""

from qnmixer.models.qn_mixer import QNMixer
from qnmixer.models.unrolled import UnrolledNetwork

__all__ = ["QNMixer", "UnrolledNetwork"]
