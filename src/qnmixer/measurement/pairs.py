"""Whether measured sinograms are those of their images, or of any. One product A x of the first batch says it."""

import math
import warnings

import torch
from torch import Tensor

from qnmixer.data.batch import Batch
from qnmixer.data.slices import warn_once
from qnmixer.errors import DataError
from qnmixer.measurement.scans import doubts_of_scan, noise_of
from qnmixer.physics import FanBeamProjector
from qnmixer.runs.processes.process import rank
from qnmixer.settings.run import Config

# How far A x may be from y, as a share of y, and the share of the noise that is added to it. Measured with phantoms of
# 32 and 64 pixels, and CT slices of 64 and 256. Right pairs: 0 to 1.5 %, also from a finer grid or with metal that the
# image cuts off. With 1000 photons a ray, which is 20 % noise: 5 to 11 %. Wrong ones: mirrored 14 to 53 %, those of the
# next image 25 to 54 %, turned by a view 7 to 28 %. A shift by two bins is 3 to 13 %, and may stay unseen.
_FAR, _OF_NOISE = 0.06, 0.35


def check_pairs(config: Config, projector: FanBeamProjector, batch: Batch, part: str) -> None:
    """Warn if measured sinograms of a batch differ from A x of their images, or fit no image if there are none.

    Rays whose value is exactly 0 count as not measured. Slices of weight 0 are not looked at.

    Raises:
        DataError: all its sinograms are 0, and their images are not; or one that has no image fits none.
    """
    counts = batch["weight"] > 0
    if not counts.any():
        return
    y = batch["sinogram"][counts]
    if "image" not in batch:
        unit = f"data.unit={config.data.arguments['unit']}" if "unit" in config.data.arguments else "value × mm"
        names = [batch["name"][k] for k in counts.nonzero()[:, 0].tolist()]
        for k, (name, sinogram) in enumerate(zip(names, y.split(1), strict=True)):
            scaling, roughness = config.data.hu_scaling, noise_of(sinogram)
            doubts = doubts_of_scan(name, projector, sinogram, scaling, unit, noise=roughness, is_known=k > 0)
            for line in doubts:
                warn_once(line)
        return
    with torch.no_grad():
        p = projector(batch["image"][counts])
    source = config.source_as_typed
    if p.any() and not y.any():
        raise DataError(f"{source}: all sinograms of the first batch of {part} are 0, but not their images")
    distance, noise = _distance(p, y)
    if rank() != 0 or not (far := distance > _FAR + _OF_NOISE * noise).any():
        return
    worst = int(torch.where(far, distance, 0.0).argmax())
    p, y = p[worst : worst + 1], y[worst : worst + 1]
    factor = float((p * y).sum() / y.square().sum())  # brings y nearest to p
    changes = {
        "with its bins mirrored": y.flip(-1),
        "with its views in reverse": y.flip(-2),
        f"times {factor:.3g}": y * factor,
    }
    distances = {change: float(_distance(p, changed)[0]) for change, changed in changes.items()}
    nearest = min(distances, key=distances.__getitem__)
    is_near = distances[nearest] < min(float(distance[worst]), 1.0) / 2
    number = int(counts.nonzero()[worst])
    hint = f" {nearest.capitalize()} it differs by {distances[nearest]:.0%}." if is_near else ""
    place = f"{part}, slice {number} of its first batch, {batch['name'][number]}"
    warnings.warn(
        f"{source}: a sinogram differs from A x of its image by {float(distance[worst]):.0%} ({place}).{hint} Are "
        "sinograms line integrals in value × mm, with the bins and angles of geometry, not mirrored, of these images?",
        stacklevel=2,
    )


def _distance(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(‖p − y‖ without white noise, the noise), as shares of ‖y‖ of each sinogram [B, 1, V, D]."""
    difference = torch.where(y != 0, p - y, 0.0)
    # Second differences, 1 −2 1, remove what is smooth along the bins. They have 6 times the variance of white noise.
    noise = difference.diff(n=2, dim=-1).square().sum((1, 2, 3)) / 6
    rest = (difference.square().sum((1, 2, 3)) - noise).clamp(min=0)
    norm = y.square().sum((1, 2, 3))
    norm = torch.where(norm > 0, norm, math.inf)  # of a slice of air, or a scan that failed
    return (rest / norm).sqrt(), (noise / norm).sqrt()
