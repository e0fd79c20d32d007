"""All uses of Lightning's private names and loops. If a new version of Lightning breaks something, look here first."""

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
