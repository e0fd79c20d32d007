import numpy as np
import pytest

from qnmixer.engine.data.phantoms import phantom, smooth_field


def test_same_numbers_give_the_same_phantom_everywhere() -> None:
    """In any order, in any process, on any machine: but for the last bits."""
    for index, mean, deviation, pixel in ((5, -600.2527, 471.3743, 103.40605), (0, -587.13275, 403.2221, -824.49)):
        hu = phantom(48, seed=3, part="train", index=index)
        assert [hu.mean(), hu.std(), hu[20, 30]] == pytest.approx([mean, deviation, pixel], abs=0.01)


def test_seed_part_and_index_each_change_the_phantom() -> None:
    base = phantom(32, seed=1, part="train", index=0)
    for seed, part, index in ((2, "train", 0), (1, "val", 0), (1, "train", 1), (1, "train", 10**12)):
        assert not np.array_equal(base, phantom(32, seed=seed, part=part, index=index))


@pytest.mark.parametrize("size", [8, 33, 64, 100])
def test_any_size_gives_finite_hu_with_something_in_it(size: int) -> None:
    for index in range(6):
        hu = phantom(size, seed=1, part="test", index=index)
        assert hu.shape == (size, size)
        assert hu.dtype == np.float32
        assert np.isfinite(hu).all()
        assert hu.min() >= -1000
        assert hu.max() <= 3000
        assert (hu > -500).mean() > 0.05


def test_anatomy_has_the_tissues_of_a_body() -> None:
    hu = np.stack([phantom(96, seed=1, part="train", index=i, anatomy_share=1.0) for i in range(40)])
    share = {
        "air": (hu < -950).mean(),
        "lung": ((hu > -950) & (hu < -600)).mean(),
        "fat": ((hu > -150) & (hu < -60)).mean(),
        "soft": ((hu > 0) & (hu < 100)).mean(),
        "contrast or bone": (hu > 150).mean(),
    }
    assert 0.35 < share["air"] < 0.7
    assert share["lung"] > 0.02
    assert share["fat"] > 0.04
    assert share["soft"] > 0.08
    assert 0.01 < share["contrast or bone"] < 0.15


def test_edges_are_antialiased() -> None:
    """Blur and 2 × 2 averaging leave values between tissue and air at the outline."""
    hu = np.stack([phantom(64, seed=1, part="train", index=i, anatomy_share=0.0) for i in range(20)])
    jumps = np.abs(np.diff(hu, axis=-1))
    assert ((jumps > 150) & (jumps < 850)).sum() > 2 * (jumps > 950).sum()


@pytest.mark.parametrize(("cells", "size"), [(4, 64), (9, 100), (40, 128), (50, 16)])
def test_smooth_field_has_unit_deviation(cells: int, size: int) -> None:
    rng = np.random.default_rng(0)
    fields = np.stack([smooth_field(rng, cells, size) for _ in range(60)])
    assert fields.shape[1:] == (size, size)
    assert abs(fields.mean()) < 0.1
    assert 0.8 < fields.std() < (1.2 if cells < size else 2.5)
