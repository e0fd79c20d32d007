"""Reconstruction networks in plain PyTorch, independent of devices, Lightning and Hydra."""

from qnmixer.models.fbp import FBP
from qnmixer.models.fbpconvnet import FBPConvNet
from qnmixer.models.itnet import ItNet
from qnmixer.models.learn import LEARN
from qnmixer.models.learn_pp import LEARNPlusPlus
from qnmixer.models.learned_primal_dual import LearnedPrimalDual
from qnmixer.models.qn_mixer import QNMixer
from qnmixer.models.regformer import RegFormer
from qnmixer.models.total_variation import TotalVariation
from qnmixer.models.unrolled import UnrolledNetwork

__all__ = [
    "FBP",
    "LEARN",
    "FBPConvNet",
    "ItNet",
    "LEARNPlusPlus",
    "LearnedPrimalDual",
    "QNMixer",
    "RegFormer",
    "TotalVariation",
    "UnrolledNetwork",
]
