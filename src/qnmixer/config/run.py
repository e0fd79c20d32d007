"""The config of a training run, and all checks that it must pass before anything is started.

The values live in `conf/`; here are their types, their bounds and the rules between them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from qnmixer.config.callbacks import TARGET, parse_callbacks
from qnmixer.config.compose import CONF
from qnmixer.config.custom import Custom, keys_of, split_arguments
from qnmixer.config.data import DataConfig, MixedData
from qnmixer.config.debug import DebugConfig, ProfileConfig
from qnmixer.config.evaluation import EvaluationConfig, check_window
from qnmixer.config.geometry import GeometryConfig
from qnmixer.config.groups import GROUPS, SECTIONS
from qnmixer.config.keys import flat_keys, unknown_key
from qnmixer.config.logger import LoggerConfig
from qnmixer.config.loss import LossConfig
from qnmixer.config.memory import MemoryConfig
from qnmixer.config.model import LearnedConfig, ModelConfig, QNMixerConfig, UnrolledConfig, check_model
from qnmixer.config.noise import NoiseConfig, check_noise
from qnmixer.config.optimizer import AdamWConfig, OptimizerConfig
from qnmixer.config.option import check_bounds, number, one_of, suggest
from qnmixer.config.schedule import ScheduleConfig
from qnmixer.config.strategy import DDPConfig, FSDPConfig, PipelineConfig, StrategyConfig
from qnmixer.config.trainer import TrainerConfig, check_extra, gathered
from qnmixer.errors import ConfigError
from qnmixer.plugins import check_plugin

_ALWAYS_THERE = ("lightning.", "qnmixer.", "torch.")  # not looked for here, which would take seconds
MAX_SEED = 2**32 - 1
"""The largest that numpy takes."""


@dataclass(kw_only=True)
class RunConfig:
    """What stands at the root of the config."""

    seed: int = number(at_least=0, at_most=MAX_SEED)
    monitor: str = one_of("val/psnr", "val/ssim", "val/loss")
    finetune: str | None
    resume: str | None
    compile: bool
    test_after_training: bool
    tags: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Config(RunConfig):
    """One training run, checked."""

    geometry: GeometryConfig
    noise: NoiseConfig
    model: ModelConfig
    data: DataConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    memory: MemoryConfig
    strategy: StrategyConfig
    trainer: TrainerConfig
    logger: LoggerConfig
    evaluation: EvaluationConfig
    debug: DebugConfig
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name: _target_ and arguments


def parse(cfg: DictConfig | Mapping[str, Any]) -> Config:
    """Typed and checked config of a command, from a composed one or from what `to_plain` made of it.

    Raises ConfigError, naming the key and the mend.
    """
    config = parse_file(cfg)
    check_targets(targets_of(config))
    return config


def parse_file(cfg: DictConfig | Mapping[str, Any]) -> Config:
    """Config that a file holds, such as a checkpoint: no module that it names is looked for.

    Raises ConfigError, naming the key and the mend.
    """
    values = plain_values(cfg)
    if "trainer" in values:
        values["trainer"] = gathered(values["trainer"])
    callbacks = parse_callbacks(values.pop("callbacks", {}))
    root = {f.name for f in fields(RunConfig)}
    sections = {f.name for f in fields(Config)} - root - {"callbacks"}
    for key in sections - values.keys():
        raise ConfigError(f"the config has no {key}: pick one with {key}=…")
    parsed = {key: parse_section(key, schema_of(key, values[key]), values[key], values) for key in sorted(sections)}
    rest = parse_section("", RunConfig, {k: v for k, v in values.items() if k not in sections}, values)
    config = Config(**{key: getattr(rest, key) for key in root}, **parsed, callbacks=callbacks)
    validate(config)
    return config


def plain_values(cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Values of a composed config, resolved; plain ones as they are. Raises ConfigError for one that is missing."""
    if not isinstance(cfg, DictConfig):
        return {str(key): value for key, value in cfg.items()}
    try:
        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value: give one with {error.full_key}=…") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def schema_of(section: str, value: Any) -> type:
    """The dataclass of a section of the config; raises ConfigError for an option that does not exist."""
    if section in SECTIONS:
        return SECTIONS[section]
    name = str(value.get("name")) if isinstance(value, dict) else str(value)
    if name not in GROUPS[section]:
        raise ConfigError(f"{section}={name} is not known: {suggest(name, GROUPS[section])}")
    return GROUPS[section][name]


