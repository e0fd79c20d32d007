"""What holds for every network that QN-Mixer is compared with, and what the papers say of each."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qnmixer.engine.config.sections import MemoryConfig
from qnmixer.engine.memory.modes import apply_memory_mode
from qnmixer.errors import ConfigError
from qnmixer.models import (
    FBP,
    LEARN,
    FBPConvNet,
    ItNet,
    LearnedPrimalDual,
    LEARNPlusPlus,
    RegFormer,
    TotalVariation,
    UnrolledNetwork,
)
from qnmixer.models.data_term import data_gradient, safe_step_size
from qnmixer.models.regformer import WindowAttention
from qnmixer.physics import FanBeamProjector

LEARNED: dict[str, Callable[[FanBeamProjector], UnrolledNetwork[Any]]] = {
    "FBPConvNet": lambda projector: FBPConvNet(projector, channels=4, depth=3),
    "ItNet": lambda projector: ItNet(projector, n_iterations=2, channels=4, depth=2),
    "LEARN": lambda projector: LEARN(projector, n_iterations=3, channels=4),
    "LEARN with FBP": lambda projector: LEARN(projector, n_iterations=3, channels=4, data_term="fbp"),
    "LEARN++": lambda projector: LEARNPlusPlus(projector, n_iterations=3, channels=4, data_term="fbp"),
    "Learned PD": lambda projector: LearnedPrimalDual(projector, n_iterations=3, channels=4),
    "RegFormer": lambda projector: RegFormer(projector, n_iterations=4, channels=6, window_size=4),
    "RegFormer of one window": lambda projector: RegFormer(projector, n_iterations=3, channels=6, window_size=16),
    "RegFormer of one iteration": lambda projector: RegFormer(projector, n_iterations=1, channels=6),
}
ALL = {
    **LEARNED,
    "FBP": FBP,
    "TV": lambda projector: TotalVariation(projector, n_iterations=5),
}


def learned(name: str, projector: FanBeamProjector) -> UnrolledNetwork[Any]:
    """A small network, away from its start, where some of its parts are zero."""
    torch.manual_seed(0)
    network = LEARNED[name](projector)
    with torch.no_grad():
        for p in network.parameters():
            p += 0.05 * torch.randn_like(p)
    return network


@pytest.mark.parametrize("name", ALL)
def test_iterates_end_at_forward(projector: FanBeamProjector, name: str) -> None:
    network = ALL[name](projector)
    y = projector(torch.rand(2, 1, 16, 16))
    iterates = network.iterates(y)
    assert len(iterates) == network.n_iterations + 1
    assert {tuple(x.shape) for x in iterates} == {(2, 1, 16, 16)}
    assert torch.equal(iterates[-1], network(y))
    assert all(torch.isfinite(x).all() for x in iterates)
    torch.testing.assert_close(iterates[0].clamp_min(0), projector.fbp(y).clamp_min(0))


@pytest.mark.parametrize("name", LEARNED)
def test_every_parameter_gets_a_gradient(projector: FanBeamProjector, name: str) -> None:
    """Also from the published start, where some are zero and let the others move a step later."""
    torch.manual_seed(0)
    truth = torch.rand(2, 1, 16, 16)
    for network in (LEARNED[name](projector), learned(name, projector)):
        for _ in range(3):
            network.zero_grad()
            (network(projector(truth)) - truth).square().mean().backward()
            with torch.no_grad():
                for p in network.parameters():
                    p -= 1e-2 * p.grad
        without = [n for n, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        assert without == []


@pytest.mark.parametrize("name", LEARNED)
def test_samples_of_a_batch_do_not_touch_each_other(projector: FanBeamProjector, name: str) -> None:
    """As strategies and micro-batches cut batches differently."""
    network = learned(name, projector)
    y = projector(torch.rand(3, 1, 16, 16))
    alone = torch.cat([network(y[b : b + 1]) for b in range(3)])
    torch.testing.assert_close(network(y), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, None) for name in LEARNED), ("RegFormer", torch.bfloat16)], ids=str
)
def test_recomputing_changes_no_bit(projector: FanBeamProjector, name: str, dtype: torch.dtype | None) -> None:
    truth = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for mode in (MemoryConfig(name="keep"), MemoryConfig(name="recompute")):
        network = learned(name, projector)
        apply_memory_mode(network, mode)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            x = network(projector(truth))
        assert x.dtype == torch.float32
        (x - truth).square().mean().backward()
        found.append([x.detach(), *(p.grad for p in network.parameters())])
    for kept, recomputed in zip(*found, strict=True):
        assert torch.equal(kept, recomputed)


@pytest.mark.parametrize("name", ALL)
def test_state_dict_holds_weights_only(projector: FanBeamProjector, name: str) -> None:
    network = ALL[name](projector)
    assert set(network.state_dict()) == {n for n, _ in network.named_parameters()}


@pytest.mark.parametrize("name", LEARNED)
def test_blocks_hold_most_weights(projector: FanBeamProjector, name: str) -> None:
    network = LEARNED[name](projector)
    of_blocks = [p for block in network.blocks() for p in block.parameters()]
    assert len(set(of_blocks)) == len(of_blocks)
    assert sum(p.numel() for p in of_blocks) > 0.5 * sum(p.numel() for p in network.parameters())


def n_weights(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_sizes_are_the_published_ones(projector: FanBeamProjector) -> None:
    """Added up from the layers that papers and authors' code list."""
    one_iteration_of_learn = (25 * 48 + 48) + (25 * 48 * 48 + 48) + (25 * 48 + 1) + 1
    assert n_weights(LEARN(projector)) == 50 * one_iteration_of_learn == 3_004_900

    dual = (9 * 7 * 32 + 32) + (9 * 32 * 32 + 32) + (9 * 32 * 5 + 5) + 64
    primal = (9 * 6 * 32 + 32) + (9 * 32 * 32 + 32) + (9 * 32 * 5 + 5) + 64
    assert n_weights(LearnedPrimalDual(projector)) == 10 * (dual + primal) == 253_220  # paper: 2.4e5

    pairs = [(1, 64), (64, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512)]
    pairs += [(512, 1024), (1024, 1024), (1024, 512), (1024, 512), (512, 512), (512, 256), (512, 256), (256, 256)]
    pairs += [(256, 128), (256, 128), (128, 128), (128, 64), (128, 64), (64, 64)]
    unet = sum(9 * a * b + 2 * b for a, b in pairs) + 65  # each with a norm, whose shift is the convolution's too
    assert n_weights(FBPConvNet(projector)) == unet

    pairs = [(6, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256)]
    pairs += [
        (256, 512),
        (512, 512),
        (512, 256),
        (256, 256),
        (256, 128),
        (128, 128),
        (128, 64),
        (64, 64),
        (64, 32),
        (32, 32),
    ]
    enlarge = sum(4 * 2 * n * n + n for n in (256, 128, 64, 32))
    unet = sum(9 * a * b + 2 * b for a, b in pairs) + enlarge + (32 * 6 + 6)
    assert n_weights(ItNet(projector)) == unet + 4

    cnn = one_iteration_of_learn - 1
    assert n_weights(LEARNPlusPlus(projector)) == (15 + 14) * cnn + 15 + 2 * 14

    local = (25 * 48 + 48) + (25 * 96 * 96 + 96) + (25 * 96 + 1) + (9 * 96 * 48 + 48)
    swin = 4 * 96 + (3 * 96 * 96 + 3 * 96) + (96 * 96 + 96) + 3 * 15**2 + 2 * 4 * 96 * 96 + 5 * 96
    nonlocal_ = (9 * 48 + 48) + 2 * swin + 2 * 96 + (9 * 96 + 1) + (9 * 96 * 48 + 48)
    ends = (25 * 48 + 48) - (9 * 96 * 48 + 48)  # the first embeds all features, the last hands none on
    assert n_weights(RegFormer(projector)) == 6 * (local + nonlocal_) + ends + 12


