"""`MyModule.load_from_checkpoint(best.ckpt)` gives the module of a run, and runs no code that the file alone names."""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from qnmixer import load_pretrained
from qnmixer.errors import CheckpointError, PluginError
from qnmixer.lightning import ReconstructionModule
from qnmixer.train import train

from ..conftest import PHANTOMS, TINY, assert_equal

pytestmark = [
    pytest.mark.xdist_group("loading modules"),  # else each worker would train the two runs
    pytest.mark.filterwarnings("ignore:Attribute '(network|critic)' is an instance of `nn.Module`"),
]
CODE = """
import torch
from torch import nn
from qnmixer.lightning import ReconstructionModule, RunModule


def huber(image, truth, delta=1.0):
    return nn.functional.huber_loss(image, truth, reduction="none", delta=delta).mean((1, 2, 3))


class Critic(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Conv2d(1, width, 1)


class Own(RunModule):
    \"\"\"It has no defaults, saves its arguments as in Lightning's tutorial, and trains a network beside.\"\"\"

    def __init__(self, network, loss, optimizer, schedule, metrics, weights: tuple[float, ...], critic):
        super().__init__()
        self.save_hyperparameters()
        self.network, self.loss, self.optimizer = network, loss, optimizer
        self.schedule, self.metrics, self.weights, self.critic = schedule, metrics, weights, critic

    def training_step(self, batch, batch_idx):
        image = self.network(self.measure(batch, "train"))
        return (batch["weight"] * self.loss(image, batch["image"])).mean() + self.critic.layer(image).mean() ** 2

    def validation_step(self, batch, batch_idx):
        image = self.network(self.measure(batch, "val"))
        values = {name: metric(image, batch) for name, metric in self.metrics.items()}
        self.log_means("val", {"loss": self.loss(image, batch["image"])} | values, counted=batch["weight"] > 0)

    def configure_optimizers(self):
        return self.optimizer(self)

    def hidden_weights(self):
        return []

    step_scalars = hidden_weights


class Smooth(ReconstructionModule):
    def __init__(self, smooth, **parts):
        super().__init__(**parts)
        self.smooth = smooth


class Parent(ReconstructionModule):
    def __init__(self, **parts):
        super().__init__(**parts)


class Alone(ReconstructionModule):
    def __init__(self, channels=4):
        from qnmixer.models import QNMixer
        from qnmixer.physics import FanBeamGeometry, FanBeamProjector

        projector = FanBeamProjector(FanBeamGeometry.paper(8, 16))
        super().__init__(QNMixer(projector, n_iterations=1, channels=channels, n_mixer_layers=1))
        self.save_hyperparameters()
"""
PARTS = ["loss=custom", "loss._target_=my_parts.huber", "+loss.delta=0.1", "optimizer=sgd", "optimizer.lr=0.02"]
OWN = [
    "module._target_=my_parts.Own", "+module.weights=[0.5,2]", "+module.critic._target_=my_parts.Critic",
    "+module.critic.width=3",
]  # fmt: skip
SMOOTH = ["module._target_=my_parts.Smooth", "+module.smooth=0.25"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "my_parts.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        for name, words in (("own", OWN), ("smooth", SMOOTH)):
            train(*TINY, *PHANTOMS, *PARTS, *words, "callbacks=none", f"hydra.run.dir={name}")
        yield folder
    sys.modules.pop("my_parts")


@pytest.mark.parametrize("name", ["own", "smooth"])
def test_it_comes_back_with_all_its_parts(here: Path, name: str) -> None:
    import my_parts

    path = here / name / "checkpoints" / "best.ckpt"
    kind = {"own": my_parts.Own, "smooth": my_parts.Smooth}[name]
    module = kind.load_from_checkpoint(path)
    assert type(module) is kind
    saved = torch.load(path, weights_only=True)
    assert_equal(module.state_dict(), saved["state_dict"])
    x, truth = torch.rand(2, 2, 1, 16, 16)
    assert torch.equal(module.loss(x, truth), my_parts.huber(x, truth, 0.1))
    optimizer = module.optimizer(module.network)
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (torch.optim.SGD, 0.02)
    assert module.schedule(40)(0) == 0.5  # in a warm-up of one step
    assert {*module.metrics} == {"psnr", "ssim"}
    y = module.measurement.projector(x)
    assert torch.equal(module.network.eval()(y), load_pretrained(here / name)(y))
    if name == "own":
        assert module.weights == (0.5, 2)
        assert saved["hyper_parameters"] == {"weights": [0.5, 2], "critic": {"_target_": "my_parts.Critic", "width": 3}}
    else:
        assert (module.smooth, saved["hyper_parameters"]) == (0.25, {"smooth": 0.25})
    assert dict(module.hparams) == saved["hyper_parameters"]


def test_it_resumes_though_its_class_saves_all_its_arguments(here: Path) -> None:
    train("resume=own", "trainer.max_steps=5")
    assert torch.load(here / "own/checkpoints/last.ckpt", weights_only=True)["global_step"] == 5


def test_an_argument_takes_the_place_of_that_of_the_file(here: Path) -> None:
    import my_parts

    path = here / "smooth" / "checkpoints" / "best.ckpt"
    module = my_parts.Smooth.load_from_checkpoint(path, smooth=7, loss=torch.nn.L1Loss())
    assert (module.smooth, type(module.loss)) == (7, torch.nn.L1Loss)
    assert dict(module.hparams) == {"smooth": 7}  # they were those of the file, and so in the next checkpoint
    base = ReconstructionModule.load_from_checkpoint(path, strict=True)
    assert (type(base), dict(base.hparams)) == (ReconstructionModule, {})  # it takes no `smooth`
    assert_equal(base.network.state_dict(), load_pretrained(here / "smooth").state_dict())


def test_a_class_that_does_not_fit_is_named_in_one_line(here: Path) -> None:
    """It was a TypeError of the base class, or a RuntimeError of many lines."""
    import my_parts

    path, other = (here / name / "checkpoints" / "best.ckpt" for name in ("smooth", "own"))
    with pytest.raises(CheckpointError, match=r"best.ckpt is of my_parts.Smooth, which has smooth: load it with that "):
        my_parts.Parent.load_from_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"is of my_parts.Own, which has weights, critic: .* \(Error.*\)$"):
        ReconstructionModule.load_from_checkpoint(other)


