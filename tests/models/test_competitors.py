"""What the papers say of networks that QN-Mixer is compared with, in plain words."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qnmixer.models import LearnedPrimalDual, UnrolledNetwork
from qnmixer.models.regformer import WindowAttention
from qnmixer.physics import FanBeamProjector

from .conftest import in_float64


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


def dense(network: UnrolledNetwork[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """A, A† and FBP as matrices."""
    p = network.projector
    A = matrix(p, 16, 16)
    torch.testing.assert_close(matrix(p.adjoint, 12, 24), A.T)
    return A, matrix(p.filtered_adjoint, 12, 24), matrix(p.fbp, 12, 24)


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


def example(name: str, projector: FanBeamProjector) -> tuple[UnrolledNetwork[Any], Tensor]:
    network = in_float64(name, projector)
    return network, network.projector(torch.rand(1, 1, 16, 16, dtype=torch.float64))


def test_itnet_is_the_published_loop(projector: FanBeamProjector) -> None:
    """With dense matrices, in float64: every image, and the memory."""
    network, y = example("ItNet", projector)
    A, back, fbp = dense(network)
    weights = dict(network.unet.named_parameters())
    x, s = (fbp @ y.flatten()).view(1, 1, 16, 16), torch.zeros(1, 5, 16, 16, dtype=torch.float64)
    for state, step_size in zip(network.states(y), [*network.step_sizes, 0], strict=True):
        torch.testing.assert_close(state.x, x, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(state.memory, s, rtol=1e-9, atol=1e-11)
        out = group_unet(torch.cat([x, s], dim=1), weights, depth=2)
        x, s = x + out[:, :1], out[:, 1:]
        x = x - step_size * (back @ (A @ x.flatten() - y.flatten())).view(x.shape)


def test_learn_pp_is_its_loop_in_two_domains(projector: FanBeamProjector) -> None:
    """With dense matrices, in float64: every image and every sinogram."""
    network, y = example("LEARN++", projector)
    A, back, fbp = dense(network)
    norm = network.projector.operator_norm()
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
