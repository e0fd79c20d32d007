"""A derivative is right or an error: first and second derivatives, copies, threads and torch.export of each network.

In float64, where differences have digits enough, and away from kinks: a step of 1e-7 crosses no ReLU here.
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qnmixer.engine.config.sections import MemoryConfig
from qnmixer.engine.memory import modes
from qnmixer.models import QNMixer, UnrolledNetwork
from qnmixer.physics import FanBeamProjector

from .conftest import FIGURE
from .test_competitors import LEARNED
from .test_qn_mixer import OPTIONS

ALL = [*OPTIONS, *LEARNED]
TRUE = [name for name in ALL if name != "detached"]
"""Those whose gradient is that of their image. `detached` leaves a part of it out, as its option says."""

SMALL = {**FIGURE, "n_iterations": 3, "channels": 4, "n_mixer_layers": 1}

IN_MODES = [("default", "recompute"), ("default", "offload"), ("LEARN", "recompute"), ("LEARN", "offload")]


@pytest.fixture(autouse=True)
def offload_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tensors are all too small to be offloaded."""
    monkeypatch.setattr(modes, "_SMALLEST_OFFLOADED", 0)


def build(name: str, projector: FanBeamProjector, mode: str = "keep", **options: Any) -> UnrolledNetwork[Any]:
    """A small network in float64, away from its start, where some of its parts are zero."""
    torch.manual_seed(0)
    own = copy.deepcopy(projector)
    network = LEARNED[name](own) if name in LEARNED else QNMixer(own, **{**SMALL, **OPTIONS[name], **options})
    with torch.no_grad():
        for p in network.parameters():
            p += 0.02 * torch.randn_like(p)
    modes.apply_memory_mode(network, MemoryConfig(name=mode))
    return network.double()


def example(network: UnrolledNetwork[Any], seed: int = 1, batch: int = 1) -> tuple[Tensor, Tensor]:
    """A sinogram and its image, which is far from the 0 where `nonnegative` has a gradient of its own."""
    generator = torch.Generator().manual_seed(seed)
    truth = 2 + torch.rand(batch, 1, 16, 16, dtype=torch.float64, generator=generator)
    return network.projector(truth), truth


def gradients(
    network: UnrolledNetwork[Any], y: Tensor, truth: Tensor, leaves: list[Tensor], create_graph: bool = False
) -> tuple[Tensor, ...]:
    """Of the mean square error."""
    loss = (network(y) - truth).square().mean()
    return torch.autograd.grad(loss, leaves, create_graph=create_graph)


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The relative difference of all tensors together."""
    a, b = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (found, expected))
    return float((a - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize(("name", "mode"), [*((name, "keep") for name in TRUE), *IN_MODES])
def test_derivatives_are_differences(projector: FanBeamProjector, name: str, mode: str) -> None:
    """The gradient, and the Hessian times the direction, along a random direction of y and all weights."""
    network = build(name, projector, mode)
    y, truth = example(network)
    leaves = [y.requires_grad_(), *network.parameters()]
    assert network(y).min() > 0
    directions = [torch.randn_like(leaf) for leaf in leaves]
    first = gradients(network, y, truth, leaves, create_graph=True)
    slope = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
    found = torch.autograd.grad(slope, leaves)

    def moved(by: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.no_grad():
            for leaf, d in zip(leaves, directions, strict=True):
                leaf += by * d
            loss = (network(y) - truth).square().mean()
        return loss, gradients(network, y, truth, leaves)

    h = 1e-7
    (above, more), (below, less) = moved(h), moved(-2 * h)
    torch.testing.assert_close(slope, (above - below) / (2 * h), rtol=1e-4, atol=1e-8)
    expected = [(a - b) / (2 * h) for a, b in zip(more, less, strict=True)]
    assert difference([found[0]], [expected[0]]) < 1e-6
    assert difference([*found[1:]], expected[1:]) < 1e-6


def test_forward_derivatives_and_vmap_are_refused(projector: FanBeamProjector) -> None:
    """The operator has none of its own, and none is made up."""
    network = build("LEARN", projector)
    y, _ = example(network)
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(network, (y,), (y,))
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(network)(y[None])


@pytest.mark.parametrize(("name", "mode"), [("default", "keep"), ("RegFormer", "keep"), *IN_MODES])
def test_a_copy_is_a_network_of_its_own(projector: FanBeamProjector, name: str, mode: str) -> None:
    network = build(name, projector, mode)
    y, truth = example(network)
    image = network(y)
    twin = copy.deepcopy(network)
    assert not {p.data_ptr() for p in network.parameters()} & {p.data_ptr() for p in twin.parameters()}
    assert torch.equal(twin(y), image)
    expected = gradients(network, y, truth, [*network.parameters()])
    (twin(y) - truth).square().mean().backward()
    assert all(p.grad is None for p in network.parameters())
    assert all(torch.equal(p.grad, g) for p, g in zip(twin.parameters(), expected, strict=True))
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(network(y), image)
    assert not torch.equal(twin(y), image)


@pytest.mark.parametrize(("name", "mode"), [("default", "recompute"), ("RegFormer", "keep")])
def test_threads_share_a_network(projector: FanBeamProjector, name: str, mode: str) -> None:
    """Four threads at once, each with a sinogram of its own: results of one thread, and parameters stay parameters."""
    network = build(name, projector, mode)
    parameters = dict(network.named_parameters())
    examples = [example(network, seed) for seed in range(4)]
    together = threading.Barrier(4)

    def work(of: tuple[Tensor, Tensor]) -> list[Tensor]:
        y, truth = of
        found = []
        for _ in range(3):
            image = network(y)
            found = [image, *torch.autograd.grad((image - truth).square().mean(), [*parameters.values()])]
        return found

    def at_once(of: tuple[Tensor, Tensor]) -> list[Tensor]:
        together.wait()
        return work(of)

    expected = [work(of) for of in examples]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(at_once, examples))
    assert [difference(a, b) for a, b in zip(found, expected, strict=True)] == pytest.approx([0.0] * 4, abs=1e-13)
    after = dict(network.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[n] is p and isinstance(p, nn.Parameter) for n, p in parameters.items())


@pytest.mark.parametrize("name", ["default", "Learned PD", "RegFormer", "FBPConvNet"])
def test_torch_export(projector: FanBeamProjector, name: str) -> None:
    """In float32 and for evaluation. Learned PD needs the norm of A, which one run of it computes: docs/library.md."""
    small = {"n_iterations": 2, "data_steps": 1} if name in OPTIONS else {}
    network = build(name, projector, **small).float().eval()
    y, other = (example(network, seed, batch=2)[0].float() for seed in (1, 2))
    with torch.no_grad():
        network(y)
        exported = torch.export.export(network, (y,)).module()
        assert difference([exported(other)], [network(other)]) < 1e-6
