"""Fan and parallel beams: geometry, projector (A, Aᵀ, FBP) and noise. It needs no Lightning."""

from qnmixer.physics.fbp import FBP_WINDOWS
from qnmixer.physics.geometry import FanBeamGeometry
from qnmixer.physics.noise import FieldNoise, InsertedNoise, KeyedNoise, MixedNoise, NoNoise, PhysicalNoise
from qnmixer.physics.projector import FanBeamProjector

__all__ = [
    "FBP_WINDOWS",
    "FanBeamGeometry",
    "FanBeamProjector",
    "FieldNoise",
    "InsertedNoise",
    "KeyedNoise",
    "MixedNoise",
    "NoNoise",
    "PhysicalNoise",
]
