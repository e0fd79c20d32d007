"""A key stands at the argument of the class: types, bounds, defaults, Hydra's words, with a user's own classes."""

import shlex
from pathlib import Path

import pytest
import torch

from qnmixer.errors import CheckpointError, ConfigError, UserError
from qnmixer.module.parts import build_loss
from qnmixer.reconstruction.checkpoints import load_run, load_weights
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.reconstruction.weights import CHECKPOINT_KEY
from qnmixer.settings.run import Config, parse, parse_file

from ..conftest import config_of
from ..saved import write_checkpoint

MINE = """
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from pydantic import Field

from qnmixer.models import LEARN, UnrolledNetwork

class Net(UnrolledNetwork):
    def __init__(
        self, projector: "Unknown", n_iterations: Annotated[int, Ge(1)] = 2,
        channels: Annotated[int, Field(le=64), ["no hash"]] = 4,
        kind: Literal["a", "b"] = "a", scale: float = 1, pair: tuple[float, float] = (0, 1), free=None,
        part: torch.nn.Module | None = None,
    ):
        super().__init__(n_iterations)
        self.projector, self.pair, self.free = projector, pair, free
        self.part = part or torch.nn.Conv2d(1, 1, 3, padding=1)

    def start(self, y):
        return self.projector.fbp(y)

    def step(self, t, y, x):
        return x - self.part(x)

class Smaller(LEARN):
    def __init__(self, projector):
        super().__init__(projector, n_iterations=2, channels=4)

class Wide(torch.nn.Module):
    def __init__(self, width=4, bias=True):
        super().__init__()
        self.layer = torch.nn.Conv2d(1, width, 3, padding=1, bias=bias)

    def forward(self, x):
        return self.layer(x).mean(1, keepdim=True)

class Scaled(Wide):
    def __init__(self, image_size, channels, width):
        super().__init__(width)

class Loose(Net):
    def __init__(self, projector, n_iterations=2, **kw):
        super().__init__(projector, n_iterations, **kw)

def huber(image, truth, delta):
    return torch.nn.functional.huber_loss(image, truth, reduction="none", delta=delta).mean((1, 2, 3))
"""
PIPELINE = ["strategy=pipeline", "trainer.devices=2"]
NET = ["model=custom", "model._target_=signatures_of_mine.Net"]


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "signatures_of_mine.py"
    path.write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "signatures_of_mine", raising=False)
    return path


def train(*overrides: str) -> Config:
    small = ["data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40"]
    return config_of(*small, *overrides)