def parse_section(section: str, schema: type, value: Any, values: Mapping[str, Any]) -> Any:
    """A section of the config as its dataclass, types and bounds checked; raises ConfigError.

    Keys that a custom section does not know become its arguments. Text with ${…} stays text.
    """
    prefix = f"{section}." if section else ""
    arguments: dict[str, Any] = {}
    if issubclass(schema, Custom) and isinstance(value, Mapping):
        value, arguments = split_arguments(schema, value)
    try:
        typed = OmegaConf.merge(OmegaConf.structured(schema), _as_text(value))
        parsed = OmegaConf.to_object(typed)
    except ConfigKeyError as error:
        raise unknown_key(f"{prefix}{error.full_key}", list(flat_keys(values))) from error
    except MissingMandatoryValue as error:
        raise ConfigError(f"{prefix}{error.full_key} has no value: give one with {prefix}{error.full_key}=…") from error
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{prefix}{error.full_key or ''}: {reason}") from error
    check_bounds(prefix, parsed)
    if isinstance(parsed, MixedData):
        _check_mix(parsed)
    return replace(parsed, arguments=arguments) if isinstance(parsed, Custom) else parsed


def sources_of(data: DataConfig) -> dict[str, DataConfig]:
    """The sources of the slices, by their section of the config: data, or data.sources.NAME for each of a mix.

    The latter are as if each were alone, with the keys that all have in common. Raises ConfigError.
    """
    if not isinstance(data, MixedData):
        return {"data": data}
    common = {f.name: getattr(data, f.name) for f in fields(DataConfig) if f.name != "name"}
    kinds = [kind for kind, schema in GROUPS["data"].items() if schema is not MixedData]
    sources: dict[str, DataConfig] = {}
    for name, values in data.sources.items():
        key = f"data.sources.{name}"
        if (kind := values.get("name")) not in kinds:
            raise ConfigError(f"{key}.name={kind} is not known: {suggest(str(kind), kinds)}")
        for one in values.keys() & common.keys():
            raise ConfigError(f"{key}.{one} is the same for all sources: give it as data.{one}")
        own = {one: value for one, value in values.items() if one != "share"}
        source = parse_section(key, GROUPS["data"][kind], own, {"data": vars(data)})
        sources[key] = replace(source, **common)
        try:
            check_bounds("data.", sources[key])
        except ConfigError as error:
            raise ConfigError(f"{error} ({key}, name={kind})") from error
    return sources


def _check_mix(data: MixedData) -> None:
    for name, values in data.sources.items():
        share = values.get("share")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(f"data.sources.{name}.share={share} is no share: give a number from 0 to 1")
    total = sum(data.shares.values())
    if abs(total - 1) > 1e-6:
        each = ", ".join(f"{name} {share:g}" for name, share in data.shares.items()) or "none"
        raise ConfigError(f"the shares of data.sources ({each}) add up to {total:g}: have them add up to 1")
    if data.evaluate_on is not None and data.evaluate_on not in data.sources:
        raise ConfigError(f"data.evaluate_on={data.evaluate_on}: {suggest(data.evaluate_on, data.sources)}, or null")
    sources_of(data)


