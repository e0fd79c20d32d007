"""Schema of `metrics`: metrics of single images, each with a name, a target and its arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from qnmixer.engine.config.option import one_of
from qnmixer.engine.config.section import parse_section
from qnmixer.engine.config.target import TARGET, Custom, values_of_option
from qnmixer.errors import ConfigError

_TAKEN = ("loss", "window_psnr", "window_ssim", "number", "slice", "method", "constant", "patient")
"""Names that are columns of metrics.csv or images.csv already."""


@dataclass(kw_only=True)
class MetricConfig(Custom):
    """A function `(image, truth, **arguments)` → [B], or a class of torchmetrics, which gets the images one by one.

    Attributes:
        title: the heading of its column; None: its name.
        mode: max or min, the better value.
        in_hu: whether it gets image and truth in HU. Else these are in [0, 1].
    """

    title: str | None = None
    mode: str = one_of("max", "min", default="max")
    in_hu: bool = False


def parse_metrics(section: Any, values: Mapping[str, Any]) -> dict[str, MetricConfig]:
    """Metrics by name, without those that are null. `values`: the whole config. Raises ConfigError."""
    if not isinstance(section, Mapping):
        raise ConfigError(f"metrics={section} is not a group of metrics: choose metrics=default")
    return {str(name): _parsed(str(name), it, values) for name, it in section.items() if it is not None}


def default_metrics() -> dict[str, MetricConfig]:
    """Those of metrics=default: of a file without the section, such as an older checkpoint, and of each final table."""
    return parse_metrics(values_of_option("metrics", "default"), {})


def modes_of(metrics: Mapping[str, MetricConfig]) -> dict[str, str]:
    """The better value, max or min, of all that `monitor` can name: val/NAME of each metric, and val/loss."""
    return {f"val/{name}": metric.mode for name, metric in metrics.items()} | {"val/loss": "min"}


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


def _parsed(name: str, given: Any, values: Mapping[str, Any]) -> MetricConfig:
    key = f"metrics.{name}"
    if name in _TAKEN:
        raise ConfigError(f"{key}: there is a column {name} already, give the metric another name")
    if not isinstance(given, Mapping) or not isinstance(given.get(TARGET), str):
        raise ConfigError(f"{key} names no metric: give +{key}.{TARGET}=my_file.my_metric")
    if odd := next((it for it in given if str(it).startswith("_") and it != TARGET), None):
        raise ConfigError(f"{key}.{odd} is not known: give {TARGET} and arguments of the metric only")
    parsed: MetricConfig = parse_section(key, MetricConfig, given, values)
    return parsed
