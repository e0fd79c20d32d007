import math

import pytest

from qnmixer.physics import FanBeamGeometry, FanBeamProjector


@pytest.fixture(scope="session")
def projector() -> FanBeamProjector:
    """A scan small enough to differentiate numerically: 16 × 16 pixels, 12 views, 24 bins."""
    return FanBeamProjector(FanBeamGeometry(16, 25.0, 12, 24, 40.0, 600.0, 290.0, math.pi / 12))
