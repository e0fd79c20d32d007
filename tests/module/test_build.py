"""Groups of an optimizer, curves of schedules, and losses, as the options of conf/ build them."""

from itertools import pairwise

import pytest
import torch

from qnmixer.module.parts import build_loss, build_optimizer, learning_rate_factor
from qnmixer.settings.parts import ScheduleConfig
from qnmixer.settings.run import section

from ..conftest import tiny_config, tiny_module

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor}


@pytest.mark.parametrize(
    ("name", "shared"), [("adamw", "true"), ("adamw", "false"), ("sgd", "true"), ("adafactor", "true")]
)
def test_groups_hold_each_weight_once(name: str, shared: str) -> None:
    module = tiny_module(
        f"optimizer={name}", "optimizer.lr=0.002", "optimizer.step_size_lr_factor=5", "optimizer.weight_decay=0.07",
        f"model.shared_step_size={shared}",
    )  # fmt: skip
    optimizer = build_optimizer(module.config.optimizer, module.network)
    assert type(optimizer) is OPTIMIZERS[name]
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, module.network.parameters()))
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for parameter_name, parameter in module.network.named_parameters():
        group = group_of[id(parameter)]
        is_step_size = parameter_name.startswith(("step_sizes.", "trust."))
        decays = parameter.ndim > 1
        assert group["lr"] == pytest.approx(0.01 if is_step_size else 0.002), parameter_name
        assert group["weight_decay"] == (0.07 if decays else 0.0), parameter_name
    assert any(name.endswith("bias") for name, _ in module.network.named_parameters())
    for scalars in ("step_sizes.", "trust."):
        assert any(name.startswith(scalars) for name, _ in module.network.named_parameters())


def curve(config: ScheduleConfig, n_steps: int) -> list[float]:
    factor = learning_rate_factor(config, n_steps)
    return [factor(step) for step in range(n_steps + 1)]


def test_cosine_warms_up_then_ends_at_zero() -> None:
    values = curve(section("schedule", "cosine", warmup=0.1), 100)
    assert values[:10] == pytest.approx([(k + 1) / 11 for k in range(10)])
    assert values[10] == 1.0
    assert values[55] == pytest.approx(0.5)
    assert values[100] == pytest.approx(0, abs=1e-12)
    assert all(a >= b for a, b in pairwise(values[10:]))
    assert learning_rate_factor(section("schedule", "cosine", warmup=0.1), 100)(130) == pytest.approx(0, abs=1e-12)


def test_the_other_schedules() -> None:
    assert curve(section("schedule", "step", at=0.8, factor=0.1), 50) == [1.0] * 40 + [0.1] * 11
    assert set(curve(section("schedule", "constant", warmup=0.0), 20)) == {1.0}
    warmed_up = curve(section("schedule", "constant", warmup=0.5), 8)
    assert warmed_up == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("name", ["mse", "l1", "ssim_mix"])
def test_losses_are_of_each_image_by_itself(name: str) -> None:
    loss = build_loss(tiny_config(f"loss={name}").loss)
    image, truth = torch.rand(2, 3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    together = loss(image, truth)
    assert together.shape == (3,)
    torch.testing.assert_close(together, torch.cat([loss(image[i : i + 1], truth[i : i + 1]) for i in range(3)]))
    expected = {"mse": torch.nn.functional.mse_loss, "l1": torch.nn.functional.l1_loss}.get(name)
    if expected:
        torch.testing.assert_close(together.mean(), expected(image, truth))
