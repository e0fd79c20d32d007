import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qnmixer.memory import modes as memory
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.memory.plan import Planner
from qnmixer.models import LEARN, QNMixer
from qnmixer.parallel.tracker import PeakTracker
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.settings.compose import compose
from qnmixer.settings.run import parse
from qnmixer.settings.sections import MemoryConfig

from ..models.conftest import FIGURE

MIB = 2**20
KEEP = MemoryConfig(name="keep")
MODES = {name: MemoryConfig(name=name) for name in ("recompute", "offload")}


@pytest.fixture(scope="module")
def projector() -> FanBeamProjector:
    return FanBeamProjector(FanBeamGeometry(32, 12.5, 8, 48, 20.0, 600.0, 290.0, math.pi / 8))


@pytest.fixture
def everything_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks have small tensors, which would stay."""
    monkeypatch.setattr(memory, "_SMALLEST_OFFLOADED", 0)


class Dropping(nn.Module):
    """A regulariser with dropout behind it: random numbers inside an iteration."""

    def __init__(self, regularizer: nn.Module) -> None:
        super().__init__()
        self.embedding = regularizer.embedding
        self.regularizer = regularizer
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.regularizer(x))


def network_of(projector: FanBeamProjector, dropout: bool, channels: int = 16, **options: Any) -> QNMixer:
    torch.manual_seed(0)
    network = QNMixer(projector, n_iterations=4, channels=channels, **FIGURE, **options)
    for k, regularizer in enumerate(network.regularizers):
        nn.init.normal_(regularizer.expansion.project, std=0.02)
        if dropout:
            network.regularizers[k] = Dropping(regularizer)
    return network


def loss_and_gradients(network: QNMixer, mode: MemoryConfig, dtype: torch.dtype | None) -> dict[str, Tensor]:
    network = copy.deepcopy(network)
    apply_memory_mode(network, mode)
    torch.manual_seed(5)
    truth = torch.rand(2, 1, 32, 32)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = (network(network.projector(truth)) - truth).square().mean()
    loss.backward()
    gradients = {name: p.grad for name, p in network.named_parameters()}
    return {"loss": loss.detach()} | {name: gradient for name, gradient in gradients.items() if gradient is not None}


@pytest.mark.usefixtures("everything_offloaded")
@pytest.mark.parametrize(
    ("dtype", "dropout", "options"),
    [
        (None, True, {}),
        (torch.bfloat16, False, {"shared_regularizer": False}),
        (torch.float16, True, {"hessian_gradient": "detach"}),
        (None, False, {"symmetric": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradients_are_those_of_the_plain_network(
    projector: FanBeamProjector, mode: str, dtype: torch.dtype | None, dropout: bool, options: dict[str, Any]
) -> None:
    """Bit for bit: the same operations run again on the same numbers. Weights keep their names."""
    network = network_of(projector, dropout, **options)
    expected = loss_and_gradients(network, KEEP, dtype)
    found = loss_and_gradients(network, MODES[mode], dtype)
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("mode", MODES)
def test_frozen_iterations_need_no_gradient(projector: FanBeamProjector, mode: str) -> None:
    """Neither the first, to which nothing flows back, nor one behind which something does."""
    torch.manual_seed(0)
    network = LEARN(projector, n_iterations=4, channels=4)
    for k in (0, 2):
        network.regularizers[k].requires_grad_(False)
        network.step_sizes[k].requires_grad_(False)
    other = copy.deepcopy(network)
    apply_memory_mode(other, MODES[mode])
    y = projector(torch.rand(1, 1, 32, 32))
    for it in (network, other):
        it(y).square().mean().backward()
    for p, q in zip(network.parameters(), other.parameters(), strict=True):
        assert (q.grad is None) == (p.grad is None) == (not p.requires_grad)
        assert p.grad is None or torch.equal(p.grad, q.grad)


def test_a_loss_on_the_iterates_recomputes_them_too(projector: FanBeamProjector) -> None:
    peaks, gradients = [], []
    for mode in (KEEP, MODES["recompute"]):
        network = network_of(projector, dropout=False)
        apply_memory_mode(network, mode)
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
    network = network_of(projector, dropout=False)
    apply_memory_mode(network, MODES["offload"])
    with PeakTracker() as tracker:
        network(projector(torch.rand(1, 1, 32, 32)))
        assert tracker.current["activations"] < 2**17


def peak_of_a_step(projector: FanBeamProjector, *overrides: str) -> float:
    """MiB of a training step at its peak, but for parameters, gradients and optimizer state."""
    footprint = Planner(config := parse(compose("train", list(overrides))), projector).estimate(config)
    return (footprint.activations + footprint.operator) / MIB


@pytest.mark.slow
def test_recomputing_takes_the_iterations_out_of_the_peak() -> None:
    """The paper's size, by torch's tracker: at T = 14 at most 130 MiB, where keeping needs more for 3 iterations."""
    projector = FanBeamProjector(FanBeamGeometry.paper(32))
    projector.safe_step_size()
    seven, thirteen, fourteen = (
        peak_of_a_step(projector, "memory=recompute", f"model.n_iterations={T}") for T in (7, 13, 14)
    )
    assert fourteen < 130 < peak_of_a_step(projector, "model.n_iterations=3")
    # What an iteration leaves: x, r, s and z, 0.25 MiB each; in backward, the gradients of s and z too.
    assert thirteen - seven < 6 * 1.6
    # With the 14th the peak is elsewhere: where H copies all s and z for a moment, 1.4 MiB higher.
    assert fourteen - thirteen < 1.6 + 1.4
