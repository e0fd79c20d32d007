"""Measured sinograms that are not those of their images: one product A x says it."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

import qnmixer
from qnmixer.data.own_batches import OwnBatches
from qnmixer.errors import DataError
from qnmixer.fit import fit
from qnmixer.measurement.build import build_projector
from qnmixer.measurement.pairs import check_pairs
from qnmixer.physics import PhysicalNoise
from qnmixer.runs.run import Run

from ..conftest import TINY, config_of, tiny_config

DEMO = config_of("experiment=demo", "data.image_size=32", f"datamodule._target_={__name__}.Mirrored")
A = build_projector(DEMO)
HU = torch.stack([torch.from_numpy(qnmixer.phantom(32, seed=0, part="train", index=k)).float()[None] for k in range(3)])
IMAGES = (HU.clamp(-1000, 2000) + 1000) / 3000


def few_photons(y: Tensor) -> Tensor:
    noise = PhysicalNoise(photons=1000, water_attenuation=0.0192, electronic_sigma=10.0, hu_max=DEMO.data.hu_max)
    return noise(y, [(0, 0, k) for k in range(len(y))])


def check(sinograms: Tensor, **keys: Any) -> None:
    batches = OwnBatches("mine.Pairs", "train", DEMO.data, A.geometry)
    batch: Any = batches.completed({"image": IMAGES, "sinogram": sinograms} | keys)
    check_pairs(DEMO, A, batch, "train")


def test_a_detector_that_is_off_is_told_of_the_first_sinogram_without_an_image() -> None:
    batch: Any = {"sinogram": A(IMAGES).roll(1, -1), "weight": torch.ones(3), "name": ["a", "b", "c"]}
    says = r"^a: its detector seems to be off: geometry\.detector_offset=-(0\.9\d|1\.0\d) "
    with pytest.warns(UserWarning, match=says) as lines:
        check_pairs(DEMO, A, batch, "train")
    assert sum("detector" in str(line.message) for line in lines) == 1


@pytest.mark.parametrize("change", [lambda y: y, few_photons, lambda y: y * (torch.arange(y.shape[-2]) % 2)[:, None]])
def test_right_pairs_give_no_word(change: Callable[[Tensor], Tensor]) -> None:
    with warnings.catch_warnings(action="error"):
        check(change(A(IMAGES)))


@pytest.mark.parametrize(("change", "line"), [
    (lambda y: y.flip(-1), r"With its bins mirrored it differs by 0%\. Are sinograms"),
    (lambda y: few_photons(y).flip(-1), r"With its bins mirrored it differs by \d%\. Are sinograms"),
    (lambda y: y.flip(-2), r"With its views in reverse it differs by 0%\. Are sinograms"),
    (lambda y: y * 0.0576, r"by 1636% \(.*Times 17\.4 it differs by 0%\. Are sinograms"),
    (lambda y: y.roll(2, -2), r"\)\. Are sinograms line integrals in value × mm, with the bins and angles of"),
    (lambda y: y.roll(1, 0), r"differs from A x of its image by \d+% \(train, slice \d of its first batch, \w+\)"),
    (lambda y: 1e5 * torch.exp(-0.0576 * y), r"differs from A x of its image by 100% \("),
], ids=["mirrored", "mirrored in noise", "reversed", "attenuation", "turned", "of the next", "counts"])  # fmt: skip
def test_other_pairs_are_named(change: Callable[[Tensor], Tensor], line: str) -> None:
    with pytest.warns(UserWarning, match=line):
        check(change(A(IMAGES)))


def test_the_slice_is_named_and_fillers_are_not_looked_at() -> None:
    y = A(IMAGES)
    y[2] = y[0]
    with pytest.warns(UserWarning, match=r"\(train, slice 2 of its first batch, c\)"):
        check(y, name=["a", "b", "c"])
    with warnings.catch_warnings(action="error"):
        check(y, weight=torch.tensor([1, 1, 0]))
        check(y, weight=torch.zeros(3))


def test_sinograms_of_zeros_are_refused() -> None:
    with pytest.raises(DataError, match=r"Mirrored: all sinograms of the first batch of train are 0, but not their"):
        check(torch.zeros_like(A(IMAGES)))


class Mirrored(LightningDataModule):
    def pairs(self) -> DataLoader[Any]:
        images = torch.nn.functional.avg_pool2d(IMAGES, 2)
        sinograms = build_projector(config_of(*TINY))(images).flip(-1)
        return DataLoader([*zip(images, sinograms, strict=True)], 3)

    train_dataloader = val_dataloader = test_dataloader = pairs


def test_a_run_says_it_once_for_each_part(tmp_path: Path) -> None:
    words = [f"datamodule._target_={__name__}.Mirrored", "trainer.max_steps=2", "trainer.val_every_n_steps=1"]
    with warnings.catch_warnings(record=True, action="always") as warned:
        fit(tiny_config(*words, "test_after_training=true"), Run(tmp_path))
    said = [str(warning.message) for warning in warned if "differs from A x" in str(warning.message)]
    assert [line.partition(" (")[2].partition(",")[0] for line in said] == ["train", "val", "test"]
