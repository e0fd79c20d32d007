import math

import pytest
import torch
from torch import nn

from qnmixer.memory.modes import apply_memory_mode
from qnmixer.memory.plan import Planner
from qnmixer.models import QNMixer
from qnmixer.parallel.tracker import PeakTracker
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.settings.sections import MemoryConfig

from ..conftest import config_of
from ..models.conftest import FIGURE

MIB = 2**20


@pytest.fixture(scope="module")
def projector() -> FanBeamProjector:
    return FanBeamProjector(FanBeamGeometry(32, 12.5, 8, 48, 20.0, 600.0, 290.0, math.pi / 8))


def network_of(projector: FanBeamProjector, mode: str) -> QNMixer:
    torch.manual_seed(0)
    network = QNMixer(projector, n_iterations=4, channels=16, **FIGURE)
    for regularizer in network.regularizers:
        nn.init.normal_(regularizer.expansion.project, std=0.02)
    apply_memory_mode(network, MemoryConfig(name=mode))
    return network


def test_a_loss_on_the_iterates_recomputes_them_too(projector: FanBeamProjector) -> None:
    peaks, gradients = [], []
    for mode in ("keep", "recompute"):
        network = network_of(projector, mode)
        truth = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
        y = projector(truth)
        tracker = PeakTracker()
        tracker.track(network)
        with tracker:
            sum((x - truth).square().mean() for x in network.iterates(y)[1:]).backward()
        peaks.append(tracker.peak_bytes)
        gradients.append([p.grad for p in network.parameters()])
    assert peaks[1] < 0.6 * peaks[0]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_what_stays_on_the_device_is_freed_with_its_image(projector: FanBeamProjector) -> None:
    """Also if no backward pass follows."""
    network = network_of(projector, "offload")
    with PeakTracker() as tracker:
        network(projector(torch.rand(1, 1, 32, 32)))
        assert tracker.current["activations"] < 2**17


@pytest.mark.slow
def test_recomputing_takes_the_iterations_out_of_the_peak() -> None:
    """The paper's size, by torch's tracker: at T = 14 at most 130 MiB, where keeping needs more for 3 iterations."""
    planner = Planner(config_of())

    def peak(memory: str, T: int) -> float:
        """MiB, but for parameters, gradients and optimizer state."""
        footprint = planner.estimate(config_of(f"memory={memory}", f"model.n_iterations={T}"))
        return (footprint.activations + footprint.operator) / MIB

    three, thirteen, fourteen = (peak("recompute", T) for T in (3, 13, 14))
    assert fourteen < 130 < peak("keep", 3)
    # What an iteration leaves: x, r, s and z, 0.25 MiB each; in backward, the gradients of s and z too.
    assert thirteen - three < 10 * 1.6
    # With the 14th the peak is elsewhere: where H copies all s and z for a moment, 1.4 MiB higher.
    assert fourteen - thirteen < 1.6 + 1.4
