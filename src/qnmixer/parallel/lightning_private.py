"""All uses of Lightning's private names and loops. If a new version of Lightning breaks something, look here first.

They are why `lightning<2.7` is required. A scheduled workflow tries the newest. What each waits for in Lightning:

- `disable_signal_handling`: an argument of the Trainer that leaves signals alone, and a step without a broadcast (issue
  21487 of Lightning-AI/pytorch-lightning).
- `count_training_steps`: a `global_step` that counts training steps also with manual optimization (issue 17958).
- `find_unused_parameters`: arguments of DDP that are chosen when the strategy has the module.
- `number_rows`: rows that are numbered by `global_step`, also after a resume.
- `set_hparams`: a `save_hyperparameters` that takes the place of an earlier one, and tells no logger (issue 7451).
- `ONLY_THE_CLASS`: a `load_from_checkpoint` that builds nothing but its class. No issue is known.
- `trainer_of`: a public `trainer` that is None without one. No issue is known.
- `of_all_loaders`: an argument of `log` for a mean over several loaders of validation (issue 12145).
- `set_position`: a public place in the data, which a run sets when it resumes with another strategy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector


def disable_signal_handling() -> None:
    """Switch off Lightning's handling of signals.

    On SIGTERM it broadcasts, and so waits for ranks that have ended. Before every batch it broadcasts too, and waits
    for the device. On SIGUSR1 it lets SLURM start the job again, from a checkpoint of Lightning's own.
    """
    _SignalConnector.register_signal_handlers = lambda self: None  # type: ignore[method-assign]  # off
    _TrainingEpochLoop._broadcast_sigterm_tensor = lambda self: None  # type: ignore[method-assign]  # off


class _StepOfBatches(_ManualOptimization):
    """Manual optimization that counts a training step as one step, whatever its optimizers do."""

    def advance(self, kwargs: Any) -> None:
        """Run `training_step`, then count it."""
        self.optim_step_progress.increment_ready()
        super().advance(kwargs)
        self.optim_step_progress.increment_completed()

    def _on_before_step(self) -> None:
        self.trainer.profiler.start("optimizer_step")  # type: ignore[attr-defined]  # untyped

    def _on_after_step(self) -> None:
        self.trainer.profiler.stop("optimizer_step")  # type: ignore[attr-defined]  # untyped


def count_training_steps(trainer: L.Trainer) -> None:
    """Count one step for each `training_step` of a module that optimizes by itself.

    Lightning counts each call of an optimizer in `global_step`. Two optimizers would halve max_steps, and the rows of
    the loggers, which Lightning numbers by batches, would have other numbers.
    """
    trainer.fit_loop.epoch_loop.manual_optimization = _StepOfBatches(trainer)


def find_unused_parameters(strategy: DDPStrategy) -> None:
    """Let ddp look in each backward pass for weights without a gradient. Call it before the strategy sets up ddp."""
    strategy._ddp_kwargs["find_unused_parameters"] = True


def number_rows(trainer: L.Trainer) -> None:
    """Set the step of the next rows in the logs. Lightning counts it wrongly after a resume."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def set_hparams(module: L.LightningModule, values: dict[str, Any]) -> None:
    """Set the hyperparameters that checkpoints keep. Loggers have all of the config already, and get none of them."""
    vars(module).update(_hparams=AttributeDict(values), _hparams_initial=AttributeDict(values), _log_hyperparams=False)


ONLY_THE_CLASS: dict[str, Any] = {"_instantiator": None}
"""For `load_from_checkpoint`. A file may name a function that builds the module. With this, only the class does."""


def trainer_of(module: L.LightningModule) -> L.Trainer | None:
    """The trainer of a module, or None. Without one `module.trainer` raises."""
    return module._trainer


@contextmanager
def of_all_loaders(trainer: L.Trainer) -> Iterator[None]:
    """Around `log`: the value is one of all validation loaders. Else it would be that of the loader of this batch."""
    results: Any = trainer._results
    number, results.dataloader_idx = results.dataloader_idx, None
    try:
        yield
    finally:
        results.dataloader_idx = number


def loader_number(trainer: L.Trainer) -> int:
    """Of several validation loaders, that of the batch."""
    results: Any = trainer._results
    return results.dataloader_idx or 0


def set_position(checkpoint: dict[str, Any], epoch: int, batches: int, batches_before: int, validating: bool) -> None:
    """Write a position into the state of Lightning's loops, which count the batches of one process.

    Args:
        checkpoint: whose state is changed.
        epoch: epochs that are completed.
        batches: of the epoch that has begun.
        batches_before: of all epochs before.
        validating: whether a validation was interrupted: Lightning runs it before it trains.
    """
    n_begun = epoch + (batches > 0)  # in its middle, an epoch counts as started but not as completed
    epochs = {"ready": n_begun, "started": n_begun, "processed": epoch, "completed": epoch}
    interrupted = {"ready": 1, "started": 1, "processed": 0, "completed": 0}

    def progress(total: dict[str, int], current: int) -> dict[str, Any]:
        return {"total": total, "current": dict.fromkeys(epochs, current), "is_last_batch": False}

    checkpoint["loops"]["fit_loop"] |= {
        "epoch_progress": {"total": epochs, "current": epochs},
        "epoch_loop.batch_progress": progress(dict.fromkeys(epochs, batches_before + batches), batches),
        "epoch_loop.val_loop.batch_progress": progress(interrupted if validating else dict.fromkeys(epochs, 0), 0),
    }
