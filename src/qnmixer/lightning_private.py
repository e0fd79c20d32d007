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


def number_rows(trainer: L.Trainer, step: int) -> None:
    """Set the step of the next rows in the logs. Lightning counts it wrongly after a resume."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def validate_as_in_training(trainer: L.Trainer) -> None:
    """Run the validation that a stop interrupted, as Lightning would have run it after its step."""
    number_rows(trainer, trainer.global_step - 1)
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False
    trainer.validating = True
    loop.run()
    trainer.training = True
    loop.batch_progress.reset()


def restore_position(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Set the data and Lightning's loops to the position of a checkpoint, before the loops are restored.

    Lightning counts the batches of one process. Under another strategy an optimizer step has more or fewer batches. So
    the position is computed from the number of optimizer steps.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it when it has one
    per_epoch, accumulate = len(data.train_dataloader()), trainer.accumulate_grad_batches
    epoch, step = divmod(checkpoint["global_step"], per_epoch // accumulate)
    n_batches = step * accumulate
    data.start_at(epoch, n_batches)

    # In the middle of an epoch, Lightning counts that epoch as started but not as completed.
    begun = epoch + (step > 0)
    epochs = {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
    checkpoint["loops"]["fit_loop"] |= {
        "epoch_progress": {"total": epochs, "current": epochs},
        "epoch_loop.batch_progress": _batches(epoch * per_epoch + n_batches, n_batches),
        "epoch_loop.val_loop.batch_progress": _batches(0, 0),
    }


def _batches(total: int, current: int) -> dict[str, Any]:
    keys = ("ready", "started", "processed", "completed")
    return {"total": dict.fromkeys(keys, total), "current": dict.fromkeys(keys, current), "is_last_batch": False}