def test_of_a_stranger_only_the_class_that_is_called_is_trusted(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import my_parts

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = here / "smooth" / "checkpoints" / "best.ckpt"
    with pytest.raises(PluginError, match=r"loss\._target_=my_parts\.huber, which is not part of qnmixer"):
        my_parts.Smooth.load_from_checkpoint(path)
    assert type(my_parts.Smooth.load_from_checkpoint(path, trust=["my_parts"])) is my_parts.Smooth
    checkpoint = torch.load(here / "own/checkpoints/best.ckpt", weights_only=True)
    config = checkpoint["qnmixer"]["config"]
    config["loss"] = {"_target_": "qnmixer.losses.mse"}
    torch.save(checkpoint, tmp_path / "own.ckpt")
    with pytest.raises(PluginError, match=r"module\.critic\._target_=my_parts\.Critic, which is not part of qnmixer"):
        my_parts.Own.load_from_checkpoint(tmp_path / "own.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["qnmixer"]["config"]["loss"] = {"_target_": "qnmixer.losses.mse"}
    checkpoint["hyper_parameters"]["_instantiator"] = "lightning.pytorch.cli.instantiate_module"
    torch.save(checkpoint, tmp_path / "smooth.ckpt")
    assert my_parts.Smooth.load_from_checkpoint(tmp_path / "smooth.ckpt").smooth == 0.25


def test_of_a_script_it_is_as_in_lightning(here: Path, tmp_path: Path) -> None:
    import my_parts

    module = my_parts.Alone(channels=8)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "alone.ckpt")
    loaded = my_parts.Alone.load_from_checkpoint(tmp_path / "alone.ckpt")
    assert loaded.network.state_dict().keys() == module.network.state_dict().keys()
    with pytest.raises(CheckpointError, match="or give network=… for the checkpoint of a script"):
        my_parts.Smooth.load_from_checkpoint(tmp_path / "alone.ckpt")
