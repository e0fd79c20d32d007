import math

import pytest

from qnmixer.physics import FanBeamGeometry, FanBeamProjector

FIGURE = {
    "detail_channels": 0, "codec_kernel": 1, "shared_step_size": True, "data_steps": 1, "nonnegative": False,
    "learned_trust": False,
}  # fmt: skip
"""QNMixer as the paper's figure draws it, where the defaults are another."""


@pytest.fixture(scope="session")
def projector() -> FanBeamProjector:
    """A scan small enough to differentiate numerically: 16 × 16 pixels, 12 views, 24 bins."""
    return FanBeamProjector(FanBeamGeometry(16, 25.0, 12, 24, 40.0, 600.0, 290.0, math.pi / 12))
