"""The parts of a run from its config: LightningModule and LightningDataModule, loss, optimizer and schedule."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qnmixer.engine.config.run import Config
from qnmixer.engine.config.sections import PipelineConfig
from qnmixer.engine.config.targets import LossConfig, OptimizerConfig, ScheduleConfig
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.own import OwnDataModule
from qnmixer.engine.metrics import build_metrics, one_for_each, try_loss
from qnmixer.engine.reconstructor import (
    build_geometry,
    build_measurement,
    build_network,
    require_shapes,
    sample_measurement,
)
from qnmixer.engine.run_module import RunModule
from qnmixer.errors import ConfigError, PluginError, first_line
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.physics import FanBeamProjector


def build_module(config: Config, projector: FanBeamProjector | None = None) -> RunModule:
    """Build the LightningModule that `module` names, with network, loss, optimizer, schedule and metrics.

    Raises PluginError for a part that does not fit, such as a loss that fails for two images.
    """
    measurement, loss = build_measurement(config, projector), build_loss(config.loss)
    try_loss(config.loss.as_typed, loss, config.data.image_size)
    if config.model.has_weights:
        check_gradient(config.loss, loss, config.data.image_size)
    module: RunModule = config.module.build(
        network=build_network(config, measurement.projector),
        loss=loss,
        optimizer=partial(build_optimizer, config.optimizer),
        schedule=partial(learning_rate_factor, config.schedule),
        metrics=build_metrics(config.metrics, config.data.own_range),
    )
    if not module.automatic_optimization and isinstance(config.strategy, PipelineConfig):
        raise ConfigError(
            f"strategy=pipeline passes one loss back through its stages, but {type(module).__name__} optimizes by "
            "itself (automatic_optimization=False): choose strategy=single, ddp or fsdp"
        )
    require_shapes(module, config.module.as_typed)
    module.attach(config, config.plain(), measurement)
    return module


def build_data_module(config: Config, **options: Any) -> SliceDataModule | OwnDataModule:
    """Build the LightningDataModule that `datamodule` names. The loaders' workers simulate noisy sinograms.

    A LightningDataModule of another kind is wrapped.

    options: further arguments of `SliceDataModule`.
    """
    if not config.datamodule.is_of_slices:
        return build_own_data(config)
    measure, geometry = sample_measurement(config), build_geometry(config)
    data: SliceDataModule = config.datamodule.build(config.data, measure=measure, geometry=geometry, **options)
    return data


def build_own_data(config: Config, part: str = "test") -> OwnDataModule:
    """Build the LightningDataModule that `datamodule` names, if it is no SliceDataModule. `part`: to be evaluated.

    Raises ConfigError for a pipeline, whose devices need batches of one size, and for noise of measured sinograms.
    """
    datamodule = config.datamodule
    if config.noise.load().for_measured:
        raise ConfigError(f"noise={config.noise.name} does not reach batches of {datamodule.as_typed}: add it there")
    if isinstance(config.strategy, PipelineConfig):
        raise ConfigError(f"strategy=pipeline does not take {datamodule.as_typed}: choose strategy=single, ddp or fsdp")
    data_module = datamodule.build(supplied={key: getattr(config.data, key) for key in datamodule.supplied})
    return OwnDataModule(data_module, datamodule.target, config.data, build_geometry(config), part)


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
    step_sizes: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in network.parameters():
        if id(parameter) in hidden_ids:
            continue
        if id(parameter) in scalar_ids:
            step_sizes.append(parameter)
        else:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
    # This order is part of the checkpoint format: an optimizer state names its parameters by number only.
    groups: list[dict[str, Any]] = [
        {"params": hidden_weights, "weight_decay": config.weight_decay, "orthogonal": True},
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
        {"params": step_sizes, "weight_decay": 0.0, "lr": lr * config.step_size_lr_factor},
    ]
    optimizer: Optimizer = config.build([group for group in groups if group["params"]], lr=config.lr)
    return optimizer


def warm_up_steps(config: ScheduleConfig, n_steps: int) -> int:
    """The steps of the warm-up. n_steps is the length of the run."""
    return round(config.warmup * n_steps)


def learning_rate_factor(config: ScheduleConfig, n_steps: int) -> Callable[[int], float]:
    """The function from an optimizer step to the factor on the learning rate. n_steps is the length of the run.

    Raises PluginError for a schedule that does not fit.
    """
    n_warmup = warm_up_steps(config, n_steps)
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
