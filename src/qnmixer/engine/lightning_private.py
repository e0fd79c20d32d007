"""All uses of Lightning's private names and loops. If a new version of Lightning breaks something, look here first."""

from typing import Any

import lightning as L
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector


def disable_signal_handling() -> None:
    """Switch off Lightning's handling of signals.

    On SIGTERM it broadcasts, and so waits for ranks that have ended. Before every batch it broadcasts too, and waits
    for the device. On SIGUSR1 it lets SLURM start the job again, from a checkpoint of Lightning's own.
    """
    _SignalConnector.register_signal_handlers = lambda self: None  # type: ignore[method-assign]  # off
    _TrainingEpochLoop._broadcast_sigterm_tensor = lambda self: None  # type: ignore[method-assign]  # off


def number_rows(trainer: L.Trainer) -> None:
    """Set the step of the next rows in the logs. Lightning counts it wrongly after a resume."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def set_position(checkpoint: dict[str, Any], epoch: int, batches: int, before: int, validating: bool) -> None:
    """Write a position into the state of Lightning's loops, which count the batches of one process.

    Args:
        checkpoint: whose state is changed.
        epoch: epochs that are completed.
        batches: of the epoch that has begun.
        before: batches of all epochs before.
        validating: whether a validation was interrupted: Lightning runs it before it trains.
    """
    begun = epoch + (batches > 0)  # in its middle, an epoch counts as started but not as completed
    epochs = {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
    interrupted = {"ready": 1, "started": 1, "processed": 0, "completed": 0}

    def counted(total: dict[str, int], current: int) -> dict[str, Any]:
        return {"total": total, "current": dict.fromkeys(epochs, current), "is_last_batch": False}

    checkpoint["loops"]["fit_loop"] |= {
        "epoch_progress": {"total": epochs, "current": epochs},
        "epoch_loop.batch_progress": counted(dict.fromkeys(epochs, before + batches), batches),
        "epoch_loop.val_loop.batch_progress": counted(interrupted if validating else dict.fromkeys(epochs, 0), 0),
    }
