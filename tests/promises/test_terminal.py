"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

A run on a terminal: its bar, Ctrl-C, and how it goes on.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from ..conftest import TINY, offline_runs
from ..terminal import in_terminal
from ..warm import Warm

NOISY = """
import sys, warnings
from lightning.pytorch.callbacks import Callback

class Noisy(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 5:
            print("printed by a callback")
            module.print("printed by the module")
            warnings.warn("warned by a callback")
"""


@pytest.mark.slow
@pytest.mark.xdist_group("wandb")
@pytest.mark.usefixtures("left_alone")  # which test_wandb.py waits for
def test_a_terminal_has_one_bar_over_the_run_its_interruption_and_its_resume(tmp_path: Path, warm: Warm) -> None:
    """The real command, stopped by Ctrl-C."""
    (tmp_path / "noisy.py").write_text(NOISY)
    train = ["-m", "qnmixer.train"]
    environment = {"OMP_NUM_THREADS": "1"}
    words = [  # so many slices to validate that it takes longer than a bar waits to be drawn again
        *TINY, "data.n_train=8", "data.n_val=80", "data.n_test=2",
        "logger=wandb", "trainer.max_steps=5000", "trainer.val_every_n_steps=10",
        "+callbacks.noisy._target_=noisy.Noisy", "hydra.run.dir=run",
    ]  # fmt: skip
    command = [sys.executable, *train, *words]
    session = in_terminal(command, cwd=tmp_path, env=environment, interrupt_at=r"step 2[1-9]/5000 .*loss")
    assert session.code == 130
    bars = [line for screen in session.screens for line in screen.splitlines() if "━" in line]
    assert all(re.match(r"step \d+/5000 ", line) for line in bars)
    assert any(re.search(r"━ loss 0\.\S+ · val/psnr \d\d\.\d\d · \S+ samples/s · [\d:]+ left$", line) for line in bars)
    assert any(re.search(r"━ validating [1-9]\d*/40 · ", line) for line in bars)
    assert {sum("━" in line for line in screen.splitlines()) for screen in session.screens} == {0, 1}

    lines = [line for line in session.text.splitlines() if line]
    assert lines[0].startswith("starting a run in ")
    assert not [line for line in lines if "━" in line or "Epoch" in line or "v_num" in line]
    assert {"printed by a callback", "printed by the module"} <= set(lines)
    assert any(line.endswith("warning: warned by a callback") for line in lines)
    assert any(re.fullmatch(r"memory: \d+ MiB in tensors at the peak of a step", line) for line in lines)
    assert [line.split(" · ")[:1] for line in lines if "val PSNR" in line][:2] == [["step 10/5000"], ["step 20/5000"]]
    pattern = r"interrupted after step (\d+), to resume: python -m qnmixer.train resume=run"
    (last_step,) = re.findall(pattern, lines[-1])
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["status"], "error" in results) == ("interrupted", False)

    arguments = ["resume=run", f"trainer.max_steps={int(last_step) + 5}"]
    resumed_session = in_terminal([*warm.under, *train, *arguments], cwd=tmp_path, env=environment)
    assert resumed_session.code == 0, resumed_session.text
    lines = resumed_session.text.splitlines()
    assert lines[0].startswith("resuming the run in ")
    assert f"resumed at step {last_step} of {int(last_step) + 5}" in lines
    steps = [
        int(match[1])
        for screen in resumed_session.screens
        for match in re.finditer(r"^step (\d+)/.*━", screen, re.MULTILINE)
    ]
    assert steps[0] == int(last_step)
    assert steps == sorted(steps)

    first_run, second_run = offline_runs(tmp_path)
    assert (first_run.exit_code, second_run.exit_code) == (255, 0)  # what wandb calls interrupted, and done
    for run in (first_run, second_run):  # W&B gets no word of the terminal
        assert not [record for record in run.records if record["type"] in ("output_raw", "output_logger")]
