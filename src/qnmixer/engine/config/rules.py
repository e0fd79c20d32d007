"""The rules between sections of a config. Each says why two settings do not go together, and what to choose instead.

Rules inside a section are in its dataclass, and those of a network in its class. A rule may import the network and the
noise that the config names. So they are checked after the targets of a file are trusted.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from qnmixer.engine.config.sections import FSDPConfig, PipelineConfig, ProfileConfig, averages_weights
from qnmixer.errors import ConfigError

if TYPE_CHECKING:
    from qnmixer.engine.config.run import Config


def validate(run: "Config") -> None:
    """Check all of them. Raises ConfigError for the first that is broken."""
    run.data.check(run)
    one_scale(run)
    if message := next(_broken(run), None):
        raise ConfigError(message)


def one_scale(run: "Config") -> None:
    """Photon counts make sense only if all slices have the same scale of attenuation. Raises ConfigError."""
    if run.data.scaling == "minmax" and run.noise.load().needs_one_scale:
        raise ConfigError(
            f"noise={run.noise.name} needs the same attenuation scale in all slices: use data.scaling=attenuation, or "
            "noise=field"
        )


def _broken(run: "Config") -> Iterator[str]:
    """What to say of each rule that is broken."""
    size, model, trainer, strategy = run.data.image_size, run.model, run.trainer, run.strategy
    # Patches, windows or levels of a network divide the image: it would need padding, which none of them has.
    for key, part in model.divisors().items():
        if size % part:
            value = model.settings().get(key)
            needed = f"model.{key}={value}" if part == value else f"{part}, as model.{key}={value} needs"
            yield (
                f"data.image_size={size} is not divisible by {needed}: "
                f"choose data.image_size={size - size % part or part} or another model.{key}"
            )
    if run.finetune is not None and run.resume is not None:
        yield "finetune= starts a new run from weights, resume= continues a run: give only one of them"
    # Schedules need the length of a run.
    if trainer.max_steps == -1 and trainer.max_epochs is None:
        yield "training would never end: give trainer.max_steps=… or trainer.max_epochs=…"
    debug = run.debug
    if isinstance(debug, ProfileConfig) and -1 < trainer.max_steps < debug.warm_up + debug.steps:
        yield f"nothing would be profiled: raise trainer.max_steps={trainer.max_steps}, or lower debug.warm_up"
    # The last step of an epoch would be smaller.
    limit, window = trainer.extra.get("limit_train_batches"), trainer.accumulate_grad_batches
    if isinstance(limit, int) and limit % window:
        yield f"trainer.limit_train_batches={limit} is no multiple of trainer.accumulate_grad_batches={window}"
    # All devices but one would be idle.
    if strategy.name == "single" and (trainer.devices or 1) * trainer.num_nodes > 1:
        yield (
            f"trainer.devices={trainer.devices or 1} with trainer.num_nodes={trainer.num_nodes} does not work with "
            "strategy=single: choose strategy=ddp, fsdp or pipeline"
        )
    # Without weights there are no gradients for several devices to share.
    if strategy.name != "single" and not model.has_weights:
        yield f"model={model.name} has no weights to train on several devices: use strategy=single"
    # It takes means over rows and columns of a weight.
    if isinstance(strategy, FSDPConfig) and run.optimizer.name == "adafactor":
        yield "optimizer=adafactor does not work with sharded weights: choose optimizer=adamw or strategy=ddp"
    # It copies all weights.
    if averages_weights(run.callbacks) and strategy.planned_as != "replica":
        yield f"callbacks=ema does not work with strategy={strategy.name}: use strategy=single or strategy=ddp"
    if isinstance(strategy, PipelineConfig):
        yield from _broken_by_pipeline(run, strategy)


def _broken_by_pipeline(run: "Config", strategy: PipelineConfig) -> Iterator[str]:
    """The stages of a pipeline are iterations, of which each device needs one, with micro-batches for all of them."""
    T = run.model.T
    if not run.model.is_unrolled:
        yield (
            f"strategy=pipeline cuts iterations into stages, but model={run.model.name} has {T}: use strategy=ddp or "
            "fsdp"
        )
    if run.trainer.devices is None:  # the rest is checked when the devices are counted
        return
    devices, size, batch = strategy.devices_per_replica(run.trainer), strategy.microbatch_size, run.data.batch_size
    n, rest = divmod(batch * devices, size)
    if devices == 1:
        yield "strategy=pipeline needs at least two devices: give trainer.devices=…, or strategy=single"
    if run.trainer.devices % devices:
        yield f"strategy.devices_per_pipeline={devices} does not divide trainer.devices={run.trainer.devices}"
    if devices > T:
        yield f"{devices} stages are more than model.n_iterations={T}: lower strategy.devices_per_pipeline"
    if rest or (strategy.schedule == "1f1b" and n < devices):
        yield (
            f"strategy.schedule={strategy.schedule} cannot cut data.batch_size={batch} × {devices} devices by "
            f"strategy.microbatch_size={size}: choose data.batch_size={size}"
        )
