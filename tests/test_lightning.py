"""`qnmixer.lightning`: the script of docs/library.md, and what Lightning's Trainer promises for its parts."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.tuner import Tuner

from qnmixer.errors import CheckpointError
from qnmixer.lightning import Checkpointing, Measurement, ReconstructionModule, slices
from qnmixer.models import QNMixer
from qnmixer.physics import FanBeamGeometry, FanBeamProjector, PhysicalNoise
from qnmixer.runs.processes import process

from .conftest import assert_equal
from .pages import ROOT
from .warm import Warm

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process remembers the stop signal of an earlier test."""
    monkeypatch.setattr(process, "_received", None)


def network() -> QNMixer:
    torch.manual_seed(0)
    return QNMixer(FanBeamProjector(FanBeamGeometry.paper(8, 16)), n_iterations=2, channels=4, n_mixer_layers=1)


def data() -> L.LightningDataModule:
    return slices("phantoms", image_size=16, batch_size=2, n_train=8, n_val=2, n_test=2, num_workers=0)


def fitted(folder: Path, n_steps: int, **options: Any) -> tuple[L.Trainer, ReconstructionModule]:
    module = ReconstructionModule(network())
    trainer = L.Trainer(max_steps=n_steps, callbacks=[Checkpointing(folder)], **QUIET)
    trainer.fit(module, datamodule=data(), **options)
    return trainer, module


@pytest.mark.slow
def test_the_script_of_the_docs_trains(warm: Warm, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "library.md").read_text()
    (script,) = re.findall(r"```python\n(import lightning.*?)```", page, re.DOTALL)
    assert len(script.splitlines()) <= 30
    for size, tiny in {"max_steps=16": "max_steps=4", "interval=8": "interval=2", "n_train=32": "n_train=8"}.items():
        assert size in script
        script = script.replace(size, tiny)
    (tmp_path / "script.py").write_text(script)
    done = warm.run("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test/psnr" in done.stdout
    assert "MiB in tensors at the peak of a step" in done.stdout


def test_a_script_resumes_bit_for_bit_and_its_checkpoint_loads(tmp_path: Path) -> None:
    _, whole = fitted(tmp_path / "whole", 6)
    fitted(tmp_path / "part", 3)
    last = tmp_path / "part" / "checkpoints" / "last.ckpt"
    trainer, resumed = fitted(tmp_path / "part", 6, ckpt_path=last, weights_only=True)
    assert trainer.global_step == 6
    assert_equal(resumed.network.state_dict(), whole.network.state_dict())
    loaded = ReconstructionModule.load_from_checkpoint(last, network=network())
    assert_equal(loaded.network.state_dict(), resumed.network.state_dict())
    with pytest.raises(CheckpointError, match="or give network=… for the checkpoint of a script"):
        ReconstructionModule.load_from_checkpoint(last)


def test_validate_test_and_predict(tmp_path: Path) -> None:
    trainer, module = fitted(tmp_path, 2)
    (values,) = trainer.validate(module, datamodule=data(), verbose=False)
    assert {"val/loss", "val/psnr", "val/ssim"} <= values.keys()
    (values,) = trainer.test(module, datamodule=data(), verbose=False)
    assert {"test/loss", "test/psnr", "test/ssim"} == values.keys()
    test = data()
    test.setup("test")
    predicted = trainer.predict(module, dataloaders=test.test_dataloader())
    assert predicted is not None
    batch = next(iter(test.test_dataloader()))
    expected = module.network(module.measure(batch, "test"))
    assert torch.equal(predicted[0], expected)


def test_the_lr_finder_sets_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ReconstructionModule(network())
    trainer = L.Trainer(max_steps=2, **QUIET)
    finder = Tuner(trainer).lr_find(module, datamodule=data(), num_training=20)
    assert finder is not None
    assert module.learning_rate == finder.suggestion() != 1e-3
    trainer.fit(module, datamodule=data())
    assert trainer.optimizers[0].param_groups[0]["lr"] == module.learning_rate


def test_noise_is_a_measurement(tmp_path: Path) -> None:
    module = ReconstructionModule(network())
    batch = {"image": torch.full((1, 1, 16, 16), 0.3), "sample": torch.tensor([5])}
    clean = module.measure(batch, "train")
    module.measurement = Measurement(module.network.projector, PhysicalNoise(1e4, 5.0), seed=1)
    noisy = module.measure(batch, "train")
    assert not torch.equal(noisy, clean)
    assert torch.equal(noisy, module.measure(batch, "train"))


OF_TWO = {
    "one": ('"auto"', 1), "ddp": ("DDPStrategy()", 2), "fsdp": ("FSDPStrategy(2)", 2),
    "pipeline": ("PipelineStrategy(2, batch_size=2)", 2),
}  # fmt: skip
ON_TWO = """
import lightning as L, torch
from qnmixer.lightning import *
from qnmixer.models import QNMixer
from qnmixer.physics import FanBeamGeometry, FanBeamProjector

torch.set_num_threads(1)
torch.manual_seed(0)
network = QNMixer(FanBeamProjector(FanBeamGeometry.paper(8, 16)), n_iterations=2, channels=4, n_mixer_layers=1)
module = ReconstructionModule(network, optimizer=lambda network: torch.optim.SGD(network.parameters(), lr=0.1))
keys = dict(image_size=16, n_train=16, n_val=2, n_test=2, num_workers=0)
data = slices("phantoms", batch_size=4 // {n}, **keys)
trainer = L.Trainer(
    max_steps=4, strategy={strategy}, accelerator="cpu", devices={n}, logger=False, use_distributed_sampler=False,
    callbacks=[Checkpointing("{name}")], num_sanity_val_steps=0, enable_progress_bar=False,
)
trainer.fit(module, datamodule=data)
"""


@pytest.mark.slow
@pytest.mark.long
def test_strategies_by_object_are_as_one_process(tmp_path: Path) -> None:
    trained = {}
    for name, (strategy, n) in OF_TWO.items():
        (tmp_path / f"{name}.py").write_text(ON_TWO.format(name=name, strategy=strategy, n=n))
        done = subprocess.run([sys.executable, f"{name}.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        checkpoint = torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)
        assert checkpoint["global_step"] == 4
        trained[name] = torch.cat([value.flatten() for _, value in sorted(checkpoint["state_dict"].items())])
    for name, found in trained.items():
        assert float((found - trained["one"]).norm() / trained["one"].norm()) < 1e-6, name


def test_slices_of_ones_own_class_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(Path(__file__).with_name("own.py"), tmp_path / "drawn.py")
    monkeypatch.chdir(tmp_path)
    data = slices("drawn.MySlices", year=2016, image_size=16, batch_size=3, num_workers=0)
    data.setup("validate")
    (batch,) = data.val_dataloader()
    assert batch["image"].shape == (2, 1, 16, 16)
