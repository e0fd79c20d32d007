import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from qnmixer.models import QNMixer
from qnmixer.physics import FanBeamProjector

from .conftest import FIGURE


def small(projector: FanBeamProjector, *, awake: bool = True, **options: Any) -> QNMixer:
    """A small network of the figure; awake, its regularisers have left their zero start."""
    torch.manual_seed(0)
    network = QNMixer(projector, **{"n_iterations": 4, "channels": 8, **FIGURE, **options})
    if awake:
        for name, parameter in network.named_parameters():
            if name.endswith(("expansion.project", "expansion.expand.weight", "last.weight")):
                nn.init.normal_(parameter, std=0.02)
    return network


def published_loop(network: QNMixer, y: Tensor) -> list[Tensor]:
    """The loop as the paper draws it, for a batch of one, with a dense H updated at the end of each iteration."""
    T = network.n_iterations
    x = network.projector.fbp(y)
    iterates = [x]
    code = network.codec.encode(network.objective_gradient(0, x, y))
    r = code.flatten()
    H = torch.eye(len(r), dtype=r.dtype)
    for t in range(T):
        s = -H @ r
        x = x + network.codec.decode(s.view(code.shape))
        iterates.append(x)
        if t < T - 1:
            r_next = network.codec.encode(network.objective_gradient(t + 1, x, y)).flatten()
            z = r_next - r
            rho = 1 / (z @ s)
            left = torch.eye(len(r), dtype=r.dtype) - rho * torch.outer(s, z)
            H = left @ H @ left.T + rho * torch.outer(s, s)
            r = r_next
    return iterates


@pytest.mark.parametrize("shared", [True, False])
def test_equals_the_published_loop_with_a_dense_hessian(projector: FanBeamProjector, shared: bool) -> None:
    """Float64, step for step, on a run where the safeguard has nothing to do (asserted)."""
    network = small(copy.deepcopy(projector), shared_regularizer=shared).double()
    with torch.no_grad():
        for step_size in network.step_sizes:
            step_size.mul_(3.0)
        # A regulariser of nearly quadratic J keeps the curvature healthy: zᵀs well above the bound.
        for regularizer in network.regularizers:
            regularizer.forward = lambda x: 0.9 * x  # type: ignore[method-assign]  # G(x) = ∇ 0.45‖x‖²
    y = network.projector(torch.rand(1, 1, 16, 16, dtype=torch.float64))
    states = list(network.states(y))
    assert len(states[-1].pairs) == network.n_iterations - 1
    assert network.diagnostics(states[-1])["skipped_pairs"] == 0
    for state, expected in zip(states, published_loop(network, y), strict=True):
        torch.testing.assert_close(network.image(state), expected, rtol=1e-9, atol=1e-11)


def test_detach_changes_the_gradient_and_not_the_image(projector: FanBeamProjector) -> None:
    full, detached = small(projector), small(projector, hessian_gradient="detach")
    truth = torch.rand(1, 1, 16, 16)
    y = projector(truth)
    gradients = []
    for network in (full, detached):
        (network(y) - truth).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    assert torch.equal(full(y), detached(y))
    assert not torch.allclose(*gradients, rtol=1e-3)


def test_momentum_is_the_heavy_ball(projector: FanBeamProjector) -> None:
    """x_{t+1} = x_t − D(r_t) + β_t (x_t − x_{t−1}), with D linear; and from β = 0 it is first order."""
    network, first = small(projector, hessian="momentum"), small(projector, hessian="identity")
    y = projector(torch.rand(2, 1, 16, 16))
    torch.testing.assert_close(network.iterates(y), first.iterates(y))
    with torch.no_grad():
        for t, beta in enumerate(network.momenta):
            beta.fill_(0.3 + 0.2 * t)
    x = [network.projector.fbp(y)] * 2
    for t in range(network.n_iterations):
        beta = network.momenta[t - 1] if t else 0.0
        step = network.codec.decode(network.codec.encode(network.objective_gradient(t, x[-1], y)))
        x.append(x[-1] - step + beta * (x[-1] - x[-2]))
    torch.testing.assert_close(network.iterates(y), x[1:], rtol=1e-4, atol=1e-5)


def test_a_mix_of_all_gradients_can_be_momentum(projector: FanBeamProjector) -> None:
    """s_t = −r_t + β_t s_{t−1} is −Σ_k β_{k+1} … β_t r_k; and from α = 0 it is first order."""
    network, momentum, first = (small(projector, hessian=name) for name in ("gradients", "momentum", "identity"))
    y = projector(torch.rand(2, 1, 16, 16))
    torch.testing.assert_close(network.iterates(y), first.iterates(y))
    beta = torch.linspace(0.3, 0.7, len(momentum.momenta))
    with torch.no_grad():
        for t, (mix, parameter) in enumerate(zip(network.mixes, momentum.momenta, strict=True), start=1):
            parameter.fill_(beta[t - 1])
            mix.copy_(torch.stack([beta[k:t].prod() for k in range(t)]))
    torch.testing.assert_close(network.iterates(y), momentum.iterates(y), rtol=1e-4, atol=1e-5)


