"""Axes and speed in every row of the metrics, and the lines of a run in a log. tests/promises has the bar."""

import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, LambdaCallback

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.fit import fit
from qnmixer.module.build import build_module
from qnmixer.runs import terminal
from qnmixer.runs.loggers import build_loggers
from qnmixer.runs.records import read_metrics
from qnmixer.runs.run import Run
from qnmixer.settings.run import Config
from qnmixer.training.callbacks import build_callbacks
from qnmixer.training.steps import build_trainer
from qnmixer.training.terminal import print_start

from ..conftest import tiny_config

# 7 slices, 4 an optimizer step: every second step is of 3.
SEVEN = ["data.n_train=7", "data.n_val=3", "data.batch_size=2", "trainer.accumulate_grad_batches=2"]


class Validated(Callback):
    """Keeps the rows that were there before each step."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.csv"
        self.rows: dict[int, list[dict[str, str]]] = {}

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.rows.setdefault(trainer.global_step, read_metrics(self.path))


def train(config: Config, folder: Path, *callbacks: Callback) -> None:
    """Train with these callbacks and those of the config alone; metrics.csv is in the folder."""
    L.seed_everything(0, verbose=False)
    trainer = build_trainer(
        config, folder, [*callbacks, *build_callbacks(config.callbacks, {})], build_loggers(config, folder, [])
    )
    trainer.fit(build_module(config), datamodule=SliceDataModule(config.data))


def test_a_row_has_the_step_of_the_checkpoint_that_it_goes_with(tmp_path: Path) -> None:
    """A checkpoint of k steps goes with the rows up to k: those of training and of validation after step k."""
    watch = Validated(tmp_path)
    train(tiny_config(*SEVEN, "trainer.max_steps=5", "trainer.val_every_n_steps=2"), tmp_path, watch)
    for global_step, rows in watch.rows.items():
        places = [(int(row["step"]), bool(row.get("val/psnr"))) for row in rows]
        expected = [(1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]
        assert places == [place for place in expected if place[0] <= global_step]
    assert [(int(row["step"]), float(row["samples"])) for row in read_metrics(watch.path)] == [
        (1, 4), (2, 7), (2, 7), (3, 11), (4, 14), (4, 14), (5, 18)
    ]  # fmt: skip


def test_the_scaler_skips_a_step_that_overflows(tmp_path: Path) -> None:
    """Its norm is not the largest."""

    def overflow(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 1:
            next(p for p in pl_module.parameters() if p.grad is not None).grad.fill_(math.inf)

    callback = LambdaCallback(on_after_backward=overflow)
    train(tiny_config("trainer.precision=16-mixed", "trainer.max_steps=3"), tmp_path, callback)
    first, *others = (row for row in read_metrics(tmp_path / "metrics.csv") if row["train/grad_norm"])
    assert float(first["train/loss_scale"]) == 65536
    assert float(first["train/lr"]) == pytest.approx(1e-3)
    for name in ("train/grad_norm", "train/lambda_0", "train/samples_per_second"):
        assert float(first[name]) > 0
    norms = [float(row["train/grad_norm"]) for row in (first, *others)]
    assert [math.isfinite(norm) for norm in norms] == [True, False, True]
    assert float(others[-1]["train/grad_norm_max"]) == max(filter(math.isfinite, norms))


@pytest.fixture
def lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """lines(*overrides): those that a run prints of its steps, one being due after each of them."""
    monkeypatch.setattr(terminal, "SECONDS_TO_LINE", 0.0)

    def train(*overrides: str, resume: Path | None = None, plain: bool = True) -> list[str]:
        words = [*overrides, "test_after_training=false"]
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) if resume is None else resume
        if resume is not None:
            words.append(f"resume={resume}")
        fit(tiny_config(*words), Run(folder, words, None if resume is None else str(resume)))
        output = capsys.readouterr().out
        assert not plain or not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", output)  # no control character but newline
        return re.findall(r"resumed at step .*|step \d+(?:/\d+)?(?: · .*)?", output)

    return train


def test_a_log_has_whole_lines_by_optimizer_steps(lines: Callable[..., list[str]], tmp_path: Path) -> None:
    """Of two batches each, over two epochs, of which there is no word. Then it resumes, and counts on."""
    steps = ["trainer.accumulate_grad_batches=2", "data.batch_size=1", "data.n_train=4", "trainer.log_every_n_steps=1"]
    found = lines(*steps, "trainer.max_epochs=2", "trainer.max_steps=-1")
    speed, left = r" · \d+\.\d+ samples/s", r" · 0:00:\d\d left"
    last, expected = "", ["step 0/4"]
    for step in (1, 2, 3, 4):
        rest = speed + left * (step < 4)
        expected.append(rf"step {step}/4 · loss 0\.\d+{last}{rest}")
        if step in (2, 4):
            expected += [rf"step {step}/4 · validating {n}/3{last}{rest}" for n in (1, 2, 3)]
            expected.append(rf"step {step}/4 · val PSNR \d\d\.\d\d dB · SSIM \d\d\.\d\d{rest}")
            last = r" · val/psnr \d\d\.\d\d"
    assert len(found) == len(expected)
    for line, pattern in zip(found, expected, strict=True):
        assert re.fullmatch(pattern, line), line
    rows = read_metrics(tmp_path / "0" / "metrics.csv")
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    shown = [float(m[1]) for line in found if (m := re.search(r"loss (\S+)", line))]
    assert shown == [float(f"{loss:#.3g}") for loss in losses]
    psnr = [f"{float(row['val/psnr']):.2f}" for row in rows if row["val/psnr"]]
    assert re.findall(r"· val PSNR (\S+)", "\n".join(found)) == psnr

    first, *more = lines(*steps, "trainer.max_steps=6", resume=tmp_path / "0")
    assert first == "resumed at step 4 of 6"
    assert [line.split(" · ")[0] for line in more if "loss" in line] == ["step 5/6", "step 6/6"]


@pytest.mark.parametrize(("words", "line"), [
    (["trainer.max_steps=-1", "trainer.max_epochs=1"], "training ends after 1 epoch"),
    (["trainer.max_steps=1"], "training ends after 1 step"),
    (["trainer.max_steps=2", "trainer.max_epochs=3"], "training ends after 2 steps or 3 epochs"),
    (["compile=true"], "compiling in the first step: that takes minutes on a CPU, and compile=false takes none"),
])  # fmt: skip
def test_limit_and_compiler_are_told(tmp_path: Path, words: list[str], line: str) -> None:
    config, text = tiny_config(*words), io.StringIO()
    trainer, data = build_trainer(config, tmp_path, [], []), SliceDataModule(config.data)
    data.setup("fit")
    print_start(config, build_module(config), data, trainer, terminal.Console(file=text, width=200))
    assert line in text.getvalue().splitlines()


def test_a_network_knows_the_seed_and_the_optimizer_step(tmp_path: Path) -> None:
    """By which it draws random turns: the same in both batches of a step, and another one in the next."""
    seen: list[tuple[int, int]] = []
    watch = LambdaCallback(on_after_backward=lambda _, module: seen.append(module.network.step_key))
    train(tiny_config(*SEVEN, "trainer.max_steps=3", "seed=5"), tmp_path, watch)
    assert seen == [(5, 0), (5, 0), (5, 1), (5, 1), (5, 2), (5, 2)]
