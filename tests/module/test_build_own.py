"""A loss, an optimizer and a schedule of the user's own, and messages about those that do not fit."""

import types

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qnmixer.errors import PluginError
from qnmixer.measurement.build import build_noise
from qnmixer.module.build import build_module
from qnmixer.module.parts import learning_rate_factor
from qnmixer.physics import KeyedNoise

from ..conftest import tiny_config


def detached(image: Tensor, truth: Tensor) -> Tensor:
    return (image.detach() - truth).square().mean((1, 2, 3))


class Learning(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, width, 3, padding=1)

    def forward(self, image: Tensor, truth: Tensor) -> Tensor:
        return (self.layer(image) - self.layer(truth)).abs().mean((1, 2, 3))


def of_step(step: int) -> float:
    return 1.0


def nothing(step: int, n_steps: int) -> None:
    return None


class Short(KeyedNoise):
    def sample(self, p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return p[0]


def chosen(group: str, target: str, *words: str) -> list[str]:
    return [f"{group}=custom", f"{group}._target_={target}", *words]


def test_a_module_is_no_part_of_the_network() -> None:
    config = tiny_config(*chosen("loss", f"{__name__}.Learning", "+loss.width=2"))
    module = build_module(config)
    assert all(name.startswith("network.") for name in module.state_dict())
    image = torch.rand(3, 1, 8, 8, requires_grad=True)
    value = module.loss(image, torch.zeros(3, 1, 8, 8))
    assert value.shape == (3,)
    value.sum().backward()  # reaches the image, and not the module's own weights
    assert image.grad.abs().sum() > 0
    assert module.loss(image.to("meta"), torch.zeros(3, 1, 8, 8, device="meta")).device.type == "meta"  # it follows


@pytest.mark.parametrize(("words", "message"), [
    (["loss", "tests.own.huber"], r"needs an argument delta: give it as \+loss\.delta=VALUE"),
    (["loss", "tests.own.huber", "+loss.image=1"], r"unknown key loss\.image: .* has delta"),
    (["optimizer", "torch.optim.NAdam", "+optimizer.beta=0.1"], r"did you mean optimizer\.betas\?"),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        tiny_config(*chosen(*words))


@pytest.mark.parametrize(("target", "message"), [
    ("torch.nn.GaussianNLLLoss", r"fails for images \[2, 1, 16, 16\] \(.*missing 1 required .* 'var'\)"),
    ("torch.nn.NLLLoss", r"fails for images \[2, 1, 16, 16\] \("),
    ("torch.nn.MSELoss", r"gives a tensor \[\] for a batch of 2: it must give \[B\]"),
    (f"{__name__}.detached", "gives no gradient: compute it from the image with torch"),
])  # fmt: skip
def test_a_loss_that_takes_no_two_images_is_one_line(target: str, message: str) -> None:
    config = tiny_config(*chosen("loss", target))
    with pytest.raises(PluginError, match=rf"^loss\._target_={target} {message}") as error:
        build_module(config)
    assert len(str(error.value).splitlines()) == 1


def test_results_that_do_not_fit() -> None:
    for name, why in {"nothing": "NoneType", "of_step": "takes 1 positional argument"}.items():
        schedule = tiny_config(*chosen("schedule", f"{__name__}.{name}"), "schedule.warmup=0.5").schedule
        with pytest.raises(PluginError, match=rf"{name} fails at step 5 \(.*{why}.*must take \(step, n_steps\)"):
            learning_rate_factor(schedule, 10)  # before the first step, though the warm-up does not call it
    noise = build_noise(tiny_config(*chosen("noise", f"{__name__}.Short")))
    with pytest.raises(PluginError, match=r"Short\.sample gives \[8, 24\] for a sinogram \[1, 8, 24\]"):
        noise(torch.zeros(1, 1, 8, 24), [(1,)])


def test_a_schedule_is_a_function_of_the_step() -> None:
    words = chosen("schedule", "tests.own.triangle", "+schedule.peak=0.25", "schedule.warmup=0.2")
    factor = learning_rate_factor(tiny_config(*words).schedule, 10)
    assert isinstance(factor, types.FunctionType)  # or LambdaLR would write its attributes into checkpoints
    assert [factor(step) for step in (0, 1, 2, 4, 10)] == pytest.approx([1 / 3, 2 / 3, 0.8, 0.8, 0])
