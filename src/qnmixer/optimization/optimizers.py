"""Optimizers by name."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from qnmixer.config import AdamWConfig, OptimizerConfig, SGDConfig


def build_optimizer(config: OptimizerConfig, network: nn.Module) -> Optimizer:
    """The optimizer that `optimizer` names.

    Weights decay; the scalars λ_t, β_t and τ_t, biases and norms do not. Those scalars learn at
    lr · step_size_lr_factor.
    """
    step_sizes: list[nn.Parameter] = []
    decaying: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if name.startswith(("step_sizes.", "momenta.", "trust.")):
            step_sizes.append(parameter)
        else:
            (decaying if parameter.ndim > 1 else plain).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
        {"params": step_sizes, "weight_decay": 0.0, "lr": config.lr * config.step_size_lr_factor},
    ]
    groups = [group for group in groups if group["params"]]
    if isinstance(config, AdamWConfig):
        return torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]))
    if isinstance(config, SGDConfig):
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.Adafactor(groups, lr=config.lr)
