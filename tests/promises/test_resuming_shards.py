"""Promise 2: 34 of 34 kills resume bit for bit; a dead rank is named within seconds, no orphan; two writers never share
a folder.

A run of fsdp by epochs, of which each process keeps a part.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qnmixer.engine.checkpoints.reading import read_checkpoint
from qnmixer.engine.config import Config

from ..conftest import TINY_RUN

# Seven samples, two a batch: four batches an epoch, the last of one sample.
RUN = ("data.n_train=7", "trainer.max_steps=9", "trainer.val_every_n_steps=100", "noise=field", "schedule=step")


@pytest.mark.slow
@pytest.mark.long  # CI has it in test_gradients_of_one_process
def test_shards_go_on_in_the_middle_of_an_epoch_too(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    """Lightning restores fsdp later than all others, when data for a run by epochs might be open already."""
    command = [sys.executable, "-m", "qnmixer.train", *TINY_RUN, *RUN, "trainer.max_steps=-1", "strategy=fsdp"]
    command += ["trainer.devices=1", "test_after_training=false", "data.num_workers=1", "schedule=constant"]
    weights = []
    for folder, more in (
        ("whole", ["trainer.max_epochs=3"]),
        ("begun", ["trainer.max_epochs=3", "trainer.max_steps=6"]),
        ("rest", ["trainer.max_epochs=3", f"resume={tmp_path}/begun"]),
    ):
        subprocess.run([*command, *more, f"hydra.run.dir={tmp_path}/{folder}"], check=True, capture_output=True)
        weights.append(read_checkpoint(tmp_path / folder / "checkpoints" / "last.ckpt")[1])
    for name, value in weights[0].items():
        assert torch.equal(weights[2][name], value)
