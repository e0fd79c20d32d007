"""metrics.csv for every run, and Weights & Biases beside it."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from qnmixer.config import LoggerConfig, WandbConfig


def build_loggers(config: LoggerConfig, folder: Path, plain_config: dict[str, Any]) -> list[Logger]:
    """Loggers that write into the run folder; W&B stays offline unless logger.mode says otherwise."""
    loggers: list[Logger] = [CSVLogger(folder, name="", version="")]
    if isinstance(config, WandbConfig):
        if config.mode != "online":
            os.environ.setdefault("WANDB_SILENT", "true")
        wandb_logger = WandbLogger(
            project=config.project,
            entity=config.entity,
            name=config.run_name or f"{folder.parent.name}/{folder.name}",
            save_dir=folder,
            mode=config.mode,
            config=plain_config,
        )
        # Lightning 2.6 always passes this argument, and wandb 0.31 warns of it in every run.
        wandb_logger._wandb_init.pop("anonymous", None)
        loggers.append(wandb_logger)
    return loggers


def close_loggers(config: LoggerConfig, exit_code: int) -> None:
    """End the W&B run as what it is: exit code 0 is finished, anything else has crashed."""
    if isinstance(config, WandbConfig):
        import wandb

        if wandb.run is not None:
            wandb.finish(exit_code=exit_code)
