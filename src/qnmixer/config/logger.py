"""What `logger` may say: where metrics go beside metrics.csv."""

from dataclasses import dataclass
from importlib.util import find_spec

from qnmixer.config.custom import Custom
from qnmixer.config.option import one_of
from qnmixer.errors import ConfigError

_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "mlflow": ("mlflow", "mlflow_skinny")}


@dataclass(kw_only=True)
class LoggerConfig:
    """Where metrics go beside metrics.csv."""

    name: str


@dataclass(kw_only=True)
class WandbConfig(LoggerConfig):
    """Weights & Biases."""

    mode: str = one_of("offline", "online", "disabled")
    project: str
    entity: str | None
    run_name: str | None  # None: the overrides that are this job's alone, or the time
    group: str | None  # None: the sweep
    log_checkpoint: bool


@dataclass(kw_only=True)
class LightningLoggerConfig(LoggerConfig, Custom):
    """Any logger that Lightning takes, a class and its arguments."""


def check_logger(logger: LoggerConfig) -> None:
    """Raise ConfigError where the package of a logger is not installed."""
    packages = _PACKAGES.get(logger.name, ())
    if packages and not any(find_spec(package) for package in packages):
        raise ConfigError(f"logger={logger.name} needs a package that is not installed: pip install {logger.name}")