def _as_text(value: Any) -> Any:
    """Values that OmegaConf will not resolve: where there was a ${…} to resolve, `plain_values` has done it."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {key: _as_text(item) for key, item in value.items()}
    return [_as_text(item) for item in value] if isinstance(value, list) else value


def targets_of(config: Any) -> dict[str, str]:
    """Classes and functions of the user's own that a config names, by their keys."""
    sections = {f.name: getattr(config, f.name) for f in fields(config)}
    targets = {f"{key}._target_": it._target_ for key, it in sections.items() if isinstance(it, Custom)}
    model = sections.get("model")
    if isinstance(model, QNMixerConfig) and model.regularizer is not None:
        targets["model.regularizer"] = model.regularizer
    if isinstance(data := sections.get("data"), MixedData):
        targets |= {f"data.sources.{name}.{TARGET}": it[TARGET] for name, it in data.sources.items() if TARGET in it}
    callbacks = sections.get("callbacks") or {}
    return targets | {f"callbacks.{name}.{TARGET}": given[TARGET] for name, given in callbacks.items()}


def check_targets(targets: Mapping[str, str]) -> None:
    """Raise PluginError for the first target whose module is not found."""
    for key, target in targets.items():
        if not target.startswith(_ALWAYS_THERE):
            check_plugin(key, target)


def validate(config: Config) -> None:
    """The rules between keys. Raises ConfigError."""
    trainer = config.trainer
    check_extra(trainer)
    check_model(config.model, config.data.image_size)
    check_strategy(config)
    if config.finetune is not None and config.resume is not None:
        raise ConfigError("finetune takes the weights of a run, resume goes on with it: give one of them")
    if trainer.max_steps == -1 and trainer.max_epochs is None:
        raise ConfigError("training would never end: give trainer.max_steps=… or trainer.max_epochs=…")
    debug = config.debug
    if isinstance(debug, ProfileConfig) and -1 < trainer.max_steps < debug.warm_up + debug.steps:
        raise ConfigError(
            f"debug.warm_up={debug.warm_up} and debug.steps={debug.steps} are more steps than trainer.max_steps="
            f"{trainer.max_steps}: nothing would be profiled; raise trainer.max_steps or lower the two"
        )
    check_window("evaluation.window", config.evaluation.window)
    if isinstance(config.optimizer, AdamWConfig):
        betas = config.optimizer.betas
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"optimizer.betas={betas} is not two numbers from 0 to below 1: give [0.9,0.999]")
    check_noise(config.noise, config.data.scaling)


def check_strategy(config: Config) -> None:
    """The rules between strategy, trainer, batch and T. Raises ConfigError."""
    strategy, trainer = config.strategy, config.trainer
    if strategy.name != "single" and not isinstance(config.model, LearnedConfig):
        raise ConfigError(
            f"strategy={strategy.name} trains over several devices, and model={config.model.name} has no weights to "
            "train: use strategy=single"
        )
    if strategy.name == "single" and (trainer.devices not in (None, 1) or trainer.num_nodes > 1):
        given = (
            f"trainer.num_nodes={trainer.num_nodes}" if trainer.num_nodes > 1 else f"trainer.devices={trainer.devices}"
        )
        raise ConfigError(f"{given} and strategy=single do not go together: choose strategy=ddp, fsdp or pipeline")
    if isinstance(strategy, DDPConfig) and strategy.static_graph and trainer.accumulate_grad_batches > 1:
        raise ConfigError(
            "strategy.static_graph=true fails with trainer.accumulate_grad_batches above 1 (in torch): set one of them "
            "back"
        )
    if isinstance(strategy, FSDPConfig) and config.optimizer.name == "adafactor":
        raise ConfigError(
            "optimizer=adafactor does not work on weights in shards (in torch): choose optimizer=adamw or strategy=ddp"
        )
    if isinstance(strategy, PipelineConfig):
        _check_pipeline(config, strategy)