def test_trust_goes_from_first_order_to_bfgs(projector: FanBeamProjector) -> None:
    trusting, first, second = (
        small(projector, **options) for options in ({"learned_trust": True}, {"hessian": "identity"}, {})
    )
    y = projector(torch.rand(2, 1, 16, 16))
    torch.testing.assert_close(trusting.iterates(y), first.iterates(y))
    for t, tau in enumerate(trusting.trust, start=1):  # τ_t is that of iteration t
        tau.data.fill_(1.0)
        torch.testing.assert_close(trusting.iterates(y)[: t + 2], second.iterates(y)[: t + 2])


def test_the_second_input_of_the_details_is_the_data_step(projector: FanBeamProjector) -> None:
    options: dict[str, Any] = {"detail_channels": 6, "data_steps": 2, "shared_step_size": False}
    network = small(projector, **options)
    x, y = torch.rand(2, 1, 16, 16), projector(torch.rand(2, 1, 16, 16))
    u = x
    for step_size in network.step_sizes[1]:
        u = u - step_size * projector.filtered_adjoint(projector(u) - y)
    expected = network.details[1](torch.cat([x, x - u], 1), network.regularizers[0](x)) + x - u
    torch.testing.assert_close(network.objective_gradient(1, x, y), expected)


def test_a_nonnegative_image_leaves_the_iterations_alone(projector: FanBeamProjector) -> None:
    y = projector((torch.rand(2, 1, 16, 16) > 0.8).float())
    free = small(projector).iterates(y)
    assert min(x.min() for x in free) < 0
    start, *held = small(projector, nonnegative=True).iterates(y)
    assert torch.equal(start, projector.fbp(y))
    for image, x in zip(held, free[1:], strict=True):
        assert torch.equal(image, x.clamp_min(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_physics_hessian_and_image_in_float32(projector: FanBeamProjector, dtype: torch.dtype) -> None:
    network = small(projector)
    y = projector(torch.rand(1, 1, 16, 16))
    with torch.autocast("cpu", dtype=dtype):
        states = list(network.states(y))
        iterates = [network.image(state) for state in states]
        assert network.regularizers[0](iterates[0]).dtype == dtype
    assert all(x.dtype == torch.float32 for x in iterates)
    for leaf in tree_leaves(states[1:]):
        assert not isinstance(leaf, Tensor) or leaf.dtype == torch.float32
    torch.testing.assert_close(iterates[-1], network(y), rtol=0.05, atol=0.05)


def test_a_step_that_is_no_number_shows_in_the_image(projector: FanBeamProjector) -> None:
    """The safeguard of H must not hide it: the image would be that of the step before, and training go on."""
    network = small(projector)
    with torch.no_grad():
        network.regularizers[0].expansion.project[0] = torch.nan
    assert network(projector(torch.rand(1, 1, 16, 16))).isnan().all()


@pytest.mark.parametrize(("options", "letters"), [
    ({"hessian": "bfgs", "learned_trust": True}, {"lambda": 4, "tau": 3}),
    ({"hessian": "bfgs", "shared_step_size": True}, {"lambda": 1}),
    ({"hessian": "momentum"}, {"lambda": 4, "beta": 3}),
    ({"hessian": "gradients"}, {"lambda": 4, "alpha": 3}),
    ({"hessian": "identity"}, {"lambda": 4}),
])  # fmt: skip
def test_the_same_network_of_first_order(projector: FanBeamProjector, options: dict, letters: dict) -> None:
    network = small(projector, **{"shared_step_size": False, **options})
    assert {name: len(part) for name, part in network.scalars().items()} == letters
    with torch.no_grad():
        for scalar in network.step_scalars():
            scalar.add_(0.3)
    y = projector(torch.rand(1, 1, 16, 16))
    image, first_order = network(y), network.first_order()
    if options["hessian"] == "identity":
        assert first_order is None
        return
    state = network.start(y)
    for t in range(4):  # s_t = −r_t
        x = state.x - network.codec.decode(network.codec.encode(network.objective_gradient(t, state.x, y)))
        state = state._replace(x=x)
    torch.testing.assert_close(first_order(y), state.x, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(first_order(y), image)
    torch.testing.assert_close(network(y), image, rtol=0, atol=0)  # it is as it was
