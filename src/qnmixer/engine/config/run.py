"""The config of a training run, and all checks before it starts.

The values are in `conf/`. This file has their types, their bounds and the rules between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.config.callbacks import parse_callbacks
from qnmixer.engine.config.data import DataConfig
from qnmixer.engine.config.debug import DebugConfig
from qnmixer.engine.config.evaluation import EvaluationConfig
from qnmixer.engine.config.geometry import GeometryConfig
from qnmixer.engine.config.groups import Group, LossConfig, ModelConfig, NoiseConfig, OptimizerConfig, ScheduleConfig
from qnmixer.engine.config.logger import LoggerConfig, WandbConfig, named_loggers, schema_of_logger, section_of
from qnmixer.engine.config.memory import MemoryConfig
from qnmixer.engine.config.metrics import MetricConfig, check_monitor, default_metrics, parse_metrics
from qnmixer.engine.config.module import OURS, DataModuleConfig, ModuleConfig
from qnmixer.engine.config.option import number
from qnmixer.engine.config.rules import check_rules
from qnmixer.engine.config.search_path import CONF
from qnmixer.engine.config.section import parse_section, plain_values
from qnmixer.engine.config.strategy import StrategyConfig
from qnmixer.engine.config.target import (
    TARGET,
    Custom,
    Target,
    keys_of,
    names_of,
    options,
    values_of_option,
)
from qnmixer.engine.config.trainer import TrainerConfig, gathered
from qnmixer.engine.plugins import check_plugin, is_trusted
from qnmixer.errors import ConfigError, suggest

_ALWAYS_THERE = (
    "lightning.",
    "qnmixer.",
    "torch.",
    "torchmetrics.",
)  # the check does not import these, which would take seconds
MAX_SEED = 2**32 - 1
"""The largest seed of numpy."""


@dataclass(kw_only=True)
class RunConfig:
    """The root keys of the config."""

    seed: int = number(at_least=0, at_most=MAX_SEED)
    monitor: str
    finetune: str | None
    resume: str | None
    compile: bool
    test_after_training: bool
    tags: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Config(RunConfig):
    """The checked config of one training run."""

    geometry: GeometryConfig
    noise: NoiseConfig
    model: ModelConfig
    module: ModuleConfig
    datamodule: DataModuleConfig
    data: DataConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    memory: MemoryConfig
    strategy: StrategyConfig
    trainer: TrainerConfig
    evaluation: EvaluationConfig
    debug: DebugConfig
    logger: dict[str, WandbConfig | LoggerConfig] = field(default_factory=dict)  # by name
    metrics: dict[str, MetricConfig] = field(default_factory=dict)  # by name
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name: _target_ and arguments


def parse(cfg: DictConfig | Mapping[str, Any]) -> Config:
    """Parse and check a config: a composed one, or the result of `to_plain`.

    Raises ConfigError, which names the key and how to fix it.
    """
    config = parse_file(cfg)
    check_monitor(config.monitor, config.metrics)
    check_targets(targets_of(config))
    return checked(config)


def fill_roots(config: DictConfig) -> None:
    """Give each source of slices that lacks its folder the folder `.`, for what reads no slices."""
    if isinstance(data := config.get("data"), DictConfig):
        for source in (data, *data.get("sources", {}).values()):
            if isinstance(source, DictConfig) and OmegaConf.is_missing(source, "root"):
                source.root = "."


def parse_file(cfg: DictConfig | Mapping[str, Any]) -> Config:
    """Parse the config in a file, such as a checkpoint. It imports nothing that the config names.

    So arguments of targets and rules are not checked: `checked` does that, once the targets are trusted.

    Raises ConfigError, which names the key and how to fix it.
    """
    values = OURS | plain_values(cfg)
    if "trainer" in values:
        values["trainer"] = gathered(values["trainer"])
    callbacks = parse_callbacks(values.pop("callbacks", {}))
    metrics = parse_metrics(values.pop("metrics"), values) if "metrics" in values else default_metrics()
    loggers = {
        name: parse_section(section_of(name), schema_of_logger(given), given, values)
        for name, given in named_loggers(values.pop("logger", None)).items()
    }
    root = {f.name for f in fields(RunConfig)}
    sections = {f.name for f in fields(Config)} - root - {"callbacks", "logger", "metrics"}
    for key in sections - values.keys():
        raise ConfigError(f"the config has no {key}: choose one with {key}=…")
    rest = parse_section("", RunConfig, {k: v for k, v in values.items() if k not in sections}, values)
    parsed = {key: parse_section(key, schema_of(key, values[key]), values[key], values) for key in sorted(sections)}
    named: dict[str, Any] = {"metrics": metrics, "logger": loggers, "callbacks": callbacks}
    return Config(**{key: getattr(rest, key) for key in root}, **parsed, **named)


def schema_of(section: str, value: Any) -> type:
    """The dataclass of a config section. Its target or name decides; without them it is the base class of the group.

    Raises ConfigError for an option that does not exist.
    """
    base, names = _hints()[section], names_of(section)
    if isinstance(value, Mapping) and issubclass(base, Target):
        return base.schema_of(value)
    schemas: list[type] = base.__subclasses__()
    if isinstance(value, Mapping) and not (names and schemas):
        return base
    name = str(value.get("name")) if isinstance(value, Mapping) else str(value)
    if name not in names:
        raise ConfigError(f"{section}={name} is not known: {suggest(name, names or options(section))}")
    for schema in schemas:
        if getattr(schema, "name", None) == name:
            return schema
    return base


@cache
def _hints() -> dict[str, type]:
    """The types of the sections."""
    return get_type_hints(Config)


def targets_of(config: Any) -> dict[str, str]:
    """Classes and functions that a config names, by key."""
    sections = {f.name: getattr(config, f.name) for f in fields(config)}
    targets: dict[str, str] = {}
    for key, section in sections.items():
        if isinstance(section, Target):
            targets |= section.targets()
        elif isinstance(section, Custom):
            targets[f"{key}.{TARGET}"] = section._target_
    targets |= {f"{section_of(name)}.{TARGET}": it._target_ for name, it in (sections.get("logger") or {}).items()}
    targets |= {f"metrics.{name}.{TARGET}": it._target_ for name, it in (sections.get("metrics") or {}).items()}
    callbacks = sections.get("callbacks") or {}
    return targets | {f"callbacks.{name}.{TARGET}": given[TARGET] for name, given in callbacks.items()}


def check_targets(targets: Mapping[str, str]) -> None:
    """Raise PluginError for the first target whose module is not found."""
    for key, target in targets.items():
        if not target.startswith(_ALWAYS_THERE):
            check_plugin(key, target)


def checked(config: Config, *groups: str) -> Config:
    """The config with the arguments of its targets checked and of the declared types. Imports these targets.

    Args:
        groups: only these, of which a file's targets are trusted; none: all.

    Raises ConfigError or PluginError.
    """
    config = replace(config)
    for name, section in vars(config).items():
        if isinstance(section, Group) and name in (groups or vars(config)):
            setattr(config, name, section.checked())
    validate(config)
    return config


def validate(config: Config) -> None:
    """Check the rules inside sections and between them. Imports the network and the noise. Raises ConfigError."""
    for section in vars(config).values():
        if not isinstance(section, Group) and hasattr(section, "check"):
            section.check(config)
    check_rules(config)


def devices_per_replica(config: Config) -> int:
    """The number of devices that work on the same samples: those of a pipeline, or one."""
    return config.strategy.devices_per_replica(config.trainer)


def batch_of_replica(config: Config) -> int:
    """Samples that the devices of one replica get together. data.batch_size is for one device."""
    return config.data.batch_size * devices_per_replica(config)


def effective_batch(config: Config) -> int:
    """Samples of one optimizer step, over all devices."""
    t = config.trainer
    return config.data.batch_size * (t.devices or 1) * t.num_nodes * t.accumulate_grad_batches


def with_iterations(config: Config, T: int) -> Config:
    """The same config with another T, or unchanged if T is fixed."""
    return replace(config, model=config.model.changed(n_iterations=T)) if config.model.is_unrolled else config


def override(config: Config, overrides: str | Sequence[str]) -> Config:
    """The config with overrides as on a command line: keys, and groups ("memory=recompute") with their options.

    A text is split at its blanks; give a list if a value has some.
    """
    values, changed = OmegaConf.create(to_plain(config)), {"model", "noise"}
    for item in overrides.split() if isinstance(overrides, str) else overrides:
        key, _, value = item.partition("=")
        changed.add(key.partition(".")[0])
        if (CONF / key).is_dir():
            values[key] = _resolved(key, value, config.seed, {})
        else:
            values.merge_with_dotlist([item])
    plain = OmegaConf.to_container(values)  # text with ${…} stays text
    assert isinstance(plain, dict)
    config = parse_file({str(key): section for key, section in plain.items()})
    check_targets(targets_of(config))
    return checked(config, *changed)  # not the loss of a checkpoint, say, whose code nobody has trusted


def section(group: str, option: str, *, seed: int = 42, **keys: Any) -> Any:
    """The section that `GROUP=OPTION` gives, with other values of some keys. For programs.

    Raises ConfigError for a value that is out of bounds.
    """
    values = _resolved(group, option, seed, keys)
    parsed = parse_section(group, schema_of(group, values), values, {group: values})
    return parsed.checked() if isinstance(parsed, Group) else parsed


def _resolved(group: str, option: str, seed: int, keys: Mapping[str, Any]) -> Any:
    whole = OmegaConf.create({"seed": seed, group: values_of_option(group, option) | dict(keys)})
    return plain_values(whole)[group]


def to_plain(config: Config) -> dict[str, Any]:
    """The config as numbers, strings, lists and dicts, which a checkpoint can store. `parse` reads it back."""
    named = {key: {name: keys_of(it) for name, it in getattr(config, key).items()} for key in ("logger", "metrics")}
    values = vars(config) | named
    return {key: keys_of(value) if is_dataclass(value) else value for key, value in values.items()}


def without_places(config: Config) -> Config:
    """The config for sharing: the same network, scan and training, without private values.

    Folders, names of patients, earlier runs and the logger's account are left out. Arguments of the user's own classes
    stay, because a network may need them. Arguments of the user's own slices, and the user's own metrics, are left out.
    """
    data = config.data.without_places()
    metrics = {name: metric for name, metric in config.metrics.items() if is_trusted(metric._target_, ())}
    return replace(config, data=data, metrics=metrics, logger={}, callbacks={}, tags=[], finetune=None, resume=None)
