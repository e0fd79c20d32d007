"""Callbacks, loggers and metrics: groups of several sections, each with a name."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Literal

from qnmixer.engine.config.groups import FUNCTION_OR_MODULE, Late, parse_section
from qnmixer.engine.config.search_path import CONF
from qnmixer.engine.config.target import TARGET, values_of_option
from qnmixer.engine.config.values import converted
from qnmixer.engine.plugins import Kind, subclass_of
from qnmixer.errors import ConfigError, PluginError, UserError, first_line

METRICS_FILE = "qnmixer.engine.tracking.metrics_file.MetricsFile"
"""The target of logger=csv. Every run has this logger."""

_CUSTOM = "custom"
"""The name of a logger that the group itself describes."""
_WANDB = "qnmixer.engine.tracking.loggers.WandbRun"
_MEAN_WEIGHTS = "qnmixer.engine.training.weight_averaging.MeanWeights"
_TAKEN = ("loss", "window_psnr", "window_ssim", "number", "slice", "method", "constant", "patient")
"""Names that are columns of metrics.csv or images.csv already."""


@dataclass(kw_only=True)
class Named(Late):
    """One of several sections of a group."""

    def build(self, *args: Any, offered: Mapping[str, Any] | None = None, **ours: Any) -> Any:
        """As for every section. Every error of the target becomes a PluginError."""
        try:
            return super().build(*args, offered=offered, **ours)
        except UserError:
            raise
        except Exception as error:  # a constructor can raise anything
            raise PluginError(f"{self.key}={self._target_} refuses its arguments ({first_line(error)})") from error


@dataclass(kw_only=True)
class MetricConfig(Named):
    """A function `(image, truth, **arguments)` → [B], or a class of torchmetrics, which gets the images one by one.

    Attributes:
        title: the heading of its column; None: its name.
        mode: max or min, the better value.
        in_hu: whether it gets image and truth in HU. Else these are in [0, 1].
    """

    group: ClassVar[str] = "metrics"
    kind: ClassVar[Kind] = FUNCTION_OR_MODULE
    n_ours: ClassVar[int] = 2

    title: str | None = None
    mode: Literal["max", "min"] = "max"
    in_hu: bool = False


@dataclass(kw_only=True)
class CallbackConfig(Named):
    """A Lightning callback. Only those of the command line are built; those in a checkpoint are dropped."""

    group: ClassVar[str] = "callbacks"
    kind: ClassVar[Kind] = subclass_of("lightning.pytorch.callbacks.Callback")


@dataclass(kw_only=True)
class LoggerConfig(Named):
    """A Lightning logger. metrics.csv is always written too."""

    group: ClassVar[str] = "logger"
    kind: ClassVar[Kind] = subclass_of("lightning.pytorch.loggers.Logger")


WandbMode = Literal["offline", "online", "disabled"]


@dataclass(kw_only=True)
class WandbConfig:
    """The settings of Weights & Biases."""

    _target_: str
    mode: WandbMode
    project: str
    entity: str | None
    run_name: str | None  # None: in a sweep the overrides of this job only, else setting and time
    group: str | None  # None: the sweep
    notes: str | None = None
    log_checkpoint: bool
    log_code: bool


def parse_callbacks(section: Any) -> dict[str, CallbackConfig]:
    """Callbacks by name, without those that are null. Raises ConfigError for one without a class."""
    named = _named("callbacks", section, "my_file.MyClass")
    return {name: parse_section(f"callbacks.{name}", CallbackConfig, it) for name, it in named.items()}


def parse_metrics(section: Any) -> dict[str, MetricConfig]:
    """Metrics by name, without those that are null. Raises ConfigError for one without a target."""
    named = _named("metrics", section, "my_file.my_metric")
    for name in named:
        if name in _TAKEN:
            raise ConfigError(f"metrics.{name}: there is a column {name} already, give the metric another name")
    return {name: parse_section(f"metrics.{name}", MetricConfig, it) for name, it in named.items()}


def parse_loggers(section: Any) -> dict[str, WandbConfig | LoggerConfig]:
    """Loggers by name.

    A `_target_` of the group itself, as in `logger=custom`, is one more logger. Settings of loggers that were not
    chosen are dropped, because conf/local may contain them. Raises ConfigError for a section that is no logger.
    """
    if isinstance(section, Mapping) and TARGET in section:
        named = {name: it for name, it in section.items() if isinstance(it, Mapping) and TARGET in it}
        section = named | {_CUSTOM: {name: it for name, it in section.items() if name not in named}}
    elif isinstance(section, Mapping):
        ready = {path.stem for path in (CONF / "logger").glob("*.yaml")}
        section = {
            name: it for name, it in section.items() if name not in ready or not isinstance(it, Mapping) or TARGET in it
        }
    loggers = {}
    for name, it in _named("logger", section or {}, "my_file.MyLogger").items():
        schema = WandbConfig if it[TARGET] == _WANDB else LoggerConfig
        it = _with_environment(it) if schema is WandbConfig else it
        loggers[name] = parse_section("logger" if name == _CUSTOM else f"logger.{name}", schema, it)
    return loggers


def _with_environment(wandb: Mapping[str, Any]) -> dict[str, Any]:
    """The section of W&B, with the user's own W&B variables for keys that are null. Raises ConfigError."""
    off = os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on")
    own: dict[str, str | None] = {"mode": "disabled"} if off else {}
    for key, default in {"mode": "offline", "project": "qnmixer", "name": None}.items():
        own.setdefault(key, os.environ.get(f"WANDB_{key.upper()}") or default)
    if wandb.get("mode") is None:
        converted("WANDB_MODE", own["mode"], WandbMode)  # the message names the place
    own["run_name"] = own.pop("name")
    return {**wandb, **{key: value for key, value in own.items() if wandb.get(key) is None}}


