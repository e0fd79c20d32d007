"""Schema of `logger`: loggers by name, each a class and its arguments. metrics.csv is always written."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from qnmixer.engine.config.option import one_of
from qnmixer.engine.config.search_path import CONF
from qnmixer.engine.config.target import TARGET, Custom
from qnmixer.errors import ConfigError

CUSTOM = "custom"
"""The name of a logger that the group itself describes."""
METRICS_FILE = "qnmixer.engine.tracking.metrics_file.MetricsFile"
"""The target of logger=csv. Every run has this logger."""
LONGEST_TAG = 64
"""Characters; W&B refuses longer tags."""

_WANDB = "qnmixer.engine.tracking.loggers.WandbRun"
_PACKAGES = {
    "TensorBoardLogger": ("tensorboard", ("tensorboard", "tensorboardX")),
    "MLFlowLogger": ("mlflow", ("mlflow", "mlflow_skinny")),
}


@dataclass(kw_only=True)
class LoggerConfig(Custom):
    """A Lightning logger: a class and its arguments."""


@dataclass(kw_only=True)
class WandbConfig:
    """The settings of Weights & Biases."""

    _target_: str
    mode: str = one_of("offline", "online", "disabled")
    project: str
    entity: str | None
    run_name: str | None  # None: in a sweep the overrides of this job only, else setting and time
    group: str | None  # None: the sweep
    log_checkpoint: bool
    log_code: bool


def named_loggers(section: Any) -> dict[str, Mapping[str, Any]]:
    """The sections of the loggers by name.

    A `_target_` of the group itself, as in `logger=custom`, is one more logger. Settings of loggers that were not
    chosen are dropped, because conf/local may contain them. Raises ConfigError for a section that is no logger.
    """
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"logger={section} is not a group of loggers: choose logger=csv")
    named = {str(name): it for name, it in section.items() if isinstance(it, Mapping) and TARGET in it}
    rest = {str(name): it for name, it in section.items() if str(name) not in named and it is not None}
    if TARGET in rest:
        return named | {CUSTOM: {name: section[name] for name in section if str(name) not in named}}
    for name, it in rest.items():
        if not isinstance(it, Mapping) or not (CONF / "logger" / f"{name}.yaml").is_file():
            raise ConfigError(f"logger.{name} names no class: give +logger.{name}.{TARGET}=my_file.MyLogger")
    return named


def section_of(name: str) -> str:
    """The key on the command line of the logger with this name."""
    return "logger" if name == CUSTOM else f"logger.{name}"


def schema_of_logger(section: Mapping[str, Any]) -> type[WandbConfig] | type[LoggerConfig]:
    """The dataclass of a logger section."""
    return WandbConfig if section[TARGET] == _WANDB else LoggerConfig


def check_loggers(loggers: Mapping[str, WandbConfig | LoggerConfig]) -> None:
    """Raise ConfigError if the package of a logger is not installed."""
    for name, logger in loggers.items():
        package, modules = _PACKAGES.get(logger._target_.rpartition(".")[2], ("", ()))
        if package and not any(find_spec(module) for module in modules):
            raise ConfigError(f"logger={name} needs a package that is not installed: pip install {package}")
