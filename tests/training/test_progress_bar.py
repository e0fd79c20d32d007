"""The output of a run while it trains: lines in a log, a bar on a terminal."""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from qnmixer.config import Config, parse
from qnmixer.config.compose import compose
from qnmixer.reports import progress
from qnmixer.tracking.metrics_file import read_metrics
from qnmixer.tracking.run import Run
from qnmixer.training.fit import fit

from ..conftest import PHANTOMS, TINY, Command
from ..terminal import in_terminal
from ..warm import Warm

TinyConfig = Callable[..., Config]


@pytest.fixture
def lines(
    tiny_config: TinyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """lines(*overrides): those that a run prints of its steps, one being due after each of them."""
    monkeypatch.setattr(progress, "SHORTEST", 0.0)
    monkeypatch.setattr(progress, "LONGEST", 0.0)

    def train(*overrides: str, resume: Path | None = None, plain: bool = True) -> list[str]:
        words = [*overrides, "~callbacks.pictures", "test_after_training=false"]
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) if resume is None else resume
        if resume is not None:
            words.append(f"resume={resume}")
        fit(tiny_config(*words), Run(folder, words, None if resume is None else str(resume)))
        output = capsys.readouterr().out
        assert not plain or not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", output)  # no control character but newline
        return re.findall(r"resumed at step .*|step \d+(?:/\d+)? · .*", output)

    return train


def test_a_log_has_whole_lines_by_optimizer_steps(lines: Callable[..., list[str]], tmp_path: Path) -> None:
    """Of two batches each, over two epochs, of which there is no word."""
    found = lines(
        "trainer.accumulate_grad_batches=2", "data.batch_size=1", "data.n_train=4", "trainer.log_every_n_steps=1"
    )
    rest = r" · \d+\.\d+ samples/s( · \d s left)?"
    expected = [r"step 1/4 · loss 0\.\d+"]
    last = ""
    for step in (2, 3, 4):
        expected.append(rf"step {step}/4 · loss 0\.\d+{last}{rest}")
        if step != 3:
            expected += [rf"step {step}/4 · validating {n}/3{last}{rest}" for n in (1, 2, 3)]
            expected.append(rf"step {step}/4 · val PSNR \d\d\.\d\d dB · SSIM \d\d\.\d\d{rest}")
            last = r" · last val PSNR \d\d\.\d\d dB"
    assert len(found) == len(expected)
    for line, pattern in zip(found, expected, strict=True):
        assert re.fullmatch(pattern, line), line
    rows = read_metrics(tmp_path / "0" / "metrics.csv")
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    shown = [float(m[1]) for line in found if (m := re.search(r"loss (\S+)", line))]
    assert shown == [float(f"{mean(losses[: n + 1]):#.3g}") for n in range(4)]
    psnr = [f"{float(row['val/psnr']):.2f}" for row in rows if row["val/psnr"]]
    assert re.findall(r"· val PSNR (\S+)", "\n".join(found)) == psnr


class Slow(Callback):
    """Takes half a second for a validation, and a tenth for a step."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.1)

    def on_validation_start(self, *_: Any) -> None:
        time.sleep(0.5)


def test_speed_is_without_validations_and_the_time_left_with_them(lines: Callable[..., list[str]]) -> None:
    """Of 0.1 s a step, and 0.5 s for each two of them: 11 steps are left after the first validation."""
    slow = f"+callbacks.slow._target_={__name__}.Slow"
    (first, *_) = [line for line in lines(slow, "trainer.max_steps=12") if "val PSNR" in line and "last" not in line]
    speed, left = re.search(r"([\d.]+) samples/s · (\d+) s left", first).groups()  # type: ignore[union-attr]
    assert float(speed) < 2 / 0.1
    assert int(left) >= round(10 * (2 / float(speed) + 0.25)) - 1


def test_it_is_known_what_is_left(lines: Callable[..., list[str]]) -> None:
    epochs = lines("trainer.max_epochs=1", "trainer.max_steps=-1")
    assert {line.split()[1] for line in epochs} == {f"{n}/4" for n in (1, 2, 3, 4)}
    stopping = lines("callbacks=early_stopping")
    assert [line for line in stopping if "left" in line and "at most " not in line] == []
    assert any("at most " in line for line in stopping)
    short = ["trainer.max_steps=100000", "+trainer.max_time=00:00:00:03", "trainer.val_every_n_steps=null"]
    by_time = lines(*short)
    assert {line.split()[1].isdigit() for line in by_time if "left" in line} == {True}  # no total: it is never reached
    assert max(int(m[1]) for line in by_time if (m := re.search(r"(\d+) s left", line))) <= 3


def test_what_is_logged_for_a_bar_is_shown(lines: Callable[..., list[str]]) -> None:
    found = lines(f"+callbacks.logs._target_={__name__}.Logs", "trainer.max_steps=2")
    assert [line.split(" · ")[2] for line in found if "loss" in line] == ["mine 7.00", "mine 7.00"]


class Logs(Callback):
    """Logs a value for the bar."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        pl_module.log("mine", 7.0, prog_bar=True)