@pytest.mark.parametrize("name", ["LEARN", "RegFormer", "FBPConvNet"])
def test_without_data_step_and_regulariser_the_start_stays(projector: FanBeamProjector, name: str) -> None:
    """λ starts at 0; with all else at 0 too, nothing moves."""
    network = LEARNED[name](projector)
    assert all(not step_size.any() for step_size in network.step_sizes)
    with torch.no_grad():
        for p in network.parameters():
            p.zero_()
    y = projector(torch.rand(1, 1, 16, 16))
    expected = projector.fbp(y) if name == "FBPConvNet" else projector.fbp(y).clamp_min(0)
    assert torch.equal(network(y), expected)


@pytest.mark.parametrize("data_term", ["adjoint", "fbp"])
def test_a_safe_step_size_descends(projector: FanBeamProjector, data_term: Any) -> None:
    """LEARN with G = 0 is then gradient descent on the data."""
    network = LEARN(projector, n_iterations=20, channels=4, data_term=data_term)
    with torch.no_grad():
        for p in network.regularizers.parameters():
            p.zero_()
        for step_size in network.step_sizes:
            step_size.fill_(safe_step_size(projector, data_term))
    y = projector(torch.rand(1, 1, 16, 16))
    with torch.no_grad():
        misfits = [float(data_gradient(projector, data_term, x, y).norm()) for x in network.iterates(y)]
    assert misfits[-1] < 0.5 * misfits[0]