def _named(group: str, section: Any, example: str) -> dict[str, Mapping[str, Any]]:
    """The sections of a group by name, without those that are null. Raises ConfigError for one without a target."""
    if not isinstance(section, Mapping):
        raise ConfigError(f"{group}={section} is not a group of {group}: choose {group}=default")
    found = {str(name): it for name, it in section.items() if it is not None}
    for name, it in found.items():
        if not isinstance(it, Mapping) or not isinstance(it.get(TARGET), str):
            what = "metric" if group == "metrics" else "class"
            raise ConfigError(f"{group}.{name} names no {what}: give +{group}.{name}.{TARGET}={example}")
    return found


def averages_weights(callbacks: Mapping[str, CallbackConfig]) -> bool:
    """Whether a callback keeps a mean of the weights on the device, as callbacks=ema does."""
    return any(given._target_ == _MEAN_WEIGHTS for given in callbacks.values())


def default_metrics() -> dict[str, MetricConfig]:
    """Those of metrics=default: of a file without the section, such as an older checkpoint, and of each final table."""
    return parse_metrics(values_of_option("metrics", "default"))


def modes_of(metrics: Mapping[str, MetricConfig]) -> dict[str, str]:
    """The better value, max or min, of all that `monitor` can name: val/NAME of each metric, and val/loss."""
    return {f"val/{name}": str(metric.mode) for name, metric in metrics.items()} | {"val/loss": "min"}


def check_monitor(monitor: str, metrics: Mapping[str, MetricConfig]) -> None:
    """Raise ConfigError if no validation gives the monitored metric."""
    known = {monitor.removeprefix("val/"): monitor for monitor in modes_of(metrics)}
    if monitor in known.values():
        return
    name = monitor.removeprefix("val/")  # with it, all names would be near to each other
    if near := get_close_matches(name, known, n=1):
        raise ConfigError(f"monitor={monitor} is not known: did you mean {known[near[0]]}?")
    more = f", or add a metric: +metrics.{name}.{TARGET}=my_file.{name}" if name.isidentifier() else ""
    raise ConfigError(f"monitor={monitor} is not known: choose {', '.join(known.values())}{more}")
