from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from qnmixer.data.batch import Batch
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.measurement.build import build_measurement, measure_of
from qnmixer.module import ReconstructionModule
from qnmixer.physics import NoNoise
from qnmixer.settings.run import section

from ..conftest import tiny_config, tiny_module


def batches(module: ReconstructionModule, part: str = "test", epoch: int = 0) -> list[Batch]:
    loader: DataLoader[Any] = SliceDataModule(module.config.data).loader(part)
    loader.sampler.set_epoch(epoch)  # type: ignore[union-attr]  # an EpochSampler
    return list(loader)


def test_training_validation_and_test_draw_different_noise() -> None:
    module = tiny_module("noise=field")
    batch = batches(module)[0]
    drawn = [module.measure(batch, stream) for stream in ("train", "val", "test")]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (drawn[a] - drawn[b]).abs().max() > 1e-3
    assert torch.equal(module.measure(batch, "val"), drawn[1])
    other = tiny_module("noise=field", "seed=43")
    assert not torch.equal(other.measure(batch, "val"), drawn[1])


@pytest.mark.parametrize("overrides", [
    ["noise=field", "data.num_workers=1"],
    ["noise=physical", "data.simulation_factor=2", "data.views=[6,8]", "data.arcs=[180,360]"],
])  # fmt: skip
def test_workers_measure_as_the_module_does(overrides: list[str]) -> None:
    """To the last bit, whatever the number of threads."""
    module = tiny_module(*overrides)
    of_loader = SliceDataModule(module.config.data, measure=measure_of(module.config))
    torch.set_num_threads(2)
    for part in ("train", "val", "test"):
        for measured, plain in zip(of_loader.loader(part), batches(module, part), strict=True):
            assert "fine" not in measured
            assert torch.equal(measured["sinogram"], module.measure(plain, part))


@pytest.mark.parametrize("n_views", [12, 13])
@pytest.mark.parametrize("known", [True, False])
def test_the_residual_is_that_of_views_that_were_held_out(n_views: int, known: bool) -> None:
    """The truth leaves the noise alone, which is 1, whether its variance is known or estimated from the sinogram.

    The image is of the other views only.
    """
    config = tiny_config("data=phantoms", f"geometry.n_views={n_views}", "geometry.n_detectors=128", "noise=field")
    measurement = build_measurement(config.changed(noise=section("noise", "field", sigma=9.0)))
    size = config.data.image_size
    axis = torch.linspace(-1.5, 1.5, size)
    image = torch.exp(-(axis**2 + axis[:, None] ** 2) * 2)[None, None].repeat(3, 1, 1, 1)
    y = measurement.noise(measurement.projector(image), [(0, 0, k) for k in range(3)])
    whole, inputs = measurement.projector.geometry, list[Tensor]()
    if not known:
        measurement.noise = NoNoise()

    def truth(half: Tensor) -> Tensor:
        inputs.append(half)
        assert measurement.projector.geometry.n_views == n_views // 2
        assert measurement.projector.safe_step_size() == pytest.approx(step)
        assert measurement.projector(image).sub(half).std() < 11  # its views are those of the input
        return image

    step, before = measurement.projector.safe_step_size(), measurement.projector(image)
    residual = measurement.residual(truth, y)
    assert residual.shape == (3,)
    assert residual.sub(1).abs().max() < 0.1
    assert torch.equal(inputs[0], y[:, :, : 2 * (n_views // 2) : 2])
    assert measurement.projector.geometry == whole
    assert torch.equal(measurement.projector(image), before)
    assert measurement.residual(measurement.projector.fbp, y).min() > 1.1
