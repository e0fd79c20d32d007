import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.training.callbacks import PromptInterrupt
from qnmixer.training.module import ReconstructionModule


class InterruptedInFinaliser(Callback):
    """Ctrl-C while an object is being thrown away: Python prints the exception and goes on."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        class Thrown:
            def __del__(self) -> None:
                signal.raise_signal(signal.SIGINT)

        if trainer.global_step == 2:
            Thrown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_ctrl_c_still_ends_training(tiny_module: Callable[..., ReconstructionModule], tmp_path: Path) -> None:
    module = tiny_module()
    trainer = L.Trainer(
        accelerator="cpu", max_steps=50, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0, default_root_dir=tmp_path,
        callbacks=[InterruptedInFinaliser(), PromptInterrupt()],
    )  # fmt: skip
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            trainer.fit(module, datamodule=SliceDataModule(module.config.data))
    finally:
        signal.signal(signal.SIGINT, before)
    assert trainer.global_step == 2
