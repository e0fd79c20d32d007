"""The config of a training run, and all checks before it starts.

The values are in `conf/`. The files beside this one have their types, their bounds and the rules between them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, get_type_hints

from annotated_types import Ge, Le, Len
from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.config.compose import CONF
from qnmixer.engine.config.data import DataConfig
from qnmixer.engine.config.groups import (
    DataModuleConfig,
    Group,
    LossConfig,
    ModelConfig,
    ModuleConfig,
    NoiseConfig,
    OptimizerConfig,
    ScheduleConfig,
    parse_section,
)
from qnmixer.engine.config.options import TARGET, keys_of, options, plain_values, values_of_option
from qnmixer.engine.config.rules import validate
from qnmixer.engine.config.sections import (
    LONGEST_TAG,
    CallbackConfig,
    DebugConfig,
    EvaluationConfig,
    GeometryConfig,
    LoggerConfig,
    MemoryConfig,
    MetricConfig,
    StrategyConfig,
    TrainerConfig,
    WandbConfig,
    check_monitor,
    default_metrics,
    parse_callbacks,
    parse_loggers,
    parse_metrics,
)
from qnmixer.engine.plugins import check_plugin, is_trusted
from qnmixer.errors import ConfigError

_ALWAYS_THERE = ("lightning.", "qnmixer.", "torch.", "torchmetrics.")
"""Packages that the check of targets does not look for, which would take seconds."""
_USUAL = {
    "module": {TARGET: "qnmixer.module.ReconstructionModule"},
    "datamodule": {TARGET: "qnmixer.engine.data.datamodule.SliceDataModule"},
}
"""Sections of a file that lacks them, such as a weights file."""
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]


@dataclass(kw_only=True)
class Config:
    """The checked config of one training run."""

    seed: Seed
    monitor: str
    finetune: str | None
    resume: str | None
    compile: bool
    test_after_training: bool
    tags: list[Annotated[str, Len(1, LONGEST_TAG)]] = field(default_factory=list)
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
    callbacks: dict[str, CallbackConfig] = field(default_factory=dict)  # by name


_NAMED = "callbacks", "logger", "metrics"
_SECTIONS = sorted(f.name for f in fields(Config) if is_dataclass(f.type))


def parse(cfg: DictConfig | Mapping[str, Any]) -> Config:
    """Parse and check a config: a composed one, or the result of `to_plain`.

    Raises ConfigError, which names the key and how to fix it.
    """
    config = parse_file(cfg)
    check_monitor(config.monitor, config.metrics)
    check_targets(config)
    return checked(config)


def require_sections(values: Mapping[str, Any], sections: Iterable[str]) -> None:
    """Raise ConfigError for the first section that a command line has taken away, as ~model or noise=[] does."""
    for key in sections:
        if key not in values:
            raise ConfigError(f"the config has no {key}: choose one with {key}=…")


def parse_file(cfg: DictConfig | Mapping[str, Any]) -> Config:
    """Parse the config in a file, such as a checkpoint. It imports nothing that the config names.

    So arguments of targets and rules are not checked: `checked` does that, once the targets are trusted.

    Raises ConfigError, which names the key and how to fix it.
    """
    values = _USUAL | plain_values(cfg)
    require_sections(values, _SECTIONS)
    named = {
        "callbacks": parse_callbacks(values.get("callbacks", {})),
        "metrics": parse_metrics(values["metrics"]) if "metrics" in values else default_metrics(),
        "logger": parse_loggers(values.get("logger")),
    }
    config: Config = parse_section("", Config, values, **dict.fromkeys(_SECTIONS), **named)  # root keys first
    for key in _SECTIONS:
        setattr(config, key, parse_section(key, schema_of(key, values[key]), values[key]))
    return config


def schema_of(section: str, value: Any) -> type:
    """The dataclass of a config section: its target or name decides. Raises ConfigError for an unknown name."""
    base = get_type_hints(Config)[section]
    if issubclass(base, Group):
        return base.schema_of(value)
    by_name = {schema.name: schema for schema in base.__subclasses__()}
    name = str(value.get("name")) if isinstance(value, Mapping) else ""
    if name and by_name and name not in (*by_name, *options(section)):
        raise ConfigError(f"{section}.name={name} is not known: choose one of {', '.join(options(section))}")
    return by_name.get(name, base)


def targets_of(config: Any) -> dict[str, str]:
    """Classes and functions that a config names, by key."""
    targets: dict[str, str] = {}
    for key, section in vars(config).items():
        for name, one in section.items() if key in _NAMED else [("", section)]:
            if isinstance(one, Group):
                targets |= one.targets()
            elif isinstance(one, WandbConfig):
                targets[f"logger.{name}.{TARGET}"] = one._target_
    return targets


def check_targets(config: Any) -> None:
    """Raise PluginError for the first target whose module is not found."""
    for key, target in targets_of(config).items():
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
    check_targets(config)
    return checked(config, *changed)  # not the loss of a checkpoint, say, whose code nobody has trusted


def section(group: str, option: str, *, seed: int = 42, **keys: Any) -> Any:
    """The section that `GROUP=OPTION` gives, with other values of some keys. For programs.

    Raises ConfigError for a value that is out of bounds.
    """
    values = _resolved(group, option, seed, keys)
    parsed = parse_section(group, schema_of(group, values), values)
    return parsed.checked() if isinstance(parsed, Group) else parsed


def _resolved(group: str, option: str, seed: int, keys: Mapping[str, Any]) -> Any:
    whole = OmegaConf.create({"seed": seed, group: values_of_option(group, option) | dict(keys)})
    return plain_values(whole)[group]


def to_plain(config: Config) -> dict[str, Any]:
    """The config as numbers, strings, lists and dicts, which a checkpoint can store. `parse` reads it back."""
    named = {key: {name: keys_of(it) for name, it in getattr(config, key).items()} for key in _NAMED}
    return {key: keys_of(it) if is_dataclass(it) else it for key, it in (vars(config) | named).items()}


def without_places(config: Config) -> Config:
    """The config for sharing: the same network, scan and training, without private values.

    Folders, names of patients, earlier runs and the logger's account are left out. Arguments of the user's own classes
    stay, because a network may need them. Arguments of the user's own slices, and the user's own metrics, are left out.
    """
    data = config.data.without_places()
    metrics = {name: metric for name, metric in config.metrics.items() if is_trusted(metric._target_, ())}
    return replace(config, data=data, metrics=metrics, logger={}, callbacks={}, tags=[], finetune=None, resume=None)
