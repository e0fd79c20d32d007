"""The command of the table of experiment=data_term: its eigenvalues, beside those of the dense matrix."""

import pytest
import torch

from qnmixer.extras.comparison.data_term import eigenvalues
from qnmixer.models.data_term import back_projection
from qnmixer.physics import FanBeamGeometry, FanBeamProjector


@pytest.mark.parametrize("kind", ["fbp", "adjoint"])
def test_the_eigenvalues_are_those_of_the_dense_matrix(kind: str) -> None:
    projector = FanBeamProjector(FanBeamGeometry(16, 4.0, 6, 24, 5.0, 200.0, 100.0))
    images = torch.eye(256).view(256, 1, 16, 16)
    dense = back_projection(projector, kind, projector(images)).view(256, 256).double()
    expected = torch.linalg.eigvals(dense).real.sort(descending=True).values[:144].numpy()  # as many as rays
    assert eigenvalues(projector)[kind] == pytest.approx(expected, abs=1e-4 * expected[0])
