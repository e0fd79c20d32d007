import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from qnmixer.data.batch import Batch
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.errors import ConfigError, PluginError
from qnmixer.losses import l1
from qnmixer.module import ReconstructionModule
from qnmixer.training.callbacks import StepMetrics
from qnmixer.training.steps import prepared_module

from ..conftest import tiny_config, tiny_module
from ..physics.ellipses import ellipse_image, ellipse_integrals, relative_error


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_is_checked_before_the_next_one(value: float, device: str) -> None:
    """With accumulation, no optimizer step is between the two. On a CPU the answer is there at once."""
    checks = StepMetrics()

    def ask(*losses: float) -> None:
        for loss in losses:
            checks.on_before_backward(SimpleNamespace(global_step=3), None, torch.tensor(loss, device=device))  # type: ignore[arg-type]

    ask(1.0)
    with pytest.raises(FloatingPointError, match=f"the loss became {value} at step 3"):
        ask(value, 1.0)
    ask(1.0)  # said once


def test_a_loss_for_each_image_is_refused() -> None:
    with pytest.raises(PluginError, match=r"Module\.training_step gives a tensor \[3\]: it must give one number"):
        StepMetrics().on_before_backward(SimpleNamespace(global_step=0), tiny_module(), torch.ones(3))  # type: ignore[arg-type]


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    """Another rank's loss may have spoilt them, and what was written before stays."""
    module = tiny_module()
    trainer = fitted(module, tmp_path)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    before = path.read_bytes()
    with torch.no_grad():
        next(module.parameters()).fill_(math.nan)
    with pytest.raises(FloatingPointError, match="the norm of the weights became nan at step 4"):
        trainer.save_checkpoint(path)
    assert path.read_bytes() == before


def fitted(module: ReconstructionModule, folder: Path, **options: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder,
        callbacks=[StepMetrics()], **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=SliceDataModule(module.config.data))
    return trainer


class Clipping(ReconstructionModule):
    """Clips its gradients itself, and reads them when the step is done. Its second loss overflows."""

    def __init__(self, algorithm: str, bound: float, **parts: Any) -> None:
        super().__init__(**parts)
        self.automatic_optimization = False
        self.algorithm, self.bound = algorithm, bound
        self.gradients: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = (batch["weight"] * self.loss(self.network(self.measure(batch, "train")), batch["image"])).mean()
        optimizer.zero_grad()
        self.manual_backward(loss if self.global_step != 1 else loss * 1e36)
        self.clip_gradients(optimizer, self.bound, self.algorithm)
        optimizer.step()
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.network.parameters() if p.grad is not None]))
        return loss.detach()


@pytest.mark.parametrize(("algorithm", "bound"), [("norm", 1e-3), ("value", 1e-5)])
def test_a_module_that_clips_itself_clips_without_the_loss_scale(tmp_path: Path, algorithm: str, bound: float) -> None:
    """Gradients of 16-mixed were clipped to 1 / 65,536 of the bound. A step that overflows is skipped all the same."""
    target = [f"module._target_={__name__}.Clipping", f"+module.algorithm={algorithm}", f"+module.bound={bound}"]
    module = tiny_module(*target, "optimizer=sgd", "trainer.gradient_clip_val=null")
    precision = MixedPrecision("16-mixed", "cpu")
    fitted(module, tmp_path, plugins=[precision])
    for step, gradients in enumerate(module.gradients):
        size = gradients.norm() if algorithm == "norm" else gradients.abs().max()
        assert math.isfinite(size) == (step != 1)
        assert step == 1 or float(size) == pytest.approx(bound, rel=1e-4)
    assert precision.scaler.get_scale() == 32_768
    assert all(bool(p.isfinite().all()) for p in module.parameters())


