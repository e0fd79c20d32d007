"""The output of a run while it trains: lines in a log, a bar on a terminal."""

import re
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
from qnmixer.fit import fit
from qnmixer.reports import progress
from qnmixer.tracking.metrics_file import read_metrics
from qnmixer.tracking.run import Run

from ..conftest import PHANTOMS, TINY

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
