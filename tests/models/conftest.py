import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qnmixer.models import (
    FBP,
    LEARN,
    FBPConvNet,
    ItNet,
    LearnedPrimalDual,
    LEARNPlusPlus,
    QNMixer,
    RegFormer,
    TotalVariation,
    UnrolledNetwork,
)
from qnmixer.physics import FanBeamGeometry, FanBeamProjector

FIGURE = {
    "detail_channels": 0, "codec_kernel": 1, "shared_step_size": True, "data_steps": 1, "nonnegative": False,
    "learned_trust": False,
}  # fmt: skip
"""QNMixer as the paper's figure draws it, where the defaults are another."""

OPTIONS: dict[str, dict[str, Any]] = {
    "figure": {},
    "default": {name: inspect.signature(QNMixer).parameters[name].default for name in FIGURE},
    "a regulariser and step size an iteration": {"shared_regularizer": False, "shared_step_size": False},
    "strided latent": {"codec": "strided", "latent_channels": 1},
    "adjoint": {"data_term": "adjoint"},
    "first order": {"hessian": "identity"},
    "momentum": {"hessian": "momentum"},
    "gradients": {"hessian": "gradients"},
    "detached": {"hessian_gradient": "detach"},
    "details, trust and a wider codec": {"detail_channels": 6, "learned_trust": True, "codec_kernel": 3},
    "details that see the image alone": {"detail_channels": 6, "detail_data_step": False, "data_steps": 2},
    "no inception": {"inception": False},
    "several data steps, each iteration's own": {"data_steps": 3, "shared_step_size": False},
    "one iteration": {"n_iterations": 1},
}
"""QN-Mixer, as it differs from the figure."""

LEARNED: dict[str, Callable[[FanBeamProjector], UnrolledNetwork[Any]]] = {
    "FBPConvNet": lambda projector: FBPConvNet(projector, channels=4, depth=3),
    "ItNet": lambda projector: ItNet(projector, n_iterations=2, channels=4, depth=2),
    "LEARN": lambda projector: LEARN(projector, n_iterations=3, channels=4),
    "LEARN with FBP": lambda projector: LEARN(projector, n_iterations=3, channels=4, data_term="fbp"),
    "LEARN++": lambda projector: LEARNPlusPlus(projector, n_iterations=3, channels=4, data_term="fbp"),
    "Learned PD": lambda projector: LearnedPrimalDual(projector, n_iterations=3, channels=4),
    "RegFormer": lambda projector: RegFormer(projector, n_iterations=4, channels=6, window_size=4),
    "RegFormer of one window": lambda projector: RegFormer(projector, n_iterations=3, channels=6, window_size=16),
    "RegFormer of one iteration": lambda projector: RegFormer(projector, n_iterations=1, channels=6),
}
"""Networks that QN-Mixer is compared with."""

SOLVERS = {"FBP": FBP, "TV": lambda projector: TotalVariation(projector, n_iterations=5)}


@pytest.fixture(scope="session")
def projector() -> FanBeamProjector:
    """A scan small enough to differentiate numerically: 16 × 16 pixels, 12 views, 24 bins."""
    return FanBeamProjector(FanBeamGeometry(16, 25.0, 12, 24, 40.0, 600.0, 290.0, math.pi / 12))


def build(name: str, projector: FanBeamProjector, *, awake: bool = True, **options: Any) -> UnrolledNetwork[Any]:
    """A small network by name; awake: away from its start, where some of its parts are zero."""
    torch.manual_seed(0)
    if name in OPTIONS:
        small = {"n_iterations": 3, "channels": 4, "n_mixer_layers": 1}
        network: UnrolledNetwork[Any] = QNMixer(projector, **{**FIGURE, **small, **OPTIONS[name], **options})
    else:
        network = (LEARNED | SOLVERS)[name](projector)
    with torch.no_grad():
        for p in network.parameters() if awake else ():
            p += 0.02 * torch.randn_like(p)
    return network


def in_float64(name: str, projector: FanBeamProjector, **options: Any) -> UnrolledNetwork[Any]:
    """The same with a projector of its own, all in float64."""
    return build(name, copy.deepcopy(projector), **options).double()
