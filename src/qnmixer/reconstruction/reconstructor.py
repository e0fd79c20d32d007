"""A network with its scan and its noise, built from a checked config.

Plain torch: training, evaluation, inference and the plan are built on it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from qnmixer.data.batch import Batch
from qnmixer.errors import say
from qnmixer.measurement.build import build_geometry, build_measurement, build_network
from qnmixer.models.data_term import follow_scan
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.physics import FanBeamProjector, Symmetry, symmetries
from qnmixer.reconstruction.cures import NO_CHOICE, Cures, Scans, put_on
from qnmixer.reconstruction.pretrained import line_of_scan
from qnmixer.runs.processes.process import rank
from qnmixer.settings.run import Config


class Reconstructor(nn.Module):
    """A network with its measurement, as the config says: x → A x + noise → y → x_T. For all that does not train."""

    cures: Cures = NO_CHOICE  # what its network gets where its scan is not that of the training

    def __init__(self, config: Config, projector: FanBeamProjector | None = None) -> None:
        super().__init__()
        self.config = config
        self.measurement = build_measurement(config, projector)
        self.network = build_network(config, self.measurement.projector)

    @property
    def projector(self) -> FanBeamProjector:
        """A, Aᵀ and FBP of the scan."""
        return self.measurement.projector

    @property
    def device(self) -> torch.device:
        """The device of the scan's matrices. Everything that uses them is computed there."""
        return next(self.projector.buffers()).device

    def forward(self, y: Tensor) -> Tensor:
        """x_T [B, 1, H, W] from y [B, 1, V, D]."""
        return self.network(y)

    def measure(self, batch: Batch, stream: str) -> Tensor:
        """The noisy sinogram y [B, 1, V, D] of a batch."""
        return self.measurement(batch, stream)


def on_scan(trained: Reconstructor, config: Config, cures: Cures | None = None) -> Reconstructor:
    """A trained network under another config: other slices, noise or scan.

    If the scan differs, the step sizes follow it, and it gets cures; lines say so. Else the network is the same bit for
    bit, unless cures ask for more. `cures`: None: those of the trained one. Raises GeometryError for an impossible
    scan, and RuntimeError for a network whose weights do not fit the scan.
    """
    is_same = same_scan(trained.config, config)
    module = Reconstructor(config, trained.projector if is_same else None)
    module.load_state_dict(trained.state_dict())
    if not is_same:
        say_scan(trained.config, config, follow_scan(module.network, trained.projector))
    module.cures = cures or trained.cures
    scans = Scans(trained.config.data.views, trained.config.data.arcs)
    line = put_on(module.network, trained.projector, module.cures, module.measurement.noise.variance, scans)
    if line and rank() == 0:
        say(line)
    return module


def same_scan(config: Config, other: Config) -> bool:
    """Whether two configs have the same A and FBP."""
    filters = {scan.geometry.fbp_filter for scan in (config, other)}
    return len(filters) == 1 and build_geometry(config) == build_geometry(other)


def say_scan(trained: Config, config: Config, factor: float) -> None:
    """Print what differs from the scan of the training, and by what the step sizes are multiplied."""
    if rank() == 0:
        say(line_of_scan(trained.geometry.plain(), config.geometry.plain(), factor))


def symmetries_of(projector: FanBeamProjector, most: int) -> list[Symmetry]:
    """The symmetries of a scan, at most so many. Prints a line if it has fewer."""
    found = symmetries(projector, most) if most > 1 else []
    if len(found) < most and most > 1 and rank() == 0:
        say(f"symmetries={most}: this scan has {len(found)}" + " (the identity)" * (len(found) == 1))
    return found


def second_order(network: UnrolledNetwork[Any]) -> dict[str, str]:
    """τ_t, β_t or α_t as learned, from t = 1 on, for readers. Near 0, the network hardly uses what they multiply."""
    parts = {f"{name}_t, learned": part for name, part in network.scalars().items() if name != "lambda" and part}
    return {
        name: "; ".join(", ".join(f"{value:.3f}" for value in scalar.flatten().tolist()) for scalar in part)
        for name, part in parts.items()
    }
