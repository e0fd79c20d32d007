"""Parts of the user's own that do not fit say what they must take."""

import numpy as np
import pytest
import torch
from torch import nn

from qnmixer.errors import ConfigError, PluginError
from qnmixer.measurement.build import build_geometry
from qnmixer.models.qn_mixer import QNMixer
from qnmixer.models.regformer import RegFormer
from qnmixer.physics import FanBeamProjector, KeyedNoise
from qnmixer.settings.compose import compose
from qnmixer.settings.run import parse

from ..conftest import TINY


class Small(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()


@pytest.fixture(scope="module")
def projector() -> FanBeamProjector:
    return FanBeamProjector(build_geometry(parse(compose("train", TINY))))


@pytest.mark.parametrize("regularizer", [Small, lambda: nn.Identity(), lambda a, b, c: nn.Identity()])
def test_a_regularizer_with_other_arguments_is_told_its_own(projector: FanBeamProjector, regularizer: object) -> None:
    with pytest.raises(PluginError, match=r"called with two arguments, \(image_size, channels\)"):
        QNMixer(projector, n_iterations=2, channels=4, detail_channels=0, regularizer=regularizer)  # type: ignore[arg-type]


@pytest.mark.parametrize("channels", [4, 8, 9, 100])
def test_regformer_refuses_channels_that_its_heads_cannot_share(projector: FanBeamProjector, channels: int) -> None:
    with pytest.raises(ConfigError, match=f"channels={channels} should be a multiple of 6"):
        RegFormer(projector, n_iterations=2, channels=channels)


class OfTorch(KeyedNoise):
    def sample(self, p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return torch.poisson(p)  # type: ignore


class Clamped(KeyedNoise):
    def sample(self, p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return p.clamp_min(0)  # type: ignore


@pytest.mark.parametrize("noise", [OfTorch(), Clamped()])
def test_a_noise_of_torch_is_told_that_it_gets_numpy(noise: KeyedNoise) -> None:
    with pytest.raises(PluginError, match=r"sample fails \(.*\): it gets a NumPy array p \[1, V, D\]"):
        noise(torch.ones(1, 1, 4, 4), [(1, 1, 1)])
