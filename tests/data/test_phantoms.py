import numpy as np
import pytest

from qnmixer.data.phantoms.phantoms import phantom


def test_same_numbers_give_the_same_phantom_everywhere() -> None:
    """In any order, in any process, on any machine: but for the last bits. Seed, part and index each count."""
    for seed, part, index, *expected in (
        (3, "train", 5, -600.2527, 471.3743, 103.40605), (3, "train", 0, -587.13275, 403.2221, -824.49),
        (4, "val", 10**12, -314.83142, 407.87067, 166.24037),
    ):  # fmt: skip
        hu = phantom(48, seed=seed, part=part, index=index)
        assert [hu.mean(), hu.std(), hu[20, 30]] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("size", [8, 33, 64])
def test_any_size_gives_finite_hu_with_something_in_it(size: int) -> None:
    hu = np.stack([phantom(size, seed=1, part="test", index=index) for index in range(6)])
    assert (hu.shape, hu.dtype) == ((6, size, size), np.float32)
    assert np.isfinite(hu).all()
    assert -1000 <= hu.min() <= hu.max() <= 3000
    assert ((hu > -500).mean(axis=(1, 2)) > 0.05).all()


def test_anatomy_has_the_tissues_of_a_body() -> None:
    hu = np.stack([phantom(64, seed=1, part="train", index=i, anatomy_share=1.0) for i in range(40)])
    of_bone = (150, 3000, 0.01, 0.15)
    for low, high, least, most in (
        (-1000, -950, 0.35, 0.7), (-950, -600, 0.02, 1), (-150, -60, 0.04, 1), (0, 100, 0.08, 1), of_bone,
    ):  # fmt: skip
        assert least < ((hu >= low) & (hu < high)).mean() < most
