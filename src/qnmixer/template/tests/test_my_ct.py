"""The project trains, and what it is made of fits together. It takes one to two minutes, mostly to load libraries."""

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.train import train

from my_ct.data import Bodies
from my_ct.losses import charbonnier, edges
from my_ct.network import MyNetwork

TINY = [
    "data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40",
    "model.n_iterations=2", "model.channels=8", "data.n_train=8", "data.n_held_out=4", "data.num_workers=0",
    "trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "logger=csv",
]  # fmt: skip


def trained(folder: Path, *words: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a run in this process, and the weights at its end."""
    train(*TINY, *words, f"hydra.run.dir={folder}")
    with (folder / "metrics.csv").open() as stream:
        losses = [float(row["train/loss"]) for row in csv.DictReader(stream) if row["train/loss"]]
    return losses, torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def test_the_loss_falls(tmp_path: Path) -> None:
    losses, _ = trained(tmp_path, "trainer.max_steps=40", "trainer.val_every_n_steps=40", "optimizer.lr=3e-2")
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4])
    assert "| Mine |" in (tmp_path / "evaluation" / "table.md").read_text()
    assert (tmp_path / "evaluation" / "picture.png").is_file()


def test_two_processes_have_the_gradient_of_one(tmp_path: Path) -> None:
    """After one step of plain gradient descent, each weight has moved by its gradient."""
    descent = ["optimizer=sgd", "optimizer.lr=1", "schedule=constant", "schedule.warmup=0", "trainer.max_steps=1"]
    settings = [*descent, "trainer.val_every_n_steps=1", "test_after_training=false"]
    _, expected = trained(tmp_path / "one", *settings, "data.batch_size=4")
    _, weights = trained(tmp_path / "two", *settings, "data.batch_size=2", "strategy=ddp", "trainer.devices=2")
    assert float(expected["network.denoiser.4.weight"].abs().max()) > 1e-3  # it starts at 0
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-4, atol=1e-6)


def test_a_typo_is_one_line() -> None:
    command = [sys.executable, "-m", "my_ct.train", *TINY, "model.chanels=4"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr.startswith("error: ")
    assert "did you mean model.channels?" in process.stderr
    assert len(process.stderr.splitlines()) == 1


def test_the_network_gives_images_of_its_scan() -> None:
    geometry = FanBeamGeometry(
        image_size=16, pixel_size=25.0, n_views=8, n_detectors=24, detector_pitch=40.0, source_to_axis=1000.0,
        axis_to_detector=500.0,
    )  # fmt: skip
    network = MyNetwork(FanBeamProjector(geometry), n_iterations=2, channels=4)
    sinogram = network.projector(torch.rand(3, 1, 16, 16))
    assert sinogram.shape == (3, 1, 8, 24)
    image = network(sinogram)
    assert image.shape == (3, 1, 16, 16)
    image.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("loss", [charbonnier, edges])
def test_a_loss_is_a_number_for_each_image(loss: Callable[..., torch.Tensor]) -> None:
    truth = torch.rand(3, 1, 16, 16)
    assert loss(truth, truth).tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert (loss(truth + 0.1, truth) > 0).all()
    assert loss(truth, truth).shape == (3,)


def test_slices_are_in_hu_and_in_one_part_only() -> None:
    parts = {part: Bodies(part, 32, n_train=4, n_held_out=2) for part in ("train", "val", "test")}
    assert [len(slices) for slices in parts.values()] == [4, 2, 2]
    image = parts["train"].load(0)
    assert image.shape == (32, 32)
    assert image.min() == -1000
    assert np.array_equal(image, parts["train"].load(0))
    assert not np.array_equal(image, parts["val"].load(0))
