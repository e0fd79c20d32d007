"""Optimizers by name."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from qnmixer.config import AdamWConfig, CustomOptimizerConfig, OptimizerConfig, SGDConfig
from qnmixer.errors import ConfigError
from qnmixer.plugins import make_plugin, subclass_of

_OPTIMIZER = subclass_of(Optimizer, "torch.optim.Optimizer")


def build_optimizer(config: OptimizerConfig, network: nn.Module) -> Optimizer:
    """The optimizer that `optimizer` names.

    Weights decay; the scalars λ_t, β_t and τ_t, biases and norms do not. Those scalars learn at
    lr · step_size_lr_factor. Raises PluginError for one of the user's own that does not fit.
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
    if isinstance(config, CustomOptimizerConfig):
        return make_plugin(
            "optimizer._target_", config._target_, _OPTIMIZER, groups, lr=config.lr, arguments=config.arguments
        )
    if config.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=config.lr)
    raise ConfigError(f"optimizer={config.name} has a schema, but nothing here builds it")
