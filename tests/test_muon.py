"""Muon: against float64 and singular values, against torch's AdamW, and which weight goes where."""

import copy

import pytest
import torch
from torch import Tensor, nn

from qnmixer.module.build import build_module
from qnmixer.module.parts import build_optimizer
from qnmixer.muon import Muon, orthogonalized

from .conftest import other_config

MODELS = ["qn_mixer", "learn", "learned_primal_dual", "learn_pp", "itnet model.channels=8"]
MODELS += ["regformer model.channels=6 model.window_size=4"]
SHAPES = [(16, 400), (64, 32), (32, 64), (8, 8), (8, 1)]


def with_singular_values(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix, and U, S and Vᵀ of it. The smallest value is a tenth of the largest."""
    u, _, vt = torch.linalg.svd(torch.randn(rows, columns, dtype=torch.float64), full_matrices=False)
    s = 7 * torch.linspace(1, 0.1, min(rows, columns), dtype=torch.float64)
    return u @ s.diag() @ vt, u, s, vt


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_singular_values_become_one(rows: int, columns: int) -> None:
    """Those of Jordan's polynomial, on the same singular vectors; in float32 too."""
    torch.manual_seed(0)
    matrix, u, s, vt = with_singular_values(rows, columns)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    assert 0.65 < s.min() <= s.max() < 1.25
    expected = u @ s.diag() @ vt
    other = with_singular_values(rows, columns)[0]  # in one batch with it
    for factor, dtype, error in ((1, torch.float64, 1e-12), (1, torch.float32, 1e-5), (1e-9, torch.float64, 1e-12)):
        step, _ = orthogonalized(torch.stack([factor * matrix, other]).to(dtype))
        torch.testing.assert_close(step, expected.to(dtype), rtol=0, atol=error)


def test_two_steps_of_a_kernel_are_those_of_its_matrix() -> None:
    torch.manual_seed(0)
    weight, *gradients = torch.randn(3, 6, 4, 3, 3, dtype=torch.float64)
    kernel = nn.Parameter(weight.clone(memory_format=torch.channels_last))
    optimizer = Muon([{"params": [kernel], "orthogonal": True, "weight_decay": 0.1}], lr=0.01, momentum=0.9)
    matrix, momentum = weight.flatten(1), torch.zeros(6, 36, dtype=torch.float64)
    for gradient in gradients:
        kernel.grad = gradient.clone(memory_format=torch.channels_last)
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradient.flatten(1)
        ahead = 0.9 * momentum + 0.1 * gradient.flatten(1)  # Nesterov
        matrix = (1 - 0.01 * 0.1) * matrix - 0.01 * 0.2 * 36**0.5 * orthogonalized(ahead[None])[0]
        torch.testing.assert_close(kernel.flatten(1), matrix, rtol=0, atol=1e-12)


def test_the_others_are_changed_by_adamw() -> None:
    """Muon for the first kernel, AdamW for the rest."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 1, 3))
    other = copy.deepcopy(network)
    first, *others = network.parameters()
    groups = [{"params": [first], "orthogonal": True}, {"params": others, "lr": 3e-3}]
    optimizer = Muon(groups, lr=0.01, betas=(0.8, 0.9))
    assert optimizer.step(lambda: 3.0) == 3.0
    adamw = torch.optim.AdamW([*other.parameters()][1:], lr=3e-3, betas=(0.8, 0.9), weight_decay=0.0, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.rand(2, 1, 8, 8)).square().mean().backward()
        optimizer.step()
        for p, q in zip(network.parameters(), other.parameters(), strict=True):
            assert p.grad is not None
            q.grad = p.grad.clone()
        adamw.step()
    changed, *equal = (torch.equal(p, q) for p, q in zip(network.parameters(), other.parameters(), strict=True))
    assert not changed
    assert all(equal)


def test_weights_of_one_shape_change_as_each_alone() -> None:
    """Two of one shape between others; and one without a gradient stays as it is."""
    torch.manual_seed(0)
    weights = [
        torch.randn(shape, dtype=torch.float64) for shape in ((6, 4, 3, 3), (4, 9), (6, 4, 3, 3), (9, 4), (4, 9))
    ]
    gradients = [torch.randn_like(weight) for weight in weights]

    def changed(indices: list[int]) -> list[Tensor]:
        parameters = [nn.Parameter(weights[k].clone()) for k in indices]
        optimizer = Muon([{"params": parameters, "orthogonal": True, "weight_decay": 0.1}], lr=0.01)
        for _ in range(3):
            for k, p in zip(indices, parameters, strict=True):
                p.grad = None if k == 4 else gradients[k]
            optimizer.step()
        return [p.detach() for p in parameters]

    together = changed([*range(5)])
    for k in range(5):
        torch.testing.assert_close(together[k], changed([k])[0], rtol=0, atol=1e-12)
    assert torch.equal(together[4], weights[4])


@pytest.mark.parametrize("model", MODELS)
def test_which_weights_go_where(model: str) -> None:
    """Inner matrices and kernels to Muon, in the network's order; nothing that starts at zero."""
    words = ["optimizer=muon", "optimizer.lr=0.01", "optimizer.adamw_lr=0.002", "optimizer.weight_decay=0.07"]
    network = build_module(other_config(*f"model={model}".split(), *words)).network
    hidden = network.hidden_weights()
    assert all(p.ndim > 1 and p.count_nonzero() for p in hidden)
    optimizer = build_optimizer(other_config(*words).optimizer, network)
    assert isinstance(optimizer, Muon)
    first, *others = optimizer.param_groups
    assert [*map(id, first["params"])] == [*map(id, hidden)]
    assert (first["orthogonal"], first["lr"], first["weight_decay"], first["momentum"]) == (True, 0.01, 0.07, 0.95)
    rates = {"step_sizes": 0.02, "trust": 0.02}
    of = {id(p): group for group in others for p in group["params"]}
    assert {*of, *map(id, hidden)} == {*map(id, network.parameters())}
    for name, p in network.named_parameters():
        if id(p) in of:
            group = of[id(p)]
            is_scalar = name.partition(".")[0] in rates
            assert (group["orthogonal"], group["lr"]) == (False, pytest.approx(0.02 if is_scalar else 0.002)), name
            assert group["weight_decay"] == (0.07 if p.ndim > 1 and not is_scalar else 0.0), name
