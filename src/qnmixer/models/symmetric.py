"""Random turns of the image around a learned regulariser, in training: "equivariant" plug and play."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from qnmixer.physics.turns import random_turn

Regularization = Callable[..., Tensor]
"""(network, t, *images) → G_t, images [B, C, H, W]."""


def turned_at_random(regularization: Regularization) -> Regularization:
    """A method of a network that gives g⁻¹ G_t(g x) in training, with g one of the eight turns and flips of a square.

    If `network.symmetric`, g is another one in each iteration and optimizer step, after Terris, Moreau, Pustelnik and
    Tachella, "Equivariant plug-and-play image reconstruction", CVPR 2024, who draw it in reconstruction. Here g is the
    identity then: the network has learned to do without. All images of a batch have one g, which follows from
    `network.step_key` and t. So it does not depend on the number of devices, and is drawn again where an iteration is
    computed again.
    """

    @wraps(regularization)
    def turned(network: Any, t: int, *images: Tensor) -> Tensor:
        if not (network.symmetric and network.training):
            return regularization(network, t, *images)
        g = random_turn(*network.step_key, t)
        return g.turn_back(regularization(network, t, *map(g.turn, images)))

    return turned
