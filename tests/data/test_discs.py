from pathlib import Path

import numpy as np
import pytest

from qnmixer.data.phantoms.discs import DiscSource
from qnmixer.fit import fit
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.units import FloatArray
from qnmixer.runs.run import Run

from ..conftest import other_config

GEOMETRY = FanBeamGeometry(64, 76 / 64, 8, 140, 0.8, 410.66, 143.08)


def discs(part: str = "val", seed: int = 1, **change: float | bool) -> DiscSource:
    arguments = {"radius": 30.0, "shift": 5.0, "hu": 900.0, "spread": 0.0} | change
    return DiscSource(part, 64, GEOMETRY, n_train=4, n_val=4, n_test=4, seed=seed, **arguments)  # type: ignore[arg-type]


def test_a_disc_is_one_of_its_seed_part_and_number() -> None:
    disc = discs().load(3)
    assert np.array_equal(disc, discs().load(3))
    for other in (discs().load(4), discs(seed=2).load(3), discs("train").load(3)):
        assert not np.array_equal(disc, other)
    fine = discs(fine=True).load(3)
    np.testing.assert_allclose(disc, fine.reshape(64, 2, 64, 2).mean((1, 3)), atol=1e-3)


def test_discs_are_of_acrylic_with_holes_and_off_the_axis() -> None:
    images = [discs().load(index) for index in range(40)]
    centres, radii = zip(*map(circle, images), strict=True)
    assert 3 < np.hypot(*np.array(centres).T).max() < 5.3
    assert np.array(radii) == pytest.approx(30, rel=0.025)
    acrylic = np.array([(image + 1000).sum() / 1900 * GEOMETRY.pixel_size**2 for image in images])
    share = acrylic / (np.pi * 30**2)
    assert share.min() < 0.5 < 0.97 < share.max() < 1.021  # few and many holes; a radius is 1 % larger at most
    assert (np.min(images), np.max(images)) == pytest.approx((-1000, 900))
    brightest = [discs(spread=0.1).load(index).max() + 1000 for index in range(20)]
    assert 1710 < min(brightest) < 1800 < 2000 < max(brightest) < 2090


def circle(image: FloatArray) -> tuple[tuple[float, float], float]:
    """Centre and radius in mm of the outline, from the first and last row and column with acrylic."""
    spans = [np.flatnonzero((image > -50).any(axis)) for axis in (0, 1)]
    ends = [((span[0] - 32) * GEOMETRY.pixel_size, (span[-1] - 31) * GEOMETRY.pixel_size) for span in spans]
    x, y = (sum(end) / 2 for end in ends)
    return (x, y), sum(end[1] - end[0] for end in ends) / 4


def test_the_network_of_the_discs_trains(tmp_path: Path) -> None:
    words = ["experiment=htc", "data.arcs=[30,91.5]", "geometry.detector_pitch=5", "model.depth=2"]
    fit(other_config(*words, "trainer.max_steps=2", "test_after_training=false"), Run(tmp_path))
    assert (tmp_path / "checkpoints" / "best.ckpt").exists()
