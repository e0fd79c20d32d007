"""What holds for every network: its images, its derivatives, and what strategies and users ask of it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qnmixer.engine.config.sections import MemoryConfig
from qnmixer.engine.memory import modes
from qnmixer.errors import ConfigError
from qnmixer.models import LEARN, FBPConvNet, ItNet, LearnedPrimalDual, LEARNPlusPlus, QNMixer, RegFormer
from qnmixer.physics import FanBeamProjector

from .conftest import LEARNED, OPTIONS, SOLVERS, build, in_float64

WITH_WEIGHTS = [*OPTIONS, *LEARNED]
IN_MODES = [("default", "recompute"), ("default", "offload"), ("LEARN", "recompute"), ("LEARN", "offload")]


@pytest.fixture(autouse=True)
def offload_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tensors are all too small to be offloaded."""
    monkeypatch.setattr(modes, "_SMALLEST_OFFLOADED", 0)


@pytest.mark.parametrize("name", [*WITH_WEIGHTS, *SOLVERS])
def test_iterates_go_from_fbp_to_the_image(projector: FanBeamProjector, name: str) -> None:
    network = build(name, projector)
    y = projector(torch.rand(2, 1, 16, 16))
    iterates = network.iterates(y)
    assert len(iterates) == network.n_iterations + 1
    assert {tuple(x.shape) for x in iterates} == {(2, 1, 16, 16)}
    assert torch.equal(iterates[-1], network(y))
    assert all(torch.isfinite(x).all() for x in iterates)
    torch.testing.assert_close(iterates[0].clamp_min(0), projector.fbp(y).clamp_min(0))


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_every_parameter_gets_a_gradient(projector: FanBeamProjector, name: str) -> None:
    """Also from its start, where some are zero and let the others move a step later."""
    truth = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    for awake in (False, True):
        network = build(name, projector, awake=awake, channels=32)  # with four, ReLUs may be dead
        for _ in range(3):
            network.zero_grad()
            (network(projector(truth)) - truth).square().mean().backward()
            with torch.no_grad():
                for p in network.parameters():
                    p -= 1e-2 * p.grad
        without = [n for n, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        assert without == []


@pytest.mark.parametrize("name", ["default", "figure", *LEARNED])
def test_samples_of_a_batch_do_not_touch_each_other(projector: FanBeamProjector, name: str) -> None:
    """As strategies and micro-batches cut batches differently; and beside a scan of nothing."""
    network = build(name, projector)
    y = projector(torch.rand(3, 1, 16, 16))
    y[1] = 0
    alone = torch.cat([network(y[b : b + 1]) for b in range(3)])
    torch.testing.assert_close(network(y), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*WITH_WEIGHTS, *SOLVERS])
def test_the_state_dict_holds_weights_only_and_blocks_most_of_them(projector: FanBeamProjector, name: str) -> None:
    network = build(name, projector)
    assert set(network.state_dict()) == {n for n, _ in network.named_parameters()}  # no matrix of the scan
    of_blocks = [p for block in network.blocks() for p in block.parameters()]
    assert len(set(of_blocks)) == len(of_blocks)
    if name in LEARNED:
        assert sum(p.numel() for p in of_blocks) > 0.5 * n_weights(network)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, None) for name in LEARNED), ("RegFormer", torch.bfloat16)], ids=str
)
def test_recomputing_changes_no_bit(projector: FanBeamProjector, name: str, dtype: torch.dtype | None) -> None:
    truth = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for mode in ("keep", "recompute"):
        network = build(name, projector)
        modes.apply_memory_mode(network, MemoryConfig(name=mode))
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            x = network(projector(truth))
        assert x.dtype == torch.float32
        (x - truth).square().mean().backward()
        found.append([x.detach(), *(p.grad for p in network.parameters())])
    for kept, recomputed in zip(*found, strict=True):
        assert torch.equal(kept, recomputed)


# Derivatives: right, or an error. In float64, where differences have digits enough, and away from kinks: a step of 1e-7
# crosses no ReLU here.


