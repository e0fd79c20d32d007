from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from qnmixer.models.shared_weights import DerivingModule, SharedWeights, is_shared_weight


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def network() -> nn.Sequential:
    """With a weight that needs no gradient, one that no iteration uses, and one whose gradient is that of its use."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    layers[0].bias.requires_grad_(False)
    layers.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    layers.register_parameter("added", nn.Parameter(torch.zeros(4, 3, dtype=torch.float64)))
    return layers


def passed(layers: nn.Sequential, x: Tensor, T: int, shared: SharedWeights) -> Tensor:
    for _ in range(T):
        with shared.in_use():
            x = layers(x) + layers.added
    return x


def gradients(layers: nn.Sequential, x: Tensor, T: int, share: bool) -> list[Tensor | None]:
    layers.zero_grad()
    passed(layers, x, T, SharedWeights([layers] if share else [])).square().sum().backward()
    return [p.grad for p in layers.parameters()]


def test_gradients_are_those_of_autograd() -> None:
    layers, x = network(), torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    for T in (1, 2, 5):
        for found, wanted in zip(gradients(layers, x, T, True), gradients(layers, x, T, False), strict=True):
            assert (found is None) == (wanted is None)
            if found is not None:
                torch.testing.assert_close(found, wanted)


def test_one_addition_an_iteration_and_one_gradient_for_hooks() -> None:
    layers, x = network(), torch.ones(4, 3, dtype=torch.float64)
    hooks: Counter[str] = Counter()
    for name, p in layers.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, name=name: hooks.update([name]))
    with Operators() as operators:
        gradients(layers, x, 5, share=True)
    assert operators.names["aten._foreach_add"] == 1
    assert operators.names["aten._foreach_add_"] == 3  # in place: these sums are no other tensors
    assert set(hooks.values()) == {1}


def test_backward_may_be_run_again_and_for_some_weights_only() -> None:
    layers, x = network(), torch.ones(4, 3, dtype=torch.float64)
    gradients(layers, x, 3, share=False)
    wanted = layers[0].weight.grad
    loss = passed(layers, x, 3, SharedWeights([layers])).square().sum()
    for leaves in ([layers[0].weight], [layers.added, layers[0].weight], [layers[0].weight]):
        found = torch.autograd.grad(loss, leaves, retain_graph=True)[-1]
        torch.testing.assert_close(found, wanted)


def test_weights_are_in_their_places_afterwards() -> None:
    layers, x = network(), torch.ones(4, 3, dtype=torch.float64)
    before = dict(layers.named_parameters())
    shared = SharedWeights([layers])
    with shared.in_use():
        assert is_shared_weight(layers[0].weight)
        assert layers[0].weight.data_ptr() == before["0.weight"].data_ptr()
    assert all(p is before[name] for name, p in layers.named_parameters())
    assert not any(map(is_shared_weight, before.values()))
    with torch.no_grad(), SharedWeights([layers]).in_use():
        assert layers[0].weight is before["0.weight"]
    assert not passed(layers, x, 2, SharedWeights([])).isnan().any()


def test_a_gradient_of_the_first_iteration_is_not_overwritten() -> None:
    """It may be the gradient of another tensor too."""
    weight = nn.ParameterList([torch.ones(3)])
    shared = SharedWeights([weight])
    x, uses = torch.zeros(3, requires_grad=True), []
    for _ in range(3):
        with shared.in_use():
            uses.append(weight[0] + x)  # one gradient for both
    torch.stack(uses).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3
    assert weight[0].grad is not None
    assert weight[0].grad.tolist() == [3.0] * 3


def test_a_weight_that_only_some_iterations_use() -> None:
    layers = nn.ParameterList([torch.ones(2), torch.ones(2)])
    shared = SharedWeights([layers])
    uses = []
    for k in (0, 1, 1, 0):
        with shared.in_use():
            uses.append(layers[k] * (k + 1.0))
    torch.stack(uses).sum().backward()
    assert [p.grad.tolist() for p in layers if p.grad is not None] == [[2.0] * 2, [4.0] * 2]


class Scaled(DerivingModule):
    """Multiplies by weights that are derived from `left`, `right` and, every second time, from `right` and `bias`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.left = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
        self.right = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.calls: Counter[str] = Counter()

    def product(self, left: Tensor, right: Tensor) -> list[Tensor]:
        self.calls["product"] += 1
        return [(left @ right).tanh()]

    def shift(self, right: Tensor, bias: Tensor) -> list[Tensor]:
        self.calls["shift"] += 1
        return [right.sum(0) * bias, bias.exp(), right]  # one with the storage of a weight

    def forward(self, x: Tensor, k: int) -> Tensor:
        derived = [self.derive("product", self.product, self.left, self.right)]
        if k % 2:
            derived.append(self.derive("shift", self.shift, self.right, self.bias))
        product, *others = self.used(derived)
        x = x @ product + self.bias
        return torch.tanh(x * others[0] + others[1] + others[2][0] if others else x)


