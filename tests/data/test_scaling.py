import numpy as np
import pytest
import torch
from torch.nn import functional

from qnmixer.engine.data.dataset import Part, SliceDataset
from qnmixer.engine.data.phantoms import PhantomSource
from qnmixer.engine.data.resample import to_square
from qnmixer.engine.data.scaling import MinMaxScaling, build_scaling


@pytest.mark.parametrize("name", ["attenuation", "minmax"])
def test_the_way_back_gives_hu(name: str) -> None:
    hu = np.random.default_rng(0).uniform(-1000, 2000, (9, 9)).astype(np.float32)
    x, offset, scale = build_scaling(name, 2000.0).to_unit(hu)
    assert x.dtype == np.float32
    assert x.min() >= 0
    assert x.max() <= 1
    np.testing.assert_allclose(offset + scale * x, hu, atol=1e-3)


def test_air_is_zero_and_metal_is_clipped() -> None:
    x, _, _ = build_scaling("attenuation", 1000.0).to_unit(np.array([[-1024.0, 0.0, 1000.0, 9000.0]], np.float32))
    np.testing.assert_allclose(x, [[0, 0.5, 1, 1]])


def test_constant_slice_does_not_divide_by_zero() -> None:
    assert (MinMaxScaling().to_unit(np.full((3, 3), 7.0, np.float32))[0] == 0).all()


def test_resampling_is_that_of_the_field() -> None:
    hu = np.random.default_rng(0).normal(0, 100, (64, 64)).astype(np.float32)
    expected = functional.interpolate(torch.from_numpy(hu)[None, None], (32, 32), mode="bilinear", antialias=True)
    np.testing.assert_allclose(to_square(hu, 32), expected[0, 0], atol=1e-4)


def test_augmentation_is_by_number_and_keeps_the_pixels() -> None:
    source = PhantomSource("train", 16, n_train=4, n_val=1, n_test=1, anatomy_share=1.0, seed=1)
    plain = SliceDataset(Part(source), MinMaxScaling())
    turned = SliceDataset(Part(source), MinMaxScaling(), augment=True, seed=1)
    changed = 0
    for n in range(12):
        assert torch.equal(turned[n]["image"], turned[n]["image"])
        assert torch.equal(turned[n]["image"].flatten().sort()[0], plain[n]["image"].flatten().sort()[0])
        changed += not torch.equal(turned[n]["image"], plain[n]["image"])
    assert 6 <= changed <= 12
