"""All that reaches into Lightning behind what it documents: a new version of it is tried here first."""

from typing import Any

import lightning as L
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from qnmixer.data.datamodule import SliceDataModule


def leave_signals_to_us() -> None:
    """Switch off what Lightning does about signals.

    Its handler of SIGTERM is a broadcast, which waits for ranks that have gone, and one before every batch, which waits
    for the device; that of SIGUSR1 has SLURM start the job again, with a checkpoint that only Lightning knows of.
    """
    _SignalConnector.register_signal_handlers = lambda self: None  # type: ignore[method-assign]  # off
    _TrainingEpochLoop._broadcast_sigterm_tensor = lambda self: None  # type: ignore[method-assign]  # off


def number_rows(trainer: L.Trainer, step: int) -> None:
    """Have the next rows in the logs bear this number of optimizer steps, which is off after a restart."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def validate_as_in_training(trainer: L.Trainer) -> None:
    """The validation that belongs to the step before, as Lightning would have run it."""
    number_rows(trainer, trainer.global_step - 1)
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False
    trainer.validating = True
    loop.run()
    trainer.training = True
    loop.batch_progress.reset()


def restart(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Have the data begin, and Lightning count, where a checkpoint was made; before its loops are restored from it.

    Lightning counts batches of one process, of which an optimizer step has more or fewer under another strategy, and it
    says nothing to the data. So the place is found anew from the number of optimizer steps, and everything is told.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it when it has one
    assert isinstance(data, SliceDataModule)
    per_epoch, accumulate = len(data.train_dataloader()), trainer.accumulate_grad_batches
    epoch, step = divmod(checkpoint["global_step"], per_epoch // accumulate)
    n_batches = step * accumulate
    data.start_at(epoch, n_batches)

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