def _check_pipeline(config: Config, strategy: PipelineConfig) -> None:
    T, size = config.model.T, strategy.microbatch_size
    if not isinstance(config.model, UnrolledConfig):
        raise ConfigError(
            f"strategy=pipeline cuts the iterations of a network into stages, and model={config.model.name} has {T}: "
            "use strategy=ddp or fsdp"
        )
    if (strategy.schedule == "interleaved") != (strategy.stages_per_device > 1):
        raise ConfigError(
            f"strategy.schedule={strategy.schedule} does not go with strategy.stages_per_device="
            f"{strategy.stages_per_device}: interleaved takes 2 or more, every other schedule 1"
        )
    if strategy.cut is not None and (sum(strategy.cut) != T or min(strategy.cut, default=0) < 1):
        raise ConfigError(
            f"strategy.cut={strategy.cut} is not the iterations of each stage: they must be at least 1 and add up to "
            f"model.n_iterations={T}"
        )
    if config.trainer.devices is None:
        return  # the rest is checked when they have been counted
    devices = devices_per_replica(config)
    if devices == 1:
        raise ConfigError("strategy=pipeline needs at least two devices: give trainer.devices=…, or strategy=single")
    if config.trainer.devices % devices:
        raise ConfigError(
            f"strategy.devices_per_pipeline={devices} does not divide trainer.devices={config.trainer.devices}: "
            "a pipeline stays on one node"
        )
    stages = devices * strategy.stages_per_device
    if stages > T:
        raise ConfigError(
            f"{stages} stages are more than model.n_iterations={T}: lower strategy.devices_per_pipeline or "
            "strategy.stages_per_device, or raise model.n_iterations"
        )
    if strategy.cut is not None and len(strategy.cut) != stages:
        raise ConfigError(f"strategy.cut={strategy.cut} has {len(strategy.cut)} stages, the devices make {stages}")
    batch = batch_of_replica(config)
    if batch % size:
        raise ConfigError(
            f"the batch of a pipeline, data.batch_size={config.data.batch_size} × {devices} devices, does not divide "
            f"into strategy.microbatch_size={size}: choose data.batch_size={size}"
        )
    n = batch // size
    if strategy.schedule == "1f1b" and n < devices:
        raise ConfigError(
            f"strategy.schedule=1f1b needs as many micro-batches as devices, {devices}, and has {n}: "
            f"set data.batch_size={size} or strategy.microbatch_size={config.data.batch_size}"
        )
    if strategy.schedule == "interleaved" and n % max(1, n // devices):
        raise ConfigError(
            f"strategy.schedule=interleaved takes micro-batches in equal rounds of at least {devices}, not {n}: "
            f"make data.batch_size={config.data.batch_size} a multiple of strategy.microbatch_size={size}"
        )


def devices_per_replica(config: Config) -> int:
    """Devices that work on the same samples: those of a pipeline, or one."""
    if isinstance(config.strategy, PipelineConfig):
        return config.strategy.devices_per_pipeline or config.trainer.devices or 1
    return 1


def batch_of_replica(config: Config) -> int:
    """Samples that such devices get at once: data.batch_size counts for each device."""
    return config.data.batch_size * devices_per_replica(config)


def effective_batch(config: Config) -> int:
    """Samples of one optimizer step."""
    t = config.trainer
    return config.data.batch_size * (t.devices or 1) * t.num_nodes * t.accumulate_grad_batches


def with_iterations(config: Config, T: int) -> Config:
    """The same run with another T; of a network whose T is fixed, the run itself."""
    if not isinstance(config.model, UnrolledConfig):
        return config
    return replace(config, model=replace(config.model, n_iterations=T))


def override(config: Config, overrides: str) -> Config:
    """The config with overrides as on a command line: keys, and groups ("memory=recompute") of options that exist.

    An option that is made of others (it has a defaults list) will not do.
    """
    values = to_plain(config)
    for item in overrides.split():
        key, _, value = item.partition("=")
        if key in GROUPS:
            option = OmegaConf.create({"seed": config.seed, key: OmegaConf.load(CONF / key / f"{value}.yaml")})
            values[key] = OmegaConf.to_container(option[key], resolve=True)
        else:
            values = OmegaConf.to_container(OmegaConf.merge(values, OmegaConf.from_dotlist([item])))  # type: ignore[assignment]  # a dict
    return parse(values)


def to_plain(config: Config) -> dict[str, Any]:
    """Numbers, strings, lists and dicts only: what a checkpoint may hold; `parse` reads it back."""
    values = vars(config)
    return {key: keys_of(value) if is_dataclass(value) else value for key, value in values.items()}
