from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from qnmixer.data.batch import Batch
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.measurement.build import measure_of
from qnmixer.module import ReconstructionModule

from ..conftest import tiny_module


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


@pytest.mark.parametrize(
    "overrides",
    [
        ["noise=field", "data.num_workers=2"],
        ["noise=physical", "data.simulation_factor=2", "data.views=[6,8]", "data.arcs=[180,360]"],
    ],
)
def test_workers_measure_as_the_module_does(overrides: list[str]) -> None:
    """To the last bit, whatever the number of threads."""
    module = tiny_module(*overrides)
    of_loader = SliceDataModule(module.config.data, measure=measure_of(module.config))
    torch.set_num_threads(2)
    for part in ("train", "val", "test"):
        for measured, plain in zip(of_loader.loader(part), batches(module, part), strict=True):
            assert "fine" not in measured
            assert torch.equal(module.measure(measured, part), module.measure(plain, part))


def test_a_script_measures_by_a_function() -> None:
    """`measure` of SliceDataModule. It gets the finer image, which the loader does not pass on."""
    module = tiny_module("data.simulation_factor=2")
    data = SliceDataModule(module.config.data, measure=lambda part, sample: sample["fine"] + (part == "val"))
    for part in ("train", "val"):
        measured, plain = next(iter(data.loader(part))), batches(module, part)[0]
        assert "fine" not in measured
        assert torch.equal(measured["sinogram"], plain["fine"] + (part == "val"))
