"""A run in this process that resumes in another way, or is refused. tests/promises has the kills."""

import shutil
from pathlib import Path

import pytest
import torch

from qnmixer.errors import CheckpointError
from qnmixer.fit import fit
from qnmixer.reconstruction.checkpoints import resumable
from qnmixer.runs.run import Run

from ..conftest import tiny_config

# Seven slices, four a step: epochs of two steps, the second of three slices.
RUN = ["data.n_train=7", "noise=field", "schedule=constant", "callbacks=none", "test_after_training=false"]
TOGETHER, PARTS = ["data.batch_size=4"], ["data.batch_size=2", "trainer.accumulate_grad_batches=2"]
REFUSED: list[tuple[list[str], list[str]]] = [
    ([], ["4 slices per optimizer step", "2", "data.batch_size"]),
    ([*PARTS, "optimizer=sgd"], ["optimizer=adamw, not sgd", "finetune="]),
    ([*PARTS, "optimizer.lr=0.1"], ["optimizer.lr=", "not 0.1", "finetune="]),
    ([*PARTS, "seed=1"], ["data.seed=42, not 1", "finetune="]),
    ([*PARTS, "seed=1", "data.seed=42"], ["with seed=42, not 1"]),  # noise and weights would be those of another run
    ([*PARTS, "geometry.n_views=9"], ["geometry.n_views=8, not 9"]),
]


def test_other_batches_are_the_same_and_other_runs_refused(tmp_path: Path) -> None:
    """Two batches of two instead of one of four, from the middle of an epoch."""
    kept = {}
    fit(tiny_config(*RUN, *TOGETHER, "trainer.max_steps=3"), Run(tmp_path / "begun"))
    for name, words in {"together": TOGETHER, "parts": PARTS}.items():
        folder = shutil.copytree(tmp_path / "begun", tmp_path / name)
        fit(tiny_config(*RUN, *words, "trainer.max_steps=6", f"resume={folder}"), Run(folder, resume=str(folder)))
        checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        assert checkpoint["global_step"] == 6
        kept[name] = checkpoint["state_dict"]
    for name, value in kept["together"].items():
        torch.testing.assert_close(kept["parts"][name], value, rtol=1e-5, atol=1e-7)
    for overrides, words in REFUSED:
        with pytest.raises(CheckpointError) as error:
            resumable(tiny_config(*RUN, *overrides), tmp_path / "begun")
        for word in words:
            assert word in str(error.value)
