"""What `logger` may say: where metrics go beside metrics.csv."""

from dataclasses import dataclass

from qnmixer.config.option import one_of


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
