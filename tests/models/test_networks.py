"""What holds for every network: its images, its gradients, and what strategies and users ask of it."""

from typing import Any

import pytest
import torch
from torch import nn

from qnmixer.errors import ConfigError, PluginError
from qnmixer.memory import modes
from qnmixer.models import LEARN, FBPConvNet, ItNet, LearnedPrimalDual, LEARNPlusPlus, QNMixer, RegFormer
from qnmixer.physics import FanBeamProjector
from qnmixer.settings.sections import MemoryConfig

from .conftest import LEARNED, OPTIONS, SOLVERS, build

WITH_WEIGHTS = [*OPTIONS, *LEARNED]


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
    for awake, n_steps in ((False, 3), (True, 1)):
        network = build(name, projector, awake=awake, channels=32)  # with four, ReLUs may be dead
        for _ in range(n_steps):
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


@pytest.mark.parametrize("name", LEARNED)
def test_no_memory_mode_changes_a_bit(projector: FanBeamProjector, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a network hands from one iteration to the next; tests/memory has QN-Mixer."""
    monkeypatch.setattr(modes, "_SMALLEST_OFFLOADED", 0)
    truth = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for mode in ("keep", "recompute", "offload"):
        network = build(name, projector)
        modes.apply_memory_mode(network, MemoryConfig(name=mode))
        x = network(projector(truth))
        (x - truth).square().mean().backward()
        found.append([x.detach(), *(p.grad for p in network.parameters())])
    for kept, *others in zip(*found, strict=True):
        assert all(torch.equal(kept, other) for other in others)


@pytest.mark.parametrize("name", ["default", "Learned PD", "RegFormer", "FBPConvNet"])
def test_torch_export(projector: FanBeamProjector, name: str) -> None:
    """In float32 and for evaluation. Learned PD needs the norm of A, which one run of it computes: docs/library.md."""
    network = build(name, projector, n_iterations=2, data_steps=1).eval()
    y, other = (projector(torch.rand(2, 1, 16, 16)) for _ in range(2))
    with torch.no_grad():
        network(y)
        exported = torch.export.export(network, (y,)).module()
        torch.testing.assert_close(exported(other), network(other))


def n_weights(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


SIZES = {
    LEARN: 3_004_900, LEARNPlusPlus: 1_742_856, LearnedPrimalDual: 253_220, FBPConvNet: 34_556_033, ItNet: 7_764_074,
    RegFormer: 3_222_252,
}  # fmt: skip


@pytest.mark.parametrize("network", SIZES)
def test_sizes_are_the_published_ones(projector: FanBeamProjector, network: Any) -> None:
    """Added up from the layers that papers and authors' code list."""
    with torch.device("meta"):
        assert n_weights(network(projector)) == SIZES[network]


@pytest.mark.parametrize(("network", "options", "error", "message"), [
    (LEARN, {"data_term": "fpb"}, ConfigError, "choose fbp or adjoint"),
    (QNMixer, {"hessian": "bgfs"}, ConfigError, "choose bfgs or identity or momentum or gradients"),
    (QNMixer, {"codec": "vq"}, ConfigError, "choose orthonormal or strided"),
    (QNMixer, {"regularizer": nn.Identity}, ConfigError, "set detail_channels=0"),
    *((RegFormer, {"channels": n}, ConfigError, f"channels={n} should be a multiple of 6") for n in (4, 8, 9, 100)),
    *((QNMixer, {"detail_channels": 0, "regularizer": part}, PluginError,
       r"called with two arguments, \(image_size, channels\)")
      for part in (nn.PixelShuffle, lambda: nn.Identity(), lambda a, b, c: nn.Identity())),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(
    projector: FanBeamProjector, network: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Some would be taken for another in silence."""
    with pytest.raises(error, match=message):
        network(projector, **options)(projector(torch.zeros(1, 1, 16, 16)))
