"""The optimizer of a run, and its parameter groups."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from qnmixer.config.groups import OptimizerConfig
from qnmixer.errors import ConfigError
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.optimization.muon import Muon


def build_optimizer(config: OptimizerConfig, network: UnrolledNetwork[Any]) -> Optimizer:
    """Build the optimizer that `optimizer` names. Raises PluginError for a target that does not fit.

    Weights have weight decay. The scalars λ_t, β_t and τ_t, biases and norms have none. The learning rate of those
    scalars is lr · step_size_lr_factor. With Muon, lr is that of the network's `hidden_weights`, and adamw_lr takes its
    place for all others.
    """
    lr = config.arguments.get("adamw_lr", config.lr)
    hidden = _hidden_weights(network) if issubclass(config.load(), Muon) else []
    ours = set(map(id, hidden))
    step_sizes: list[nn.Parameter] = []
    decaying: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if id(parameter) in ours:
            continue
        if name.startswith(("step_sizes.", "momenta.", "trust.")):
            step_sizes.append(parameter)
        else:
            (decaying if parameter.ndim > 1 else plain).append(parameter)
    # This order is part of the checkpoint format: an optimizer state names its parameters by number only.
    groups: list[dict[str, Any]] = [
        {"params": hidden, "weight_decay": config.weight_decay, "orthogonal": True},
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
        {"params": step_sizes, "weight_decay": 0.0, "lr": lr * config.step_size_lr_factor},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer: Optimizer = config.build(groups, lr=config.lr)
    return optimizer


def _hidden_weights(network: UnrolledNetwork[Any]) -> list[nn.Parameter]:
    hidden = network.hidden_weights()
    if any(parameter.ndim < 2 for parameter in hidden):
        raise ConfigError(f"optimizer=muon takes no vectors: let {type(network).__name__}.hidden_weights() return none")
    return hidden
