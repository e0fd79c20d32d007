"""The symmetries of a scan: turns and flips of the image that only put its sinogram into another order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qnmixer.physics.geometry import FULL_TURN, FanBeamGeometry
from qnmixer.physics.projector import FanBeamProjector
from qnmixer.physics.turns import ORDER, Turn

_ANGLE_TOLERANCE = 1e-6  # radians, by which a view may miss another one
_TOLERANCE = 1e-5  # of ‖A x‖


@dataclass(frozen=True, eq=False)
class Symmetry(Turn):
    """A turn g with A g x = h A x, where h only changes the order of the rays.

    Attributes:
        views: the view of A x that each view of A g x equals, int64 [V].
        mirrored: whether its bins are in opposite order, bool [V].
    """

    views: Tensor
    mirrored: Tensor

    def reorder(self, y: Tensor) -> Tensor:
        """h y of sinograms [B, 1, V, D]."""
        rows = y[:, :, self.views.to(y.device)]
        return torch.where(self.mirrored.to(y.device)[:, None], rows.flip(3), rows)


def symmetries(projector: FanBeamProjector, most: int = 8) -> list[Symmetry]:
    """The symmetries of a scan, the identity first: at most so many of the eight of a square.

    A full turn has the quarter turns if its views are a multiple of four. It has the flips if its bins are symmetric
    and its angles too, as they are if the first is 0 or half a step. A parallel beam has them with a detector offset
    too, if each view has an opposite one. An arc has none, unless it lies symmetric.
    They follow from the angles and bins, and each is checked: A g x must equal h A x within 1e-5 of its norm.
    """
    found = [symmetry for g in ORDER if (symmetry := _symmetry(projector.geometry, *g)) is not None]
    size = projector.geometry.image_size
    x = torch.rand(1, 1, size, size, generator=torch.Generator().manual_seed(0)).to(next(projector.buffers()))
    y = projector(x)
    limit = _TOLERANCE * y.norm()
    return [g for g in found if (projector(g.turn(x)) - g.reorder(y)).norm() <= limit][:most]


def images_by_symmetry(method: Callable[[Tensor], Tensor], y: Tensor, symmetries: Sequence[Symmetry]) -> Tensor:
    """The images of a method from the sinogram y [B, 1, V, D] under each symmetry, turned back: [K, B, 1, H, W].

    Their mean has a smaller error than a single one, where the method does not follow the symmetries itself as FBP
    does (test-time augmentation). It takes the time of K images. Their deviation shows how far the method depends on
    the orientation. That is a part of its error only.
    """
    return torch.stack([g.turn_back(method(g.reorder(y))) for g in symmetries])


def _symmetry(geometry: FanBeamGeometry, quarters: int, flipped: bool) -> Symmetry | None:
    """The symmetry of a turn and a flip, from the angles and bins; None if they do not fit.

    The image turned by θ has in view β what the image has in view β − θ. The flipped one has in view β, bin u, what the
    image has in view −β, bin −u.
    """
    angles, turned_by = geometry.angles(), quarters * FULL_TURN / 4
    needed = turned_by - angles if flipped else angles - turned_by
    views, exists = _views_at(needed, geometry)
    mirrored, centred = np.full(len(views), flipped), geometry.detector_offset == 0
    exists &= centred or not flipped  # with an offset, mirrored bins see other lines
    if not geometry.is_fan:  # the same lines from the other side
        opposite, has_opposite = _views_at(needed + FULL_TURN / 2, geometry)
        mirrored = np.where(exists, flipped, not flipped)
        has_opposite &= centred or flipped
        views, exists = np.where(exists, views, opposite), exists | has_opposite
    if not exists.all():
        return None
    return Symmetry(quarters, flipped, torch.from_numpy(views), torch.from_numpy(mirrored))


def _views_at(angles: np.ndarray, geometry: FanBeamGeometry) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the views at these angles, int64, and whether there is one, bool."""
    step = geometry.angle_step
    turn, tolerance = FULL_TURN / abs(step), _ANGLE_TOLERANCE / abs(step)
    places = ((angles - geometry.first_angle) / step + tolerance) % turn - tolerance  # −tolerance to a turn
    views = np.rint(places).astype(np.int64)
    return views, (np.abs(places - views) <= tolerance) & (views < geometry.n_views)
