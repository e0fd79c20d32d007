import torch

from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import parse
from qnmixer.engine.reconstructor import build_network, build_noise, build_projector
from qnmixer.models import TotalVariation


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
