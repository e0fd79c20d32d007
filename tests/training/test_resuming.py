"""A run in this process that resumes in another way, or is refused. tests/promises has the kills."""

import shutil
from pathlib import Path

import pytest
import torch

from qnmixer.errors import CheckpointError
from qnmixer.fit import fit
from qnmixer.reconstruction.checkpoints import resumable
from qnmixer.runs.records import read_metrics
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


@pytest.mark.long  # tests/promises/test_resuming.py compares the rows of one such run
@pytest.mark.parametrize(("begun", "batches"), [
    (3, PARTS), (2, PARTS), (2, TOGETHER), (3, TOGETHER),
], ids=["3 parts", "2 parts", "2 together", "3 together"])  # fmt: skip
def test_the_rows_of_a_resumed_run_have_the_numbers_of_one_run(tmp_path: Path, batches: list[str], begun: int) -> None:
    """Lightning numbers the rows of its own callbacks, and chooses those that are written, by a count of its own."""
    words = [*RUN, *batches, "callbacks=lr_monitor", "trainer.log_every_n_steps=3", "trainer.val_every_n_steps=2"]
    fit(tiny_config(*words, "trainer.max_steps=7"), Run(tmp_path / "whole"))
    parts = tmp_path / "parts"
    fit(tiny_config(*words, f"trainer.max_steps={begun}"), Run(parts))
    fit(tiny_config(*words, "trainer.max_steps=7", f"resume={parts}"), Run(parts, resume=str(parts)))
    found = [
        [(row["step"], row["train/loss"], row["lr-AdamW/pg1"]) for row in read_metrics(run / "metrics.csv")]
        for run in (tmp_path / "whole", parts)
    ]
    of_training = [[row for row in rows if any(row[1:])] for rows in found]
    assert of_training[0] == of_training[1]
    assert [step for step, loss, _ in of_training[0] if loss] == ["3", "6"]
