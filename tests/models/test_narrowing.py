from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qnmixer.models import inception, narrowing
from qnmixer.models.inception import InceptionPatches
from qnmixer.models.narrowing import Narrowing, narrowing_of
from qnmixer.models.shared_weights import SharedWeights


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The number of features of each branch that was looked at; None for one that was left as it is."""
    found: list[int | None] = []

    def spy(*arguments: Any) -> Narrowing | None:
        result = narrowing_of(*arguments)
        found.append(None if result is None else len(result.pixel))
        return result

    monkeypatch.setattr(narrowing, "_FEWEST", 1)
    monkeypatch.setattr(inception, "narrowing_of", spy)
    return found


def embedding(channels: int = 64) -> InceptionPatches:
    torch.manual_seed(0)
    return InceptionPatches(channels, patch_size=4).double()


def image(low: float = -0.1, high: float = 1.1) -> Tensor:
    return (low + (high - low) * torch.rand(2, 1, 16, 24, dtype=torch.float64)).requires_grad_()


def with_gradients(net: InceptionPatches, x: Tensor) -> list[Tensor]:
    y = net(x)
    return [y, *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), [x, *net.parameters()])]


def in_full(net: InceptionPatches, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(narrowing, "_FEWEST", 10**9)
        return with_gradients(net, x)


@pytest.mark.parametrize("low", [-0.8, -0.1, 0.4])
def test_a_narrow_branch_has_the_result_and_the_gradients_of_all_its_features(
    widths: list[int | None], monkeypatch: pytest.MonkeyPatch, low: float
) -> None:
    net, x = embedding(), image(low, low + 1.2)
    found = with_gradients(net, x)
    assert all(width is not None and 2 < width < 16 for width in widths)  # some bend, others are linear or zero
    for a, b in zip(found, in_full(net, x, monkeypatch), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_iterations_of_a_pass_share_narrowings(widths: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    net = embedding()
    images = [image(low, high) for low, high in ((-0.3, 1.2), (-0.28, 1.19), (-0.1, 1.0), (-0.29, 1.21), (0.4, 0.5))]
    images.append(torch.full_like(images[0], 0.3).requires_grad_())

    def gradients(share: bool) -> list[Tensor]:
        weights = SharedWeights([net] if share else [])
        total = torch.zeros((), dtype=torch.float64)
        for x in images:
            with weights.in_use():
                y = net(x)
            total = total + (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
        return [total, *torch.autograd.grad(total, [*images, *net.parameters()])]

    with monkeypatch.context() as patch:
        patch.setattr(narrowing, "_find", spy := Mock(wraps=narrowing._find))
        shared = gradients(True)
        n_shared, of_shared = spy.call_count, widths[:]
        widths.clear()
        gradients(False)
        assert spy.call_count - n_shared == 4 * len(images)  # outside a pass, each call looks for itself
    assert of_shared == widths  # a shared narrowing has no more features than one of its own
    assert n_shared < 4 * (len(images) - 1)
    monkeypatch.setattr(narrowing, "_FEWEST", 10**9)
    for a, b in zip(shared, gradients(True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_an_image_of_one_value_has_its_gradient(widths: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = embedding(), torch.full((1, 1, 8, 8), 0.3, dtype=torch.float64, requires_grad=True)
    found = with_gradients(net, x)
    assert widths == [2] * 4  # nothing bends
    assert found[1].abs().min() > 0
    for a, b in zip(found, in_full(net, x, monkeypatch), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_value_that_is_not_a_number_is_not_lost(widths: list[int | None]) -> None:
    net, x = embedding(), image().detach()
    with torch.no_grad():
        net.branches[1].pixel.weight[3] = float("nan")
    assert net(x).isnan().all()
    assert None not in widths  # the branch is narrow, and keeps that feature
    x[0, 0, 0, 0] = float("nan")
    widths.clear()
    assert embedding()(x).isnan().any()
    assert widths == []  # no branch was looked at


def test_an_infinite_weight_is_not_lost_and_does_not_warn(widths: list[int | None]) -> None:
    net, x = embedding(), image(low=0.0).detach()
    x[0, 0, 0, 0] = 0.0  # ∞ · 0
    with torch.no_grad():
        net.branches[1].pixel.weight[3] = float("inf")
    assert not net(x).isfinite().all()
    assert None not in widths


def test_an_infinite_gradient_does_not_warn(widths: list[int | None]) -> None:
    net = embedding()
    with torch.no_grad():
        for branch in net.branches:
            branch.patchify.weight.abs_()  # so that no ∞ − ∞ is NaN, which never warns
    y = net(image())
    y.backward(torch.full_like(y, float("inf")))
    assert not net.branches[0].pixel.weight.grad.isfinite().all()
    assert None not in widths


def test_all_features_are_computed_where_values_must_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("it looked at values")

    monkeypatch.setattr(narrowing, "_FEWEST", 1)
    monkeypatch.setattr(narrowing, "_find", refuse)
    net, x = embedding().float(), image().detach().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(x)
    torch.compile(net, backend="eager")(x)
    with FakeTensorMode():  # the plan
        InceptionPatches(64, 4)(torch.rand(2, 1, 16, 24))
    with pytest.raises(AssertionError, match="it looked"):
        net(x)


def test_few_pixels_are_not_worth_it(widths: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrowing, "_FEWEST", 2 * 16 * 24 * 16)
    embedding()(image())
    embedding()(image()[:1])
    assert len(widths) == 4
    assert None not in widths
