"""The turns and flips of a square image."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

ORDER = [(quarters, flipped) for flipped in (False, True) for quarters in (0, 2, 1, 3)]
"""The turns of a square. The first two, four and eight are groups, if the scan has them."""


@dataclass(frozen=True)
class Turn:
    """One of the eight symmetries g of a square.

    Attributes:
        quarters: quarter turns anticlockwise, after the flip.
        flipped: whether the image is flipped left to right first.
    """

    quarters: int
    flipped: bool

    def turn(self, x: Tensor) -> Tensor:
        """g x of images [B, C, H, W]."""
        return torch.rot90(x.flip(3) if self.flipped else x, self.quarters, (2, 3))

    def turn_back(self, x: Tensor) -> Tensor:
        """g⁻¹ x of images [B, C, H, W]."""
        x = torch.rot90(x, -self.quarters, (2, 3))
        return x.flip(3) if self.flipped else x


def random_turn(*key: int) -> Turn:
    """One of the eight turns of a square, drawn by a key alone: the same on every device, and if it is drawn again."""
    return Turn(*ORDER[random.Random(str(key)).randrange(len(ORDER))])