def test_learned_primal_dual_reads_what_the_paper_says(projector: FanBeamProjector) -> None:
    """The forward operator sees the second image, the adjoint the first sinogram; everything is scaled by ‖A‖."""
    network = LearnedPrimalDual(projector, n_iterations=1)
    seen: list[Tensor] = []
    for block in network.blocks():
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    y = projector(torch.rand(1, 1, 16, 16))
    start = network.start(y)
    start.primal[:, 1] = 1
    after = network.step(0, y, start)
    norm = projector.operator_norm()
    torch.testing.assert_close(seen[0][:, 5:6], projector(start.primal[:, 1:2]) / norm)
    torch.testing.assert_close(seen[0][:, 6:7], y / norm)
    torch.testing.assert_close(seen[1][:, 5:6], projector.adjoint(after.dual[:, :1]) / norm)


def matrix(operator: Callable[[Tensor], Tensor], *shape: int) -> Tensor:
    """A linear operator on tensors of this shape, as a matrix: each column is what one unit tensor becomes."""
    basis = torch.eye(math.prod(shape), dtype=torch.float64).view(-1, 1, *shape)
    return torch.cat([operator(unit[None]).flatten()[:, None] for unit in basis], dim=1)


class Dense(NamedTuple):
    """A, A† and FBP as matrices."""

    A: Tensor
    back: Tensor
    fbp: Tensor


def dense(network: UnrolledNetwork[Any]) -> Dense:
    p = network.projector
    A = matrix(p, 16, 16)
    ramp = matrix(p.filtered_adjoint, 12, 24)
    torch.testing.assert_close(matrix(p.adjoint, 12, 24), A.T)
    return Dense(A, ramp, matrix(p.fbp, 12, 24))


def cnn_of_learn(x: Tensor, weights: Iterator[Tensor]) -> Tensor:
    """Three 5×5 convolutions, from their kernels and biases in order."""
    for k in range(3):
        x = F.conv2d(x, next(weights), next(weights), padding=2)
        x = x.relu() if k < 2 else x
    return x


def group_unet(x: Tensor, weights: dict[str, Tensor], depth: int) -> Tensor:
    """GroupUNet of ItNet's authors, in the order of its forward."""

    def level(x: Tensor, name: str) -> Tensor:
        for k in (0, 3):
            x = F.conv2d(x, weights[f"{name}.{k}.weight"], padding=1)
            groups = min(32, x.shape[1])
            x = F.group_norm(x, groups, weights[f"{name}.{k + 1}.weight"], weights[f"{name}.{k + 1}.bias"]).relu()
        return x

    encoded = [level(x, "down.0")]
    for k in range(1, depth + 1):
        encoded.append(level(F.max_pool2d(encoded[-1], 2), f"down.{k}"))
    x = encoded[depth]
    for k in range(depth):
        x = F.conv_transpose2d(x, weights[f"enlarge.{k}.weight"], weights[f"enlarge.{k}.bias"], stride=2)
        x = level(torch.cat([encoded[depth - 1 - k], x], dim=1), f"up.{k}")
    return F.conv2d(x, weights["last.weight"], weights["last.bias"])


def in_float64(name: str, projector: FanBeamProjector) -> tuple[UnrolledNetwork[Any], Tensor]:
    network = learned(name, copy.deepcopy(projector)).double()
    return network, network.projector(torch.rand(1, 1, 16, 16, dtype=torch.float64))


