"""A second forward pass changes no buffer, and sees those of the first one."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qnmixer.memory import modes
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.memory.recomputation import Recomputation
from qnmixer.models import LEARN, UnrolledNetwork
from qnmixer.parallel.tracker import PeakTracker
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.settings.sections import MemoryConfig

from .. import buffers
from ..models.conftest import build


def qn_mixer(projector: FanBeamProjector, **options: Any) -> UnrolledNetwork[Any]:
    return build("figure", projector, **options)


def drop(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    return nn.functional.dropout(output, 0.3, module.training)


def dropping(projector: FanBeamProjector, **options: Any) -> UnrolledNetwork[Any]:
    """Random numbers inside what runs again in every mode."""
    network = qn_mixer(projector, **options)
    for part in network.large_parts():
        part.channel_mlp.register_forward_hook(drop)
    return network


def frozen(projector: FanBeamProjector, n_iterations: int) -> LEARN:
    """Nothing flows back to the first iteration, and something to one behind the third."""
    network = LEARN(projector, n_iterations, channels=4)
    for k in (0, 2):
        network.regularizers[k].requires_grad_(False)
        network.step_sizes[k].requires_grad_(False)
    return network


NETWORKS: dict[str, tuple[Any, dict[str, Any], torch.dtype | None]] = {
    kind.__name__: (kind, {}, None)
    for kind in vars(buffers).values()
    if isinstance(kind, type) and issubclass(kind, buffers.Changing) and kind is not buffers.Changing
} | {
    "one iteration": (buffers.BatchNorm, {"n_iterations": 1}, None),  # its blocks are the checkpoints
    "half precision": (buffers.Spectral, {}, torch.float16),
    "dropout": (dropping, {}, None),
    "regularizers": (qn_mixer, {"shared_regularizer": False}, torch.bfloat16),
    "detached": (dropping, {"hessian_gradient": "detach"}, torch.float16),
    "symmetric": (qn_mixer, {"symmetric": True}, None),
    "frozen": (frozen, {"n_iterations": 4}, None),
}
"""What makes a network of three iterations, its options, and in which precision it runs."""


@pytest.fixture(scope="module")
def projector() -> FanBeamProjector:
    return FanBeamProjector(FanBeamGeometry(16, 25.0, 8, 24, 40.0, 600.0, 290.0, 0.1))


def trained(
    network: UnrolledNetwork[Any], mode: str, dtype: torch.dtype | None = None, compiled: bool = False
) -> dict[str, Tensor]:
    """Gradients of each of four steps, and the buffers and weights after them; in the middle an evaluation."""
    network = copy.deepcopy(network)
    apply_memory_mode(network, MemoryConfig(name=mode))
    for block in network.blocks() if compiled else []:
        block.compile(backend="eager")
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    torch.manual_seed(0)
    results: dict[str, Tensor] = {}
    for step in range(4):
        truth = torch.rand(3, 1, 16, 16)
        y = network.projector(truth)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = (network(y) - truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        results |= {f"{name} at {step}": p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
        optimizer.step()
        if step == 1:
            with torch.no_grad():
                results["evaluated"] = network.eval()(y)
            network.train()
        network.begun = True
    return results | network.state_dict()


@pytest.mark.parametrize("name", NETWORKS)
def test_buffers_and_gradients_are_those_of_one_pass(
    projector: FanBeamProjector, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, however a buffer is changed: the same operations run again on the same numbers."""
    monkeypatch.setattr(modes, "_SMALLEST_OFFLOADED", 0)  # small networks have small tensors, which would stay
    torch.manual_seed(1)
    kind, options, dtype = NETWORKS[name]
    network = kind(projector, **{"n_iterations": 3} | options)
    expected = trained(network, "keep", dtype)
    for mode in ("recompute", "offload"):
        results = trained(network, mode, dtype)
        assert results.keys() == expected.keys()
        assert [(mode, key) for key, value in expected.items() if not torch.equal(results[key], value)] == []
    changed = [key for key, buffer in network.named_buffers() if key in results and not buffer.equal(results[key])]
    assert bool(changed) == (isinstance(kind, type) and name != "Constant")


@pytest.mark.parametrize("T", [1, 3])
def test_compiled_blocks(projector: FanBeamProjector, T: int) -> None:
    """The compiler would run a checkpoint inside a block without its contexts."""
    network = buffers.Spectral(projector, n_iterations=T)
    expected, results = trained(network, "keep"), trained(network, "recompute", compiled=True)
    assert [name for name, value in expected.items() if not torch.allclose(results[name], value)] == []


def test_a_checkpoint_inside_another_one() -> None:
    """The second pass of the inner one is inside a second pass of the outer one."""
    torch.manual_seed(0)
    layers = nn.ModuleList(
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Tanh())
        for _ in range(2)
    )

    def results(nested: bool) -> dict[str, Any]:
        first, second = network = copy.deepcopy(layers)
        run: Any = Recomputation(network).run if nested else lambda part, x: part(x)
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()

        def block(x: Tensor) -> Tensor:
            return second(run(first, run(first, x)))

        for _ in range(2):
            run(block, run(block, x)).square().sum().backward()
        return {name: p.grad for name, p in network.named_parameters()} | network.state_dict() | {"x": x.grad}

    expected, nested_results = results(nested=False), results(nested=True)
    assert [name for name, value in expected.items() if not torch.equal(nested_results[name], value)] == []


def test_two_backward_passes_of_one_graph(projector: FanBeamProjector) -> None:
    network = buffers.Spectral(projector, n_iterations=3)
    apply_memory_mode(network, MemoryConfig(name="recompute"))
    x = network(projector(torch.rand(1, 1, 16, 16)))
    before = copy.deepcopy(network.state_dict())
    gradients = [torch.autograd.grad(x.sum(), [*network.parameters()], retain_graph=True) for _ in range(2)]
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)
    assert [name for name, value in network.state_dict().items() if not torch.equal(value, before[name])] == []


def test_a_constant_buffer_costs_one_copy_and_no_time(projector: FanBeamProjector) -> None:
    """It is compared in the first step only."""

    def peaks(mode: str) -> list[int]:
        network = buffers.Changing(projector, n_iterations=4, channels=1)
        network.register_buffer("table", torch.ones(2**20))
        apply_memory_mode(network, MemoryConfig(name=mode))
        y, peaks = projector(torch.rand(1, 1, 16, 16)), []
        for _ in range(2):
            with PeakTracker() as tracker:
                network(y).sum().backward()
            peaks.append(tracker.peak_bytes)
        return peaks

    (kept, _), (first, second) = peaks("keep"), peaks("recompute")
    table = 4 * 2**20
    assert first < 2.5 * table  # with the table itself, which counts as soon as an operator reads it
    assert second <= kept
