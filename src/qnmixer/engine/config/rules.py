"""The rules between sections of a config. Each says why two settings do not go together, and what to choose instead.

Rules inside a section are in its dataclass, and those of a network in its class. A rule may import the network and the
noise that the config names. So they are checked after the targets of a file are trusted.
"""

from typing import TYPE_CHECKING

from qnmixer.engine.config.named import averages_weights
from qnmixer.engine.config.sections import LONGEST_TAG, DDPConfig, FSDPConfig, PipelineConfig, ProfileConfig
from qnmixer.errors import ConfigError

if TYPE_CHECKING:
    from qnmixer.engine.config.run import Config


def validate(run: "Config") -> None:
    """Check all of them. Raises ConfigError for the first that is broken."""
    run.data.check(run)
    for rule in (
        image_size,
        one_scale,
        tags,
        weights_for_devices,
        number_of_devices,
        static_graph,
        whole_weights,
        stages,
        one_start,
        an_end,
        enough_to_profile,
    ):
        rule(run)


def image_size(run: "Config") -> None:
    """The patches, windows or levels of a network divide the image: it would need padding, which none of them has."""
    size, model = run.data.image_size, run.model
    for key, part in model.divisors().items():
        if size % part:
            value = model.settings().get(key)
            given = f"model.{key}={value}"
            needed = given if part == value else f"{part}, as {given} needs"
            raise ConfigError(
                f"data.image_size={size} is not divisible by {needed}: "
                f"choose data.image_size={size - size % part or part} or another model.{key}"
            )


def one_scale(run: "Config") -> None:
    """Photon counts make sense only if all slices have the same scale of attenuation."""
    if run.data.scaling == "minmax" and run.noise.load().needs_one_scale:
        raise ConfigError(
            f"noise={run.noise.name} needs the same attenuation scale in all slices: use data.scaling=attenuation, or "
            "noise=field"
        )


def tags(run: "Config") -> None:
    """W&B refuses longer tags, and would say so only when the run starts."""
    for tag in run.tags:
        if not 1 <= len(tag) <= LONGEST_TAG:
            raise ConfigError(
                f"the tag {tag[:20]!r} has {len(tag)} characters: give tags=[…] of 1 to {LONGEST_TAG} characters"
            )


def weights_for_devices(run: "Config") -> None:
    """Without weights there are no gradients for several devices to share."""
    if run.strategy.name != "single" and not run.model.has_weights:
        raise ConfigError(
            f"strategy={run.strategy.name} trains on several devices, but model={run.model.name} has no weights to "
            "train: use strategy=single"
        )


def number_of_devices(run: "Config") -> None:
    """strategy=single would leave all devices but one idle."""
    trainer = run.trainer
    if run.strategy.name == "single" and (trainer.devices not in (None, 1) or trainer.num_nodes > 1):
        several = trainer.num_nodes > 1
        given = f"trainer.num_nodes={trainer.num_nodes}" if several else f"trainer.devices={trainer.devices}"
        raise ConfigError(f"{given} does not work with strategy=single: choose strategy=ddp, fsdp or pipeline")


def static_graph(run: "Config") -> None:
    """torch's static graph allows one backward pass per step."""
    strategy = run.strategy
    if isinstance(strategy, DDPConfig) and strategy.static_graph and run.trainer.accumulate_grad_batches > 1:
        raise ConfigError(
            "strategy.static_graph=true does not work with trainer.accumulate_grad_batches above 1 (a limit of "
            "torch): set static_graph=false, or accumulate_grad_batches=1"
        )


def whole_weights(run: "Config") -> None:
    """Adafactor takes means over rows and columns of a weight, and ema copies weights: both need whole weights."""
    if isinstance(run.strategy, FSDPConfig) and run.optimizer.name == "adafactor":
        raise ConfigError(
            "optimizer=adafactor does not work with sharded weights (a limit of torch): choose optimizer=adamw or "
            "strategy=ddp"
        )
    if averages_weights(run.callbacks) and run.strategy.planned_as != "replica":
        raise ConfigError(
            f"callbacks=ema needs all weights on each device, but strategy={run.strategy.name} spreads them: use "
            "strategy=single or strategy=ddp"
        )