def test_the_norm_is_before_clipping_and_the_schedule_is_of_optimizer_steps(tmp_path: Path) -> None:
    module = tiny_module("schedule=cosine", "schedule.warmup=0", "optimizer.lr=0.01")
    trainer = fitted(module, tmp_path, accumulate_grad_batches=2, gradient_clip_val=1e-6, log_every_n_steps=1)
    assert float(trainer.callback_metrics["train/grad_norm"]) > 1e-4
    assert trainer.global_step == 4
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)


def test_finer_images_bring_sinograms_nearer_to_the_truth() -> None:
    measurement = tiny_module("geometry.n_detectors=48", "geometry.detector_pitch=20").measurement
    geometry = measurement.projector.geometry
    image, fine = (ellipse_image(replace(geometry, image_size=n, pixel_size=400 / n)) for n in (16, 64))
    errors = [relative_error(measurement.project(image, x), ellipse_integrals(geometry)) for x in (None, fine)]
    assert errors[1] < 0.5 * errors[0]
    assert errors[1] < 0.02


@pytest.mark.parametrize("memory", ["keep", "recompute", "offload"])
def test_a_loss_on_all_iterates_is_the_mean_of_their_losses(memory: str) -> None:
    """And its gradient. Weights of the images count, and x₀, which nothing learns, does not."""
    words = ["module=all_iterates", "loss=l1", "model.n_iterations=3", "noise=field"]
    module, plain = tiny_module(*words, f"memory={memory}"), tiny_module(*words).network
    batch = next(iter(SliceDataModule(module.config.data).loader("train")))
    batch["weight"] = torch.arange(1.0, 1 + len(batch["image"]))
    state = plain.start(y := module.measure(batch, "train"))
    expected = torch.zeros(())
    for t in range(3):
        state = plain.step(t, y, state)
        expected = expected + (batch["weight"] * l1(plain.image(state), batch["image"])).mean() / 3
    loss = module.training_step(batch, 0)
    torch.testing.assert_close(loss, expected)
    assert not torch.allclose(loss, (batch["weight"] * l1(plain(y), batch["image"])).mean(), rtol=1e-3)
    for value in (loss, expected):
        value.backward()
    for weight, expected_weight in zip(module.network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected_weight.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("memory", ["keep", "recompute"])
def test_a_loss_on_passes_starts_each_at_the_image_before(memory: str) -> None:
    """And its gradient, with that of steps beyond the stable limit."""
    words = ["module=passes", "module.step_penalty=0.5", "loss=l1", "noise=none"]
    module, plain = tiny_module(*words, f"memory={memory}").double(), tiny_module(*words).network.double()
    for network in (module.network, plain):
        with torch.no_grad():
            network.step_sizes[1].fill_(3 * module.projector.safe_step_size())
    batch = next(iter(SliceDataModule(module.config.data).loader("train")))
    batch["image"] = batch["image"].double()
    y = module.measure(batch, "train")
    state = plain.start(y)
    first = plain(y)
    second = plain.run(range(2), y, state._replace(x=first))
    expected = sum(l1(image, batch["image"]).mean() / 2 for image in (first, plain.image(second)))
    expected = expected + 0.5 * (plain.step_sizes[1] / module.projector.safe_step_size() - 2).square().sum()
    loss = module.training_step(batch, 0)
    torch.testing.assert_close(loss, expected)
    for value in (loss, expected):
        value.backward()
    for weight, expected_weight in zip(module.network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected_weight.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("words", "way"), [
    ([], "trainer.gradient_clip_val=null"),
    (["trainer.gradient_clip_val=null", "trainer.accumulate_grad_batches=2"], "trainer.accumulate_grad_batches=1"),
])  # fmt: skip
def test_what_a_module_that_optimizes_by_itself_cannot_take_is_told_at_once(words: list[str], way: str) -> None:
    manual = [f"module._target_={__name__}.Clipping", "+module.algorithm=norm", "+module.bound=1", *words]
    with pytest.raises(ConfigError, match=rf"^this module optimizes by itself .*: set {way}$"):
        prepared_module(tiny_config(*manual))
    assert not prepared_module(tiny_config(*manual, way)).automatic_optimization