@pytest.mark.parametrize(
    "override",
    ["+trainer.enable_progress_bar=false", "+callbacks.bar._target_=lightning.pytorch.callbacks.TQDMProgressBar"],
)
def test_without_a_bar_and_with_another_one_only_validations_have_lines(
    lines: Callable[..., list[str]], override: str
) -> None:
    found = lines(override, plain="TQDM" not in override)
    assert [line.split(" · ")[0] for line in found] == ["step 2/4", "step 4/4"]


def test_a_network_that_does_not_learn_has_no_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in TINY if not word.startswith("model.")]
    fit(parse(compose("train", [*words, *PHANTOMS, "model=fbp"])), Run(tmp_path))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "val PSNR" in line]
    assert re.fullmatch(r"val PSNR \d+\.\d\d dB · SSIM \d+\.\d\d", line)


def test_a_resumed_run_continues_the_count(lines: Callable[..., list[str]], tmp_path: Path) -> None:
    lines("trainer.max_steps=3", "trainer.val_every_n_steps=10")
    first, *found = lines("trainer.max_steps=5", "trainer.val_every_n_steps=10", resume=tmp_path / "0")
    assert first == "resumed at step 3 of 5"
    assert [line.split(" · ")[0] for line in found if "loss" in line] == ["step 4/5", "step 5/5"]
    psnr = [row["val/psnr"] for row in read_metrics(tmp_path / "0" / "metrics.csv") if row["val/psnr"]]
    assert f" · last val PSNR {float(psnr[0]):.2f} dB" in found[0]  # of the validation before, until the next


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
def test_a_terminal_has_one_bar_over_the_run_its_interruption_and_its_resume(
    tmp_path: Path, offline_runs: Callable[[Path], list[Any]], warm: Warm
) -> None:
    """The real command, stopped by Ctrl-C; W&B gets the lines of a log, and no other."""
    (tmp_path / "noisy.py").write_text(NOISY)
    train = ["-m", "qnmixer.train"]
    environment = {"OMP_NUM_THREADS": "1"}
    words = [  # so many slices to validate that it takes longer than a bar waits to be drawn again
        *TINY, "data.n_train=8", "data.n_val=80", "data.n_test=2",
        "logger=wandb", "trainer.max_steps=5000", "trainer.val_every_n_steps=10",
        "+callbacks.noisy._target_=noisy.Noisy", "hydra.run.dir=run",
    ]  # fmt: skip
    alone = [sys.executable, *train, *words]
    seen = in_terminal(alone, cwd=tmp_path, env=environment, interrupt_at=r"step 2[1-9]/5000 .*loss")
    assert seen.code == 130
    bars = [line for screen in seen.screens for line in screen.splitlines() if "━" in line]
    assert all(re.match(r"step \d+/5000 ", line) for line in bars)
    assert any(re.search(r"━ loss 0\.\S+ · val/psnr \d\d\.\d\d · \S+ samples/s · [\d:]+ left$", line) for line in bars)
    assert any(re.search(r"━ validating [1-9]\d*/40 · ", line) for line in bars)
    assert {sum("━" in line for line in screen.splitlines()) for screen in seen.screens} == {0, 1}

    lines = [line for line in seen.text.splitlines() if line]
    assert lines[0].startswith("starting a run in ")
    assert not [line for line in lines if "━" in line or "Epoch" in line or "v_num" in line]
    assert {"printed by a callback", "printed by the module"} <= set(lines)
    assert any(line.endswith("UserWarning: warned by a callback") for line in lines)
    assert any(re.fullmatch(r"memory: \d+ MiB in tensors at the peak of a step", line) for line in lines)
    assert [line.split(" · ")[:1] for line in lines if "val PSNR" in line][:2] == [["step 10/5000"], ["step 20/5000"]]
    (end,) = re.findall(r"^interrupted after step (\d+), to resume: ", lines[-1])

    more = ["resume=run", f"trainer.max_steps={int(end) + 5}", "trust=noisy"]
    again = in_terminal([*warm.under, *train, *more], cwd=tmp_path, env=environment)
    assert again.code == 0, again.text
    lines = again.text.splitlines()
    assert lines[0].startswith("resuming the run in ")
    assert f"resumed at step {end} of {int(end) + 5}" in lines
    steps = [int(m[1]) for screen in again.screens for m in re.finditer(r"^step (\d+)/.*━", screen, re.MULTILINE)]
    assert steps[0] == int(end)
    assert steps == sorted(steps)

    for part in offline_runs(tmp_path):
        output = "".join(it["output_logger"]["line"] for it in part.records if it["type"] == "output_logger")
        assert not [it for it in part.records if it["type"] == "output_raw"]
        assert "\x1b" not in output
        assert "\r" not in output
        assert "━" not in output
        assert re.search(r"^step \d+/\d+ · val PSNR ", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.long
def test_of_several_processes_one_speaks(start: Callable[..., Command]) -> None:
    options = ["strategy=ddp", "trainer.devices=2", "trainer.val_every_n_steps=4", "data.n_train=6"]
    code, stdout, stderr = start(*options).outcome()
    assert (code, stderr) == (0, "")
    lines = stdout.splitlines()
    assert lines[0].startswith("starting a run in ")
    assert sum(line.startswith("starting a run in ") for line in lines) == 1
    assert [line.split(" · ")[0] for line in lines if line.startswith("step ") and "val PSNR" in line] == ["step 4/4"]
