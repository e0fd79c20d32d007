"""`symmetric=True`: the regulariser sees the image under a random turn, in training only."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from qnmixer.physics import FanBeamProjector
from qnmixer.physics.turns import random_turn

from .test_qn_mixer import small

DETAILS = {"detail_channels": 4, "detail_data_step": True}


def turned_by_hand(x: Tensor, quarters: int, flipped: bool) -> Tensor:
    return torch.rot90(x.flip(3) if flipped else x, quarters, (2, 3))


@pytest.mark.parametrize("details", [{}, DETAILS], ids=["plain", "details"])
def test_in_training_the_regulariser_sees_a_turned_image(projector: FanBeamProjector, details: dict) -> None:
    network, plain = (small(projector, symmetric=it, **details) for it in (True, False))
    x, descent = torch.rand(2, 2, 1, 16, 16)
    network.step_key = (42, 7)
    for t in range(network.n_iterations):
        turn = random_turn(42, 7, t)
        images = [turned_by_hand(image, turn.quarters, turn.flipped) for image in (x, descent)]
        found = turned_by_hand(network.regularization(t, x, descent), turn.quarters, turn.flipped)
        torch.testing.assert_close(found, plain.regularization(t, *images), rtol=0, atol=1e-6)
    y = projector(torch.rand(1, 1, 16, 16))
    assert not torch.allclose(network(y), plain(y))
    assert torch.equal(network.eval()(y), plain.eval()(y))


def test_turns_are_new_in_each_iteration_and_step_and_all_come(projector: FanBeamProjector) -> None:
    """By the key alone, whatever was drawn before."""
    turns = [random_turn(1, step, t) for step in range(200) for t in range(4)]
    counts = Counter(turns)
    assert len(counts) == 8
    assert min(counts.values()) > 60
    assert turns == [random_turn(1, step, t) for step in range(200) for t in range(4)]
    assert turns[:100] != [random_turn(2, step, t) for step in range(25) for t in range(4)]
    network = small(projector, symmetric=True)
    y = projector(torch.rand(1, 1, 16, 16))
    images = []
    for step in (3, 4, 3):
        network.step_key = (1, step)
        images.append(network(y))
    assert torch.equal(images[0], images[2])
    assert not torch.allclose(images[0], images[1])
