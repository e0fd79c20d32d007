from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import Config, parse
from qnmixer.engine.reconstructor import build_network, build_noise, build_projector, method_name
from qnmixer.errors import ConfigError, PluginError
from qnmixer.models import TotalVariation

MINE = """
import torch
from qnmixer.models import UnrolledNetwork

class Half(UnrolledNetwork):
    title = "Half"

    def __init__(self, projector, n_iterations, channels, share=0.5):
        super().__init__(n_iterations)
        self.projector, self.share = projector, torch.nn.Parameter(torch.tensor(share))

    def start(self, y):
        return self.projector.fbp(y)

    def step(self, t, y, x):
        return self.share * x

class NotOne(torch.nn.Module):
    def __init__(self, projector, n_iterations, channels):
        super().__init__()

class Scaled(torch.nn.Module):
    def __init__(self, image_size, channels):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        return self.scale * x
"""
CUSTOM = ["model=custom", "model._target_=networks_of_mine.Half", "model.n_iterations=3"]
OWN_REGULARIZER = ["model.regularizer=networks_of_mine.Scaled", "model.detail_channels=0"]


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "networks_of_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_network_of_ones_own(other_config: Callable[..., Config]) -> None:
    config = other_config(*CUSTOM, "+model.share=0.25")
    assert method_name(config) == "Half"
    projector = build_projector(config)
    network, y = build_network(config, projector), torch.rand(1, 1, 8, 24)
    torch.testing.assert_close(network(y), 0.25**3 * projector.fbp(y))


def test_a_target_that_is_no_network_is_refused(other_config: Callable[..., Config]) -> None:
    with pytest.raises(PluginError, match=r"NotOne is not a subclass of qnmixer\.models\.UnrolledNetwork"):
        other_config("model=custom", "model._target_=networks_of_mine.NotOne")


def test_a_regularizer_of_ones_own(tiny_config: Callable[..., Config]) -> None:
    network = build_network(config := tiny_config(*OWN_REGULARIZER), build_projector(config))
    assert [type(module).__name__ for module in network.blocks()] == ["Scaled"]
    with pytest.raises(ConfigError, match=r"set detail_channels=0"):
        tiny_config(*OWN_REGULARIZER[:1])


def test_total_variation_knows_the_noise_that_slices_get_now() -> None:
    """Also that of an evaluation, which may be another than the config began with."""
    config, quiet = (
        parse(compose("train", ["experiment=demo", "model=tv", f"noise={it}"])) for it in ("physical", "none")
    )
    network = build_network(config, build_projector(config))
    assert isinstance(network, TotalVariation)
    y = torch.full((1, 1, 2, 3), 50.0)
    assert torch.equal(network.variance(y), build_noise(config).variance(y))
    config.noise = quiet.noise
    assert not network.variance(y).any()
