"""A plain torch module as a network: what it gets and gives, what it cannot do, and its way through every command."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qnmixer import load_pretrained
from qnmixer.errors import ConfigError
from qnmixer.measurement.build import build_network, build_projector
from qnmixer.models import UnrolledNetwork
from qnmixer.models.plain import PlainNetwork
from qnmixer.physics import FanBeamGeometry, FanBeamProjector

from ..conftest import PHANTOMS, TINY, config_of, environment
from ..data.conftest import make_ct
from ..warm import Warm

CODE = """
from torch import nn

class UNet(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, image):
        return image + self.layers(image)

class OfSinogram(UNet):
    def __init__(self, projector, width: int = 4):
        super().__init__(width)
        self.projector = projector

    def forward(self, y):
        return super().forward(self.projector.fbp(y))
"""
WORDS = [word for word in TINY if not word.startswith("model.")] + [
    *PHANTOMS, "model=custom", "~model.n_iterations", "~model.channels", "model._target_=my_plain.UNet",
]  # fmt: skip


def test_a_training_step_finds_what_only_the_module_has() -> None:
    network = PlainNetwork(FanBeamProjector(FanBeamGeometry.paper(8, 16)), nn.Linear(3, 5), of_sinogram=False)
    assert (network.in_features, network.title) == (3, "Linear")
    assert not hasattr(network, "nothing")
    assert deepcopy(network).weight.shape == (5, 3)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_plain.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("target", ["UNet", "OfSinogram"])
def test_it_gets_fbp_or_the_sinogram(here: Path, target: str) -> None:
    config = config_of(*WORDS, f"model._target_=my_plain.{target}", "+model.width=6")
    projector = build_projector(config)
    network: Any = build_network(config, projector)
    y = projector(torch.rand(2, 1, 16, 16))
    assert (type(network), config.model.title, config.model.T) == (PlainNetwork, target, 1)
    assert network.module.layers[0].out_channels == 6
    fbp = projector.fbp(y)
    assert torch.equal(network(y), fbp + network.module.layers(fbp))
    assert torch.equal(network.iterates(y)[0], fbp)


@pytest.mark.parametrize(("words", "line"), [
    ("memory=recompute", "^memory=recompute runs steps again, but model._target_=my_plain.UNet has none"),
    ("module=all_iterates", "^module=all_iterates needs the iterates of steps, but"),
    ("strategy=pipeline trainer.devices=2", "^strategy=pipeline cuts iterations into stages, but"),
])  # fmt: skip
def test_what_needs_steps_says_so(here: Path, words: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        config_of(*WORDS, *words.split())


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyConv2d(1, 3)


class Named(UnrolledNetwork[torch.Tensor]):
    def __init__(self, projector: FanBeamProjector, kind: str = "module") -> None:
        super().__init__(1)
        if kind == "module":
            self.image = nn.Conv2d(1, 1, 1)
        elif kind == "weight":
            self.step = nn.Parameter(torch.zeros(1))
        else:
            self.register_buffer("run", torch.zeros(1))

    def start(self, y: torch.Tensor) -> torch.Tensor:
        return y

    def step(self, t: int, y: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return state


@pytest.mark.parametrize(("words", "line"), [
    ("Lazy", r"^model\._target_=tests\.models\.test_plain\.Lazy has module\.layer\.weight without a shape"),
    ("Named", r"^Named\.image is a method"),
    ("Named +model.kind=weight", r"^Named\.step is a method"),
    ("Named +model.kind=buffer", r"^model\._target_=\S+\.Named refuses .*attribute 'run' already exists"),
])  # fmt: skip
def test_names_of_methods_and_lazy_modules_are_one_line(words: str, line: str) -> None:
    """torch takes a module named like a method, and then calls the method."""
    config = config_of(*WORDS, *f"model._target_={__name__}.{words}".split())
    with pytest.raises(ConfigError, match=line):
        build_network(config, build_projector(config))


@pytest.mark.parametrize("module", [nn.Flatten(0, 1), nn.Conv2d(1, 2, 1), nn.AvgPool2d(2)])
def test_what_is_no_image_is_refused(module: nn.Module) -> None:
    projector = FanBeamProjector(FanBeamGeometry.paper(8, 16))
    with pytest.raises(ConfigError, match=rf"^{type(module).__name__} gives \[.*\], not images \[1, 1, 16, 16\]$"):
        PlainNetwork(projector, module, of_sinogram=False)(projector(torch.zeros(1, 1, 16, 16)))


@pytest.mark.extras
@pytest.mark.slow
def test_it_trains_evaluates_reconstructs_exports_and_loads(here: Path, warm: Warm) -> None:
    def run(command: str, *words: str) -> str:
        done = warm.run("-m", f"qnmixer.{command}", *words, cwd=here, env=environment())
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("train", *WORDS, "test_after_training=true", "hydra.run.dir=run")
    table = (here / "run/evaluation/table.csv").read_text()
    assert "\nUNet," in table
    run("evaluate", "run=run", "hydra.run.dir=again")
    assert (here / "again/table.csv").read_text() == table
    make_ct(here / "ct/1.dcm")
    run("reconstruct", "run=run", "input=ct", "output=out")
    assert (here / "out/1.dcm").is_file()
    run("export", "run=run", "output=unet.safetensors")
    networks = [load_pretrained(here / name, trust=["my_plain"]) for name in ("run", "unet.safetensors")]
    y = torch.rand(1, 1, 8, 24)
    assert torch.equal(networks[0](y), networks[1](y))
