"""Fan and parallel beams: geometry, projector (A, Aᵀ, FBP), symmetries and noise. It needs no Lightning."""

from qnmixer.physics.fbp import FBP_WINDOWS
from qnmixer.physics.geometry import FanBeamGeometry
from qnmixer.physics.noise import FieldNoise, InsertedNoise, KeyedNoise, MixedNoise, NoNoise, PhysicalNoise
from qnmixer.physics.projector import FanBeamProjector
from qnmixer.physics.symmetries import Symmetry, images_by_symmetry, symmetries

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
    "Symmetry",
    "images_by_symmetry",
    "symmetries",
]