def test_itnet_is_the_published_loop(projector: FanBeamProjector) -> None:
    """With dense matrices, in float64: every image, and the memory."""
    network, y = in_float64("ItNet", projector)
    A, back, fbp = dense(network)
    weights = dict(network.unet.named_parameters())
    x, s = (fbp @ y.flatten()).view(1, 1, 16, 16), torch.zeros(1, 5, 16, 16, dtype=torch.float64)
    for state, step_size in zip(network.states(y), [*network.step_sizes, 0], strict=True):
        torch.testing.assert_close(state.x, x, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(state.memory, s, rtol=1e-9, atol=1e-11)
        out = group_unet(torch.cat([x, s], dim=1), weights, depth=2)
        x, s = x + out[:, :1], out[:, 1:]
        x = x - step_size * (back @ (A @ x.flatten() - y.flatten())).view(x.shape)


@pytest.mark.parametrize("data_term", ["fbp", "adjoint"])
def test_learn_pp_is_its_loop_in_two_domains(projector: FanBeamProjector, data_term: str) -> None:
    """With dense matrices, in float64: every image and every sinogram."""
    network, y = in_float64("LEARN++", projector)
    network.data_term = data_term
    A, back, fbp = dense(network)
    norm = network.projector.operator_norm()
    back = back if data_term == "fbp" else A.T / norm**2
    x, z = (fbp @ y.flatten()).view(1, 1, 16, 16), y  # here z has the units of y
    for t, state in enumerate(network.states(y)):
        torch.testing.assert_close(state.x, x, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(state.z * norm, z, rtol=1e-9, atol=1e-11)
        if t == network.n_iterations:
            break
        projected = (A @ x.flatten()).view(z.shape)
        descent = (back @ (projected - z).flatten()).view(x.shape)
        image = (x - network.step_sizes[t] * descent - cnn_of_learn(x, iter(network.of_images[t].parameters()))).relu()
        if t < network.n_iterations - 1:
            mu, nu = network.sinogram_steps[t]
            change = norm * cnn_of_learn(z / norm, iter(network.of_sinograms[t].parameters()))
            z = z - mu * (z - projected) - nu * (z - y) - change
        x = image


def test_shifted_windows_see_their_neighbours_and_nothing_across_the_border() -> None:
    """Of a layer on 8 × 8 pixels with windows of 4, shifted by 2: which pixels each pixel depends on."""
    torch.manual_seed(0)
    layer = WindowAttention(image_size=8, channels=2, n_heads=1, window_size=4, shift=2)
    x = torch.randn(1, 8, 8, 2, requires_grad=True)

    def seen_from(row: int, column: int) -> set[tuple[int, int]]:
        (gradient,) = torch.autograd.grad(layer(x)[0, row, column].sum(), x)
        return {(int(i), int(j)) for i, j in gradient[0].abs().sum(-1).nonzero()}

    assert seen_from(3, 4) == {(i, j) for i in range(2, 6) for j in range(2, 6)}
    assert seen_from(0, 0) == {(i, j) for i in range(2) for j in range(2)}
    assert seen_from(7, 3) == {(i, j) for i in (6, 7) for j in range(2, 6)}


def test_attention_is_that_of_torch_with_a_bias_of_relative_position() -> None:
    """One window against the plain formula."""
    torch.manual_seed(0)
    layer = WindowAttention(image_size=4, channels=6, n_heads=2, window_size=4, shift=2)
    x = torch.randn(1, 4, 4, 6)
    tokens = x.view(16, 6)
    q, k, v = (part.view(16, 2, 3).transpose(0, 1) for part in layer.to_qkv(tokens).split(6, dim=1))
    logits = q @ k.mT / 3**0.5
    for i in range(16):
        for j in range(16):
            down, right = i // 4 - j // 4 + 3, i % 4 - j % 4 + 3
            logits[:, i, j] += layer.position_bias[7 * down + right]
    expected = layer.project((logits.softmax(-1) @ v).transpose(0, 1).reshape(16, 6))
    torch.testing.assert_close(layer(x).view(16, 6), expected)


def test_an_unknown_data_term_is_refused(projector: FanBeamProjector) -> None:
    """It would be taken for the adjoint in silence."""
    with pytest.raises(ConfigError, match="choose fbp or adjoint"):
        LEARN(projector, data_term="fpb")  # type: ignore[arg-type]  # that is the point
