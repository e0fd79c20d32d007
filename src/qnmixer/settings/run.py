"""The config of a training run: all its sections, and how it is read, checked, changed and stored."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_type_hints

from annotated_types import Len
from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from qnmixer.errors import ConfigError, suggest
from qnmixer.installed import require_for
from qnmixer.settings import rules
from qnmixer.settings.data import Source
from qnmixer.settings.options import TARGET, option_of, options, values_of_option
from qnmixer.settings.parts import (
    Callbacks,
    DataModuleConfig,
    Loggers,
    LossConfig,
    Metrics,
    ModelConfig,
    ModuleConfig,
    NoiseConfig,
    OptimizerConfig,
    ScheduleConfig,
    check_monitor,
)
from qnmixer.settings.plugins import check_plugin
from qnmixer.settings.sections import (
    LONGEST_TAG,
    Debug,
    EvaluationConfig,
    GeometryConfig,
    MemoryConfig,
    Seed,
    TrainerConfig,
    WandbConfig,
)
from qnmixer.settings.strategies import Strategy
from qnmixer.settings.target import Target
from qnmixer.settings.validation import Section, plain_values, validated

FIT = "qnmixer.fit.fit"  # the function that trains, as its key names it
_ALWAYS_THERE = ("lightning.", "qnmixer.", "torch.", "torchmetrics.")
"""Packages that the check of targets does not look for, which would take seconds."""
Strictness = bool | Literal["repeat"]  # how the weights of `finetune` must fit; see `load_weights`
READ_AT_ONCE = "data", "loss", "model", "noise", "optimizer", "schedule"
"""Sections whose targets are imported to check a config. Others load Lightning: they are read when they are built."""


class Config(Section):
    """The config of one training run. Keys with a default are those that older files lack."""

    command: ClassVar[str] = "train"

    seed: Seed
    monitor: str
    finetune: str | None
    finetune_strict: Strictness = True
    resume: str | None
    compile: bool
    test_after_training: bool
    fit: str = FIT
    tags: list[Annotated[str, Len(1, LONGEST_TAG)]] = Field(default_factory=list)
    logger: Loggers = Field(default_factory=dict)
    metrics: Metrics = Field(default_factory=lambda: section("metrics", "default"))
    callbacks: Callbacks = Field(default_factory=dict)
    data: Source
    datamodule: DataModuleConfig = Field(default_factory=lambda: section("datamodule", "default"))
    debug: Debug
    evaluation: EvaluationConfig
    geometry: GeometryConfig
    loss: LossConfig
    memory: MemoryConfig
    model: ModelConfig
    module: ModuleConfig = Field(default_factory=lambda: section("module", "default"))
    noise: NoiseConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    strategy: Strategy
    trainer: TrainerConfig

    def changed(self, **sections: Any) -> "Config":
        """The same config with other sections, which are checked already."""
        return self.model_copy(update=sections)

    @property
    def source_as_typed(self) -> str:
        """What gives the slices: data=NAME, or the key of a LightningDataModule of the user's."""
        return f"data={self.data.name}" if self.datamodule.is_of_slices else self.datamodule.as_typed


def parse(cfg: DictConfig | Mapping[str, Any]) -> Config:
    """Parse and check a config: a composed one, or the result of `plain`. Raises ConfigError, which names the key."""
    if isinstance(cfg, DictConfig):  # composed: the defaults of the class are for files
        for group in ("metrics", "module", "datamodule"):
            if group not in cfg:
                raise ConfigError(f"the config has no {group}: choose one with {group}=…")
    config = parse_file(cfg)
    check_monitor(config.monitor, config.metrics, config.datamodule)
    check_targets(config)
    return checked(config)


def parse_file(cfg: DictConfig | Mapping[str, Any]) -> Config:
    """Parse the config in a file, such as a checkpoint. It imports nothing that the config names.

    So arguments of targets and rules are not checked: `checked` does that, once the targets are trusted. Raises
    ConfigError, which names the key.
    """
    return validated(Config, plain_values(cfg))


def targets_of(config: Section) -> dict[str, str]:
    """Classes and functions that a config names, by key."""
    targets: dict[str, str] = {}
    for key, value in config:
        for name, part in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(part, Target):
                targets |= part.targets()
            elif isinstance(part, WandbConfig):
                targets[f"{key}.{name}.{TARGET}"] = part.target
    return targets


def check_targets(config: Section) -> None:
    """Raise PluginError for the first target whose module is not found, NotInstalled for one that needs an extra."""
    named = {"fit": config.fit} if isinstance(config, Config) else {}
    for key, target in (targets_of(config) | named).items():
        group = key.partition(".")[0]
        require_for(option := option_of(group, target), f"{group}={option}")
        if not target.startswith(_ALWAYS_THERE):
            check_plugin(key, target)


def checked(config: Config, *groups: str) -> Config:
    """The config with the arguments of its targets checked and of the declared types. Imports these targets.

    groups: only these, of which a file's targets are trusted; none: all. Raises ConfigError or PluginError.
    """
    config = config.changed(**{key: getattr(config, key).checked() for key in groups or READ_AT_ONCE})
    validate(config)
    return config


def validate(config: Config) -> None:
    """Check the rules between sections. Raises ConfigError for the first that is broken."""
    rules.scan_of_set(config.data, config.geometry)
    rules.scans_to_simulate(config.data, config.datamodule)
    rules.one_scale(config.data, config.noise)
    rules.profile_of_scan(config.noise, config.geometry)
    rules.divided_image(config.data, config.model)
    rules.one_start(config.finetune, config.resume)
    rules.an_end(config.trainer, config.debug)
    rules.what_needs_validation(config.trainer, config.model, config.callbacks)
    config.strategy.check(config)
    rules.plain_network(config.model, config.memory, config.module)


class WithRunConfig(Section):
    """Keys of a command beside those of a run, which has a training step."""

    run: Config

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """Raises ConfigError."""
        values = plain_values(cfg)
        command_values = {key: values.pop(key) for key in cls.model_fields if key != "run"}
        run = parse(values)
        if not run.model.has_weights:
            raise ConfigError(f"model={run.model.name} has no weights, so it has no training step")
        return validated(cls, command_values | {"run": run})


def effective_batch(config: Config) -> int:
    """Samples of one optimizer step, over all devices."""
    return config.data.batch_size * config.trainer.n_devices * config.trainer.accumulate_grad_batches


def section(group: str, option: str, *, seed: int = 42, **keys: Any) -> Any:
    """The section that `GROUP=OPTION` gives, with other values of some keys. For programs. Raises ConfigError."""
    values = OmegaConf.create({"seed": seed, "evaluation": values_of_option("evaluation", "default")})
    values[group] = values_of_choice(group, option)
    values[group].update(keys)
    hint = get_type_hints(Config, include_extras=True)[group]
    parsed = validated(hint, plain_values(values[group]), group)
    return parsed.checked() if group in READ_AT_ONCE else parsed


def values_of_choice(group: str, choice: str) -> DictConfig:
    """The values of an option, or of [several], not resolved. Raises ConfigError for one that does not exist."""
    merged = OmegaConf.create()
    for option in choice.strip("[]").split(","):
        if option not in (*options(group), "custom"):
            raise ConfigError(f"{group}={option} does not exist: {suggest(option, options(group), limit=99)}")
        values = values_of_option(group, option)
        merged.merge_with({option: values} if group == "logger" and option != "custom" else values)
    return merged
