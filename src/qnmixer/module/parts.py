"""What a module is made of, from a config: loss, optimizer, schedule and metrics."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qnmixer.errors import ConfigError, PluginError, first_line
from qnmixer.evaluation.metrics import build_metrics, one_for_each, try_loss
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.settings.parts import LossConfig, OptimizerConfig, ScheduleConfig
from qnmixer.settings.run import Config


def parts_of(config: Config) -> dict[str, Any]:
    """What a module gets beside its network: loss, optimizer, schedule and metrics, by the names of its arguments.

    Raises PluginError for a part that does not fit, such as a loss that fails for two images.
    """
    loss = build_loss(config.loss)
    try_loss(config.loss.as_typed, loss, config.data.image_size)
    if config.model.has_weights:
        check_gradient(config.loss, loss, config.data.image_size)
    return {
        "loss": loss,
        "optimizer": partial(build_optimizer, config.optimizer),
        "schedule": partial(learning_rate_factor, config.schedule),
        "metrics": build_metrics(config.metrics, config.data.own_range),
    }


def build_loss(config: LossConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Build the loss that `loss` names: [B] from image and truth, both [B, 1, H, W], with a check of its output.

    A loss that is a torch module is no child of the Lightning module, so `state_dict` does not contain it. It follows
    the images to their device. It is not trained.
    """
    loss = config.build() if config.is_class else config.bound()
    if isinstance(loss, nn.Module):
        loss.requires_grad_(False).eval()

    def checked_loss(image: Tensor, truth: Tensor) -> Tensor:
        value = (loss.to(image.device) if isinstance(loss, nn.Module) else loss)(image, truth)
        return one_for_each(config.as_typed, value, image)

    return checked_loss


def check_gradient(config: LossConfig, loss: Callable[[Tensor, Tensor], Tensor], size: int) -> None:
    """Raise PluginError for a loss without a gradient with respect to the image, which nothing can learn from."""
    image = torch.linspace(0, 1, 2 * size**2, device="cpu").reshape(2, 1, size, size)
    with torch.enable_grad():
        value = loss(image.requires_grad_(), image.detach().sqrt())
    if not value.requires_grad:
        remedy = "compute it from the image with torch, without detach()"
        raise PluginError(f"{config.as_typed} gives no gradient: {remedy}")


def build_optimizer(config: OptimizerConfig, network: UnrolledNetwork[Any]) -> Optimizer:
    """Build the optimizer that `optimizer` names. Raises PluginError for a target that does not fit.

    Weights have weight decay. Biases, norms and the network's `step_scalars` have none. The learning rate of these
    scalars is lr · step_size_lr_factor. An optimizer class with `takes_hidden_weights`, such as Muon, gets the
    network's `hidden_weights` as a group of their own, with lr. Then adamw_lr takes its place for all others.
    """
    lr = config.arguments.get("adamw_lr", config.lr)
    hidden_weights = network.hidden_weights() if getattr(config.load(), "takes_hidden_weights", False) else []
    if any(parameter.ndim < 2 for parameter in hidden_weights):
        raise ConfigError(f"optimizer=muon takes no vectors: let {type(network).__name__}.hidden_weights() return none")
    hidden_ids, scalar_ids = set(map(id, hidden_weights)), set(map(id, network.step_scalars()))
    step_sizes = [p for p in network.parameters() if id(p) in scalar_ids - hidden_ids]
    others = [p for p in network.parameters() if id(p) not in scalar_ids | hidden_ids]
    # This order is part of the checkpoint format: an optimizer state names its parameters by number only.
    groups: list[dict[str, Any]] = [
        {"params": hidden_weights, "weight_decay": config.weight_decay, "orthogonal": True},
        {"params": [p for p in others if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        {"params": step_sizes, "weight_decay": 0.0, "lr": lr * config.step_size_lr_factor},
    ]
    return config.build([group for group in groups if group["params"]], lr=config.lr)


def learning_rate_factor(config: ScheduleConfig, n_steps: int) -> Callable[[int], float]:
    """The function from an optimizer step to the factor on the learning rate. n_steps is the length of the run.

    Raises PluginError for a schedule that does not fit.
    """
    n_warmup = round(config.warmup * n_steps)
    schedule = config.bound({"n_warmup": n_warmup})

    def factor(step: int) -> float:  # no object: LambdaLR writes an object's attributes into checkpoints
        if step < n_warmup:
            return (step + 1) / (n_warmup + 1)
        try:
            number = float(schedule(step, n_steps))
        except (TypeError, ValueError) as error:
            why = f"fails at step {step} ({first_line(error)})"
            raise PluginError(f"{config.as_typed} {why}: it must take (step, n_steps) and give a number") from error
        if not math.isfinite(number):
            raise PluginError(f"{config.as_typed} gives {number} at step {step}: it must give a finite number")
        return number

    factor(n_warmup)  # so that a function that does not fit ends the run before its first step
    return factor
