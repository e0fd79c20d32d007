"""module=split_views: it learns from sinograms alone, and everything but its training step sees all views."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from qnmixer.engine.batch import Batch
from qnmixer.engine.build import build_module
from qnmixer.engine.config.run import Config
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.memory.modes import apply_memory_mode
from qnmixer.engine.memory.plan import Planner
from qnmixer.errors import ConfigError
from qnmixer.split_views import SplitViews

LEARN = ("module=split_views", "model=learn", "model.n_iterations=2", "model.channels=4", "model.data_term=fbp")
Other = Callable[..., Config]


def built(other_config: Other, *overrides: str) -> SplitViews:
    L.seed_everything(0, verbose=False)
    module = build_module(other_config(*LEARN, *overrides))
    assert isinstance(module, SplitViews)
    apply_memory_mode(module.network, module.config.memory)
    with torch.no_grad():
        for step_size in module.network.step_sizes:
            step_size.fill_(0.1)
    return module


def measured(module: SplitViews) -> Batch:
    """A batch with its sinograms, whose truth is gone."""
    batch: Batch = next(iter(SliceDataModule(module.config.data).loader("train")))
    batch["sinogram"] = module.measure(batch, "train")
    batch["image"] = torch.full_like(batch["image"], torch.nan)
    return batch


def test_the_loss_falls_without_a_truth_image(other_config: Other) -> None:
    module = built(other_config, "noise=field")
    batch = measured(module)
    optimizer = torch.optim.Adam(module.network.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = module.training_step(batch, 0)
        loss.backward()
        module.on_after_backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_recomputing_changes_no_bit(other_config: Other) -> None:
    """A step that is computed again in backward still sees the kept views alone."""
    gradients: list[list[Tensor]] = []
    for memory in ("keep", "recompute"):
        module = built(other_config, f"memory={memory}")
        module.training_step(measured(module), 0).backward()
        gradients.append([p.grad for p in module.network.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) == 14
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_image_knows_nothing_of_the_views_of_the_loss(other_config: Other) -> None:
    """And the loss nothing of others but by the image."""
    module = built(other_config)
    batch = measured(module)
    left_out = module.left_out(batch["sample"]).float()
    n_views = module.projector.geometry.n_views
    assert left_out.sum((1, 2, 3)).tolist() == [n_views / module.n_parts] * len(left_out)
    seen: list[Tensor] = []
    module.network.register_forward_hook(lambda _, inputs, image: seen.append(image))
    first = module.training_step(batch, 0)
    batch["sinogram"] = batch["sinogram"] + left_out * 5
    second = module.training_step(batch, 0)
    assert torch.equal(*seen)
    assert not torch.equal(first, second)
    # Of the plain formula: FBP of the kept views with unit gain, and the mean over the others.
    apart = module.projector(seen[0]) - batch["sinogram"]
    plain = torch.stack([a[:, of[0, :, 0] > 0].square().mean() for a, of in zip(apart, left_out, strict=True)])
    width = module.projector.geometry.field_of_view
    torch.testing.assert_close(second, (batch["weight"] * plain / width**2).mean())


def test_each_image_has_its_part_and_another_in_other_epochs(other_config: Other) -> None:
    module = built(other_config)
    samples = torch.arange(400)
    parts = module.left_out(samples)[:, 0, :4, 0].int().argmax(1)  # the first four views are of four parts
    assert all(60 < int((parts == part).sum()) < 140 for part in range(4))
    epochs = parts.view(-1, 8)  # of 8 slices
    assert all(len(set(epochs[:, slice_].tolist())) == 4 for slice_ in range(8))
    assert torch.equal(module.left_out(samples[7:8]), module.left_out(samples)[7:8])


def test_all_else_sees_all_views(other_config: Other, tmp_path: Path) -> None:
    """Trained by Lightning; and a plain module reads its weights."""
    module = built(other_config)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, datamodule=SliceDataModule(module.config.data))
    assert trainer.global_step == 2
    plain = build_module(other_config(*LEARN[1:]))
    plain.network.load_state_dict(module.network.state_dict())
    y = plain.projector(torch.rand(1, 1, 16, 16))
    assert torch.equal(module.network(y), plain.network(y))


def test_more_parts_than_views_are_refused(other_config: Other) -> None:
    with pytest.raises(ConfigError, match=r"module.n_parts=500 is more than geometry.n_views=\d+: give fewer"):
        built(other_config, "module.n_parts=500")


def test_a_pipeline_refuses_it_in_one_line(other_config: Other) -> None:
    config: Any = other_config(*LEARN, "strategy=pipeline", "trainer.devices=2")
    with pytest.raises(ConfigError, match="training_step gives the network another sinogram"):
        Planner(config).estimate(config)