def derived_gradients(module: Scaled, T: int, share: bool, reentrant: bool | None = None) -> list[Tensor | None]:
    """The loss and the gradients; each iteration in a checkpoint, unless reentrant is None."""
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
    image, weights = x, SharedWeights([module] if share else [])
    for k in range(T):

        def iteration(x: Tensor, end: Tensor, k: int = k) -> Tensor:
            with weights.ending_at(end).in_use():
                return module(x, k)

        if reentrant is None:
            image = iteration(image, weights.end)
        else:
            image = checkpoint(iteration, image, weights.end, use_reentrant=reentrant)
    loss = image.square().sum()
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("frozen", ["", "right", "bias", "left right", "left right bias"])
@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("T", [1, 2, 5])
def test_gradients_go_through_derived_weights(T: int, reentrant: bool | None, frozen: str) -> None:
    module = Scaled()
    for name in frozen.split():
        getattr(module, name).requires_grad_(False)
    found = derived_gradients(module, T, True, reentrant)
    for a, b in zip(found, derived_gradients(module, T, False), strict=True):
        torch.testing.assert_close(a, b)


def test_weights_are_derived_once_forward_and_once_backward() -> None:
    module = Scaled()
    derived_gradients(module, 5, True)
    assert module.calls == {"product": 2, "shift": 2}
    module.calls.clear()
    derived_gradients(module, 5, False)  # outside a pass the weights may change between two calls
    assert module.calls == {"product": 5, "shift": 2}
    module.calls.clear()
    with torch.inference_mode():
        weights = SharedWeights([module])
        for k in range(5):
            with weights.in_use():
                module(torch.ones(2, 3, dtype=torch.float64), k)
    assert module.calls == {"product": 1, "shift": 1}


def test_one_addition_an_iteration_for_derived_weights_too() -> None:
    with Operators() as operators:
        derived_gradients(Scaled(), 6, True)
    # Weights that are used directly, and derived ones: each for itself. Those of `shift` in three iterations only.
    assert operators.names["aten._foreach_add"] == 1 + 2
    assert operators.names["aten._foreach_add_"] == 4 + 4


def test_a_function_without_a_gradient_is_not_called_in_backward() -> None:
    module = Scaled()
    weights = SharedWeights([module])
    for k in range(2):
        with weights.in_use():
            image = module(torch.ones(2, 3, dtype=torch.float64), k)
            if k == 0:
                loss = image.sum()
    loss.backward()
    assert module.calls == {"product": 2, "shift": 1}


def test_two_passes_may_run_side_by_side() -> None:
    """As the micro-batches of a pipeline."""
    module = Scaled()
    wanted = derived_gradients(module, 4, True)
    images = [torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)] * 2
    passes = [SharedWeights([module]) for _ in images]
    for k in range(4):
        for i, weights in enumerate(passes):
            with weights.in_use():
                images[i] = module(images[i], k)
    module.zero_grad()
    for image in images:
        image.square().sum().backward()
    for p, gradient in zip(module.parameters(), wanted[2:], strict=True):
        assert gradient is not None
        torch.testing.assert_close(p.grad, 2 * gradient)


def test_a_weight_that_changes_before_backward_is_refused() -> None:
    module, x = Scaled(), torch.ones(2, 3, dtype=torch.float64)
    with SharedWeights([module]).in_use():
        (product,) = module.used([module.derive("product", module.product, module.left, module.right)])
    with torch.no_grad():
        module.left.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        (x @ product).sum().backward()


def test_backward_may_be_run_again_with_derived_weights() -> None:
    module, x = Scaled(), torch.ones(2, 3, dtype=torch.float64)
    weights = SharedWeights([module])
    for k in range(4):
        with weights.in_use():
            x = module(x, k)
    weights_of = [module.left, module.right, module.bias]
    wanted = torch.autograd.grad(x.sum(), weights_of, retain_graph=True)
    for leaves in (weights_of[1:], weights_of[2:], weights_of):
        found = torch.autograd.grad(x.sum(), leaves, retain_graph=True)
        for a, b in zip(found, wanted[-len(leaves) :], strict=True):
            assert torch.equal(a, b)


def test_a_weight_that_autograd_knows_the_way_from_keeps_it() -> None:
    """As the whole weights of FSDP2."""
    module, x = Scaled(), torch.ones(2, 3, dtype=torch.float64)
    weights = SharedWeights([module])
    with weights.in_use():
        derived = module.derive("product", module.product, 2 * module.left, module.right)
        (product,) = module.used([derived])
    (x @ product).sum().backward()
    wanted = torch.autograd.functional.jacobian(
        lambda left, right: (x @ (2 * left @ right).tanh()).sum(), (module.left.detach(), module.right.detach())
    )
    torch.testing.assert_close([module.left.grad, module.right.grad], list(wanted))


def test_a_module_that_was_made_in_inference_mode_still_computes() -> None:
    with torch.inference_mode():
        module, x = Scaled(), torch.ones(2, 3, dtype=torch.float64)
        expected = module(x, 1)
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode, SharedWeights([module]).in_use():
            assert torch.equal(module(x, 1), expected)


def test_a_cache_lives_as_long_as_a_pass() -> None:
    module = DerivingModule()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            weights = SharedWeights([nn.Sequential(module)])
            with weights.in_use():
                assert module.cache() == {}
                module.cache()["found"] = 1
            # As in backward, if iterations are recomputed.
            with suppress(RuntimeError), weights.ending_at(torch.empty(0)).in_use():
                assert module.cache() == {"found": 1}
                raise RuntimeError
            module.cache()["found"] = 2
            assert module.cache() == {}
