"""Going on with a run where a checkpoint left it, under the same strategy or another.

Lightning counts batches of one process, of which an optimizer step has more or fewer under another strategy, and it
says nothing to the data. So the place is found anew from the number of optimizer steps, and everything is told.
"""

from typing import Any

import lightning as L

from qnmixer.data.datamodule import SliceDataModule


def restart(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Have the data begin, and Lightning count, where a checkpoint was made; before its loops are restored from it."""
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
