"""module=split and module=equivariant: what a step learns from is no truth, and validation has all views."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.errors import ConfigError, GeometryError
from qnmixer.memory.plan import Planner
from qnmixer.module import Split
from qnmixer.module.build import build_module
from qnmixer.physics import KeyedNoise

from ..conftest import tiny_config, tiny_module

SPLIT, BOTH = ["module=split"], ["module=equivariant", "module.parts=2"]


@dataclass(frozen=True)
class White(KeyedNoise):
    """Of another variance in each bin."""

    def sample(self, p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return p + self.deviation(p.shape[-1]) * rng.standard_normal(p.shape)

    def variance(self, y: Tensor) -> Tensor:
        return torch.from_numpy(self.deviation(y.shape[-1])).to(y).square().expand_as(y)

    def deviation(self, n: int) -> np.ndarray:
        return 5 + np.arange(n) / 2


def batch_of(module: Any) -> Any:
    return next(iter(SliceDataModule(module.config.data).loader("train")))


def gradient(module: Any, batch: Any) -> Tensor:
    module.zero_grad()
    module.training_step(batch, 0).backward()
    gradients = [p.grad.flatten() for p in module.network.parameters() if p.grad is not None]
    module.on_train_batch_end(None, batch, 0)
    return torch.cat(gradients)


def test_the_expected_gradient_is_that_of_the_truth_on_rays_not_seen() -> None:
    """It is linear in their noise. So two opposite draws of it have the mean of all draws."""
    n = 4
    module = tiny_module(*SPLIT, f"module.parts={n}", "model.nonnegative=false").double()
    module.measurement.noise = White()
    batch = batch_of(module)
    batch["weight"] = torch.tensor([1.0, 3.0])
    p = module.measurement.project(batch["image"].double())
    noise = White()(p, [(1,), (2,)]) - p
    module.prediction(p)
    first, whole = module.network.projector.geometry.first_angle, module.whole.geometry
    k = round((first - whole.first_angle) / whole.angle_step)
    is_seen = torch.zeros(8, 1, dtype=torch.bool)
    is_seen[k::n] = True
    draws = [gradient(module, batch | {"sinogram": p + torch.where(is_seen, 1, sign) * noise}) for sign in (-1, 1)]

    module.network.projector.become(module.parts[k])
    errors = (module.whole(module.network((p + noise)[:, :, k::n])) - p).square() / White().variance(p)
    module.zero_grad()
    (batch["weight"] * errors[:, :, ~is_seen[:, 0]].mean((1, 2, 3))).mean().backward()
    truth = torch.cat([weight.grad.flatten() for weight in module.network.parameters() if weight.grad is not None])
    torch.testing.assert_close(sum(draws) / 2, truth, rtol=1e-9, atol=1e-9)
    assert (draws[0] - draws[1]).norm() > 1e-3 * truth.norm()


@pytest.mark.parametrize(("words", "memory"), [(SPLIT, "keep"), (BOTH, "recompute")])
def test_a_step_reads_no_truth_and_leaves_all_views(words: list[str], memory: str) -> None:
    """Whatever the memory mode, which needs A of the part in the backward pass."""
    module, plain = tiny_module(*words, f"memory={memory}"), tiny_module()
    batch = batch_of(plain)
    y = module.measure(batch, "train")
    of_y = gradient(module, batch | {"sinogram": y, "image": torch.full_like(batch["image"], torch.nan)})
    assert torch.equal(of_y, gradient(tiny_module(*words), batch | {"sinogram": y}))
    module.training_step(batch, 0)  # a step that is left in its middle
    assert torch.equal(module.network(module.measure(batch, "val")), plain.network(plain.measure(batch, "val")))


def test_parts_are_drawn_by_seed_and_step() -> None:
    """And the network's projector is that of the part's views, with the step sizes as near to their bound."""
    module = tiny_module(*SPLIT, "module.parts=4")
    y, starts = module.measure(batch_of(module), "train"), []
    for seed in (0, 1):
        for step in [*range(6), *range(6)]:
            module.network.step_key = (seed, step)
            image, losses = module.prediction(y)
            projector = module.network.projector
            starts.append(projector.geometry.first_angle)
            assert projector.geometry.n_views == 2
            assert projector.safe_step_size() == module.whole.safe_step_size()
    assert losses.shape == (len(image),)
    assert starts[:6] == starts[6:12] != starts[12:18] == starts[18:]
    assert len(set(starts)) == 4
    rays = module.whole(image)
    for k, part in enumerate(module.parts):
        torch.testing.assert_close(part(image), rays[:, :, k::4])


def test_a_moved_image_is_turned_and_shifted() -> None:
    """By angles that are none of the scan; its mass and that of a second draw stay, and one key gives one motion."""
    module = tiny_module("module=equivariant", "module.shift=0.1")
    disc = torch.zeros(2, 1, 64, 64, dtype=torch.float64)
    disc[:, :, 28:36, 24:40] = interpolate(torch.ones(2, 1, 2, 2, dtype=torch.float64), (8, 16))
    centres, axis = [], torch.arange(64) - 31.5
    for step in (0, 0, 1, 2):
        module.network.step_key = (0, step)
        moved = module.moved(disc)
        assert moved.dtype == torch.float64
        assert float(moved.sum()) == pytest.approx(float(disc.sum()), rel=0.02)
        rows, columns = moved[0, 0].sum(1), moved[0, 0].sum(0)
        centres.append((float(rows @ axis.double() / rows.sum()), float(columns @ axis.double() / columns.sum())))
    assert centres[0] == centres[1]
    assert len(set(centres)) == 3
    assert all(abs(place) < 6.5 for centre in centres for place in centre)  # a tenth of 64 pixels


def test_the_plan_counts_the_matrices_of_the_parts() -> None:
    """And of the half of the views that the residual takes: real ones after a validation, and again at a part."""
    config = tiny_config(*BOTH, "noise=physical", "monitor=val/residual")
    module = build_module(config)
    module.validation_step(batch_of(module), 0)
    real = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in module.buffers()}
    planner = Planner(config, module.projector)
    footprints = [planner.estimate(config.changed(seed=seed)) for seed in (1, 2)]
    assert footprints[0] == footprints[1]
    assert footprints[0].operator == pytest.approx(sum(real.values()), rel=1e-3)
    module.projector.become(module.parts[0])  # as where a step ends for lack of memory
    assert Planner(config, module.projector).projector.geometry.n_views == 8


@pytest.mark.parametrize("words", [SPLIT, ["module=equivariant"], ["module=passes"], ["module=all_iterates"]])
def test_a_pipeline_refuses_them(words: list[str]) -> None:
    config = tiny_config(*words, "strategy=pipeline", "trainer.devices=2", "data.batch_size=1")
    with pytest.raises(
        ConfigError, match=r"^strategy=pipeline has the iterations on several .* choose strategy=single, ddp or fsdp$"
    ):
        build_module(config)


def test_parts_that_do_not_divide_the_views_leave_out_the_last() -> None:
    """As a scan of 61 views needs: the image of the part and the loss are those of the other views."""
    module = tiny_module(*SPLIT, "module.parts=3")
    assert isinstance(module, Split)
    y = module.measure(batch_of(module), "train")
    image, losses = module.prediction(y)
    again, same = module.prediction(torch.cat([y[:, :, :6], 1 + y[:, :, 6:]], 2))
    assert module.network.projector.geometry.n_views == 2
    torch.testing.assert_close((image, losses), (again, same), rtol=0, atol=0)
    assert not torch.equal(losses, module.prediction(torch.cat([1 + y[:, :, :6], y[:, :, 6:]], 2))[1])


def test_parts_that_do_not_fit_are_told() -> None:
    with pytest.raises(GeometryError, match=r"^n_views=8: a scan of so few views has none to hold out$"):
        tiny_module(*SPLIT, "module.parts=9")
    config = tiny_config(*SPLIT, "data.views=[6,8]")
    for start in (build_module, Planner(config).estimate):
        with pytest.raises(ConfigError, match=r"^data.views, data.arcs: Split trains with the views of one scan: leav"):
            start(config)