@pytest.mark.parametrize(("words", "message"), [
    (["model.n_iterations=0"], "model.n_iterations=0 should be greater than or equal to 1"),
    (["model.channels=65"], "model.channels=65 should be less than or equal to 64"),
    (["+model.kind=c"], "model.kind=c should be 'a' or 'b'"),
    (["+model.scale=much"], "model.scale=much should be a valid number"),
    (["+model.pair=1"], "model.pair=1 should be a valid tuple"),
    (["+model.sacle=2"], "unknown key model.sacle: did you mean model.scale?"),
    (["model._target_=signatures_of_mine.Loose", "~model.channels", "model.n_iterations={a: 1}", *PIPELINE],
     "model.n_iterations={'a': 1} should be a valid integer"),
    (["model._target_=signatures_of_mine.Loose", "+model.scale=much"], "model.scale=much should be a valid number"),
    (["+model.part={_target_: nowhere.X}"], "model.part._target_=nowhere.X, but there is no module nowhere"),
    (["+model.part={_target_: signatures_of_mine.Wide, widht: 2}"], "model.part cannot be built: "),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Reconstructor(train(*NET, *words))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_new_argument_is_one_place(mine: Path, tmp_path: Path) -> None:
    """It is added to the constructor alone. A file from before then takes its default, and goes on as before."""
    before = write_checkpoint(Reconstructor(train(*NET)), tmp_path / "a.ckpt")
    mine.write_text(MINE.replace("kind:", "added: Annotated[int, Ge(3)] = 5, kind:"))
    __import__("sys").modules.pop("signatures_of_mine")
    with pytest.raises(ConfigError, match=r"model\.added=2 should be greater than or equal to 3"):
        train(*NET, "+model.added=2")
    load_run(before, trust=["signatures_of_mine"])
    load_weights(Reconstructor(train(*NET, "+model.added=5")), before)
    assert train(*NET, "+model.added=7").model.settings()["added"] == 7


LOOSE = ["model=custom", "model._target_=signatures_of_mine.Loose", "~model.channels"]


@pytest.mark.parametrize(("before", "now"), [
    ([*NET, "+model.scale=2", "+model.pair=[1,2]"], [*NET, "~model.channels", "model.n_iterations=3"]),
    (NET, [*LOOSE, "+model.free='a: b'"]),
    ([*LOOSE, "+model.free={a: [1, null], b: 'c d'}"], [*NET, "+model.scale=3"]),
    ([*NET, "model.n_iterations=3"], ["model=learn"]),
    (["model=learn", "model.n_iterations=2", "model.channels=4"], NET),
])  # fmt: skip
def test_the_words_for_the_same_network_can_be_pasted(before: list[str], now: list[str], tmp_path: Path) -> None:
    path = write_checkpoint(Reconstructor(train(*before)), tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="has another network: to build the same one, set ") as error:
        load_weights(Reconstructor(train(*now)), path)
    words = shlex.split(str(error.value).partition("one, set ")[2])
    another = any(word.startswith("model=") for word in words)  # a group is chosen once
    load_weights(Reconstructor(train(*([] if another else now), *words)), path)


def test_types_are_those_of_the_arguments() -> None:
    config = train(*NET, "+model.scale=3", "+model.pair=[1,2]", "+model.free={a: [1]}")
    assert type(config.model.scale) is float
    assert config.model.pair == [1.0, 2.0]  # in the form of a checkpoint
    network = Reconstructor(config).network
    assert (network.pair, network.free) == ((1.0, 2.0), {"a": [1]})
    assert parse(config.plain()) == config


def test_a_network_says_its_iterations() -> None:
    config = train(
        "model=custom", "model._target_=signatures_of_mine.Smaller", "~model.n_iterations", "~model.channels"
    )
    assert (config.model.T, config.model.is_unrolled, config.model.divisors()) == (1, False, {})
    assert (train("model=fbp").model.T, train("model=tv").model.T) == (0, 5000)


def test_hydras_words_are_those_of_hydra() -> None:
    config = train("loss=custom", "loss._target_=signatures_of_mine.huber", "+loss._partial_=true", "+loss.delta=0.5")
    value = build_loss(config.loss)(torch.ones(2, 1, 8, 8), torch.zeros(2, 1, 8, 8))
    torch.testing.assert_close(value, torch.full((2,), 0.375))
    assert parse(config.plain()) == config
    config = train(*NET, "+model.part={_target_: signatures_of_mine.Wide, width: 6, bias: '${compile}'}")
    part = Reconstructor(config).network.part
    assert (part.layer.out_channels, part.layer.bias) == (6, None)
    assert config.model.targets()["model.part._target_"] == "signatures_of_mine.Wide"


@pytest.mark.parametrize(("part", "width"), [
    ("signatures_of_mine.Wide", None),
    ("{_target_: signatures_of_mine.Wide, width: 6}", 6),
    ("{_target_: signatures_of_mine.Scaled, _partial_: true, width: 5}", 5),
])  # fmt: skip
def test_a_regularizer_in_each_form(part: str, width: int | None) -> None:
    config = train(f"model.regularizer={part}", "model.detail_channels=0", "model.n_iterations=2")
    network = Reconstructor(config).network
    if width is not None:
        assert network.regularizers[0].layer.out_channels == width


@pytest.mark.parametrize("key", ["regularizer", "codec"])
@pytest.mark.parametrize("part", [
    {"_target_": "evil_of_mine.X"},
    [{"a": {"_target_": "evil_of_mine.X"}}],
    {"_target_": "qnmixer.files.write_text", "path": "written", "text": "x"},
    {"_target_": "qnmixer.files.os.system", "command": "touch written"},
    {"_target_": "torch.nn.Linear", "in_features": "${oc.env:HOME}", "out_features": 1},
])  # fmt: skip
def test_a_part_in_the_file_of_somebody_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, part: object
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil_of_mine.py").write_text("open('written', 'w')\n")
    plain = train().plain()
    plain["model"] |= {key: part, "detail_channels": 0}
    parse_file(plain)
    torch.save({CHECKPOINT_KEY: {"config": plain}, "state_dict": {}}, tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=r"trust=|is not a subclass|no module|should be 'orthonormal'"):
        load_run(tmp_path / "a.ckpt")
    assert not (tmp_path / "written").exists()