def example(projector: FanBeamProjector, seed: int = 1, batch: int = 1) -> tuple[Tensor, Tensor]:
    """A sinogram and its image, which is far from the 0 where `nonnegative` has a gradient of its own."""
    generator = torch.Generator().manual_seed(seed)
    truth = 2 + torch.rand(batch, 1, 16, 16, dtype=torch.float64, generator=generator)
    return projector(truth), truth


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The relative difference of all tensors together."""
    a, b = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (found, expected))
    return float((a - b).detach().norm() / b.detach().norm())


# `detached` leaves a part of its gradient out, as its option says.
@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "keep") for name in WITH_WEIGHTS if name != "detached"), *IN_MODES]
)
def test_derivatives_are_differences(projector: FanBeamProjector, name: str, mode: str) -> None:
    """The gradient, and the Hessian times the direction, along a random direction of y and all weights."""
    network = in_float64(name, projector)
    modes.apply_memory_mode(network, MemoryConfig(name=mode))
    y, truth = example(network.projector)
    leaves = [y.requires_grad_(), *network.parameters()]
    assert network(y).min() > 0
    directions = [torch.randn_like(leaf) for leaf in leaves]

    def loss_and_gradients(**how: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = (network(y) - truth).square().mean()
        return loss.detach(), torch.autograd.grad(loss, leaves, **how)

    first = loss_and_gradients(create_graph=True)[1]
    slope = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
    found = torch.autograd.grad(slope, leaves)

    def moved(by: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.no_grad():
            for leaf, d in zip(leaves, directions, strict=True):
                leaf += by * d
        return loss_and_gradients()

    h = 1e-7
    (above, more), (below, less) = moved(h), moved(-2 * h)
    torch.testing.assert_close(slope, (above - below) / (2 * h), rtol=1e-4, atol=1e-8)
    expected = [(a - b) / (2 * h) for a, b in zip(more, less, strict=True)]
    assert difference([found[0]], [expected[0]]) < 1e-6
    assert difference([*found[1:]], expected[1:]) < 1e-6


def test_forward_derivatives_and_vmap_are_refused(projector: FanBeamProjector) -> None:
    """The operator has none of its own, and none is made up."""
    network = in_float64("LEARN", projector)
    y, _ = example(network.projector)
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(network, (y,), (y,))
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(network)(y[None])


@pytest.mark.parametrize(("name", "mode"), [("RegFormer", "keep"), *IN_MODES])
def test_a_copy_is_a_network_of_its_own(projector: FanBeamProjector, name: str, mode: str) -> None:
    network = in_float64(name, projector)
    modes.apply_memory_mode(network, MemoryConfig(name=mode))
    y, _ = example(network.projector)
    image, twin = network(y), copy.deepcopy(network)
    assert torch.equal(twin(y), image)
    twin(y).square().mean().backward()
    assert all(p.grad is None for p in network.parameters())
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(network(y), image)
    assert not torch.equal(twin(y), image)


@pytest.mark.parametrize("name", ["default", "Learned PD", "RegFormer", "FBPConvNet"])
def test_torch_export(projector: FanBeamProjector, name: str) -> None:
    """In float32 and for evaluation. Learned PD needs the norm of A, which one run of it computes: docs/library.md."""
    network = build(name, projector, n_iterations=2, data_steps=1).eval()
    y, other = (projector(torch.rand(2, 1, 16, 16)) for _ in range(2))
    with torch.no_grad():
        network(y)
        exported = torch.export.export(network, (y,)).module()
        assert difference([exported(other)], [network(other)]) < 1e-6


# Sizes and options


def n_weights(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_sizes_are_the_published_ones(projector: FanBeamProjector) -> None:
    """Added up from the layers that papers and authors' code list."""
    cnn = (25 * 48 + 48) + (25 * 48 * 48 + 48) + (25 * 48 + 1)
    assert n_weights(LEARN(projector)) == 50 * (cnn + 1) == 3_004_900
    assert n_weights(LEARNPlusPlus(projector)) == (15 + 14) * cnn + 15 + 2 * 14

    dual = (9 * 7 * 32 + 32) + (9 * 32 * 32 + 32) + (9 * 32 * 5 + 5) + 64
    primal = (9 * 6 * 32 + 32) + (9 * 32 * 32 + 32) + (9 * 32 * 5 + 5) + 64
    assert n_weights(LearnedPrimalDual(projector)) == 10 * (dual + primal) == 253_220  # paper: 2.4e5

    pairs = [(1, 64), (64, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]
    pairs += [(512, 1024), (1024, 1024), (1024, 512), (1024, 512), (512, 512), (512, 256), (512, 256), (256, 256)]
    pairs += [(256, 128), (256, 128), (128, 128), (128, 64), (128, 64), (64, 64)]
    unet = sum(9 * a * b + 2 * b for a, b in pairs) + 65  # each with a norm, whose shift is the convolution's too
    assert n_weights(FBPConvNet(projector)) == unet

    pairs = [(6, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512)]
    pairs += [(512, 512), (512, 256), (256, 256), (256, 128), (128, 128), (128, 64), (64, 64), (64, 32), (32, 32)]
    enlarge = sum(4 * 2 * n * n + n for n in (256, 128, 64, 32))
    assert n_weights(ItNet(projector)) == sum(9 * a * b + 2 * b for a, b in pairs) + enlarge + (32 * 6 + 6) + 4

    local = (25 * 48 + 48) + (25 * 96 * 96 + 96) + (25 * 96 + 1) + (9 * 96 * 48 + 48)
    swin = 4 * 96 + (3 * 96 * 96 + 3 * 96) + (96 * 96 + 96) + 3 * 15**2 + 2 * 4 * 96 * 96 + 5 * 96
    nonlocal_ = (9 * 48 + 48) + 2 * swin + 2 * 96 + (9 * 96 + 1) + (9 * 96 * 48 + 48)
    ends = (25 * 48 + 48) - (9 * 96 * 48 + 48)  # the first embeds all features, the last hands none on
    assert n_weights(RegFormer(projector)) == 6 * (local + nonlocal_) + ends + 12


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (LEARN, {"data_term": "fpb"}, "choose fbp or adjoint"),
        (QNMixer, {"hessian": "bgfs"}, "choose bfgs or identity or momentum"),
        (QNMixer, {"codec": "vq"}, "choose orthonormal or strided"),
        (QNMixer, {"regularizer": nn.Identity}, "set detail_channels=0"),
        (QNMixer, {"channels": 10}, "multiple of 4"),
    ],
)
def test_options_that_cannot_be_are_refused(
    projector: FanBeamProjector, network: Any, options: dict[str, Any], message: str
) -> None:
    """Some would be taken for another in silence."""
    with pytest.raises(ConfigError, match=message):
        network(projector, **options)