def stages(run: "Config") -> None:
    """The stages of a pipeline are iterations, of which each device needs one, with micro-batches for all of them."""
    strategy = run.strategy
    if not isinstance(strategy, PipelineConfig):
        return
    T = run.model.T
    if not run.model.is_unrolled:
        raise ConfigError(
            f"strategy=pipeline cuts the iterations of a network into stages, but model={run.model.name} has {T}: "
            "use strategy=ddp or fsdp"
        )
    if (strategy.schedule == "interleaved") != (strategy.stages_per_device > 1):
        raise ConfigError(
            f"strategy.schedule={strategy.schedule} does not work with strategy.stages_per_device="
            f"{strategy.stages_per_device}: interleaved takes 2 or more, every other schedule 1"
        )
    if strategy.cut is not None and (sum(strategy.cut) != T or min(strategy.cut, default=0) < 1):
        raise ConfigError(
            f"strategy.cut={strategy.cut} is wrong: each stage needs at least 1 iteration, and their sum must be "
            f"model.n_iterations={T}"
        )
    if run.trainer.devices is not None:  # else this is checked again when the devices are counted
        _check_devices(run, strategy, run.trainer.devices)


def _check_devices(run: "Config", strategy: PipelineConfig, n_devices: int) -> None:
    T, size, devices = run.model.T, strategy.microbatch_size, strategy.devices_per_replica(run.trainer)
    if devices == 1:
        raise ConfigError("strategy=pipeline needs at least two devices: give trainer.devices=…, or strategy=single")
    if n_devices % devices:
        raise ConfigError(
            f"strategy.devices_per_pipeline={devices} does not divide trainer.devices={n_devices}: "
            "a pipeline stays on one node"
        )
    stages = devices * strategy.stages_per_device
    if stages > T:
        raise ConfigError(
            f"{stages} stages are more than model.n_iterations={T}: lower strategy.devices_per_pipeline or "
            "strategy.stages_per_device, or raise model.n_iterations"
        )
    if strategy.cut is not None and len(strategy.cut) != stages:
        raise ConfigError(f"strategy.cut={strategy.cut} has {len(strategy.cut)} stages, but the devices have {stages}")
    n, rest = divmod(run.data.batch_size * devices, size)
    if rest:
        raise ConfigError(
            f"the batch of a pipeline, data.batch_size={run.data.batch_size} × {devices} devices, does not divide "
            f"into strategy.microbatch_size={size}: choose data.batch_size={size}"
        )
    if strategy.schedule == "1f1b" and n < devices:
        raise ConfigError(
            f"strategy.schedule=1f1b needs as many micro-batches as devices, {devices}, and has {n}: "
            f"set data.batch_size={size} or strategy.microbatch_size={run.data.batch_size}"
        )
    if strategy.schedule == "interleaved" and n % max(1, n // devices):
        raise ConfigError(
            f"strategy.schedule=interleaved takes micro-batches in equal rounds of at least {devices}, not {n}: "
            f"make data.batch_size={run.data.batch_size} a multiple of strategy.microbatch_size={size}"
        )


def one_start(run: "Config") -> None:
    """A run starts from one set of weights."""
    if run.finetune is not None and run.resume is not None:
        raise ConfigError("finetune= starts a new run from weights, resume= continues a run: give only one of them")


def an_end(run: "Config") -> None:
    """Schedules need the length of a run."""
    if run.trainer.max_steps == -1 and run.trainer.max_epochs is None:
        raise ConfigError("training would never end: give trainer.max_steps=… or trainer.max_epochs=…")


def enough_to_profile(run: "Config") -> None:
    """A run that ends before the profiler begins gives no profile."""
    debug = run.debug
    if isinstance(debug, ProfileConfig) and -1 < run.trainer.max_steps < debug.warm_up + debug.steps:
        raise ConfigError(
            f"debug.warm_up={debug.warm_up} and debug.steps={debug.steps} are more steps than trainer.max_steps="
            f"{run.trainer.max_steps}, so nothing would be profiled: raise trainer.max_steps, or lower the two"
        )
