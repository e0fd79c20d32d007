import csv
import ctypes
import io
import math
import mmap
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from torch import Tensor

from qnmixer.engine.batch import Batch
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.memory.leaks import LeakWatch
from qnmixer.engine.memory.plan import Planner
from qnmixer.engine.training.callbacks import IteratePictures
from qnmixer.engine.training.memory_monitor import MemoryMonitor
from qnmixer.engine.training.weight_averaging import MeanWeights
from qnmixer.module import ReconstructionModule

MIB = 2**20
LEVEL = 400.0  # MiB
N_STEPS = 2000


Series = Callable[[int], float]
TinyModule = Callable[..., ReconstructionModule]


def fresh(n: int) -> Tensor:
    """n float32, all pages written, straight from the system: malloc might use what earlier tests have freed."""
    pages = mmap.mmap(-1, 4 * n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32).fill_(1.0)


def noise(step: int) -> float:
    return random.Random(step).uniform(0, 4)


def wandering(seed: int) -> Series:
    """A slow random walk that a level pulls back, 2 MiB around it."""
    draw, values = random.Random(seed), [0.0]
    for _ in range(N_STEPS):
        values.append(0.98 * values[-1] + math.sqrt(1 - 0.98**2) * draw.gauss(0, 2))
    return lambda step: LEVEL + values[step]


HEALTHY: dict[str, Series] = {
    "noise": lambda step: LEVEL + noise(step),
    "sawtooth of 33 steps": lambda step: LEVEL + 10 * (step % 33),
    "up in warm-up": lambda step: LEVEL + 50 * min(step, 20),
    "one jump, then up to a level": lambda step: LEVEL + (step > 130) * (500 - 50 * math.exp((130 - step) / 30)),
    "jumps a validation, few and far between": lambda step: LEVEL + 6 * (step // 100),
    "a dip": lambda step: LEVEL - max(0, 300 - abs(step - 500)),
    **{f"random walk {seed}": wandering(seed) for seed in range(3)},
}

LEAKING: dict[str, tuple[Series, int]] = {
    "steady": (lambda step: LEVEL + step, 150),
    "under noise": (lambda step: LEVEL + step + noise(step), 150),
    "under a sawtooth": (lambda step: LEVEL + step + 30 * (step % 7), 150),
    "in chunks of 16 MiB": (lambda step: LEVEL + 16 * (step // 16), 190),
    "across a jump": (lambda step: LEVEL + step + 500 * (step > 60), 250),
    "from step 1000 on": (lambda step: LEVEL + max(0, step - 1000), 1150),
}


def leaks_found(watch: LeakWatch, series: Series) -> list[tuple[int, float]]:
    """Step, and MiB a step, of each leak that is reported."""
    leaks = ((step, watch.update(int(series(step) * MIB))) for step in range(1, N_STEPS + 1))
    return [(step, leak.bytes_per_step / MIB) for step, leak in leaks if leak]


def test_a_healthy_run_is_no_leak() -> None:
    assert [name for name, series in HEALTHY.items() if leaks_found(LeakWatch(), series)] == []


def test_warm_up_may_be_long() -> None:
    assert leaks_found(LeakWatch(), lambda step: LEVEL + min(step, 300))
    assert not leaks_found(LeakWatch(warm_up=300), lambda step: LEVEL + min(step, 300))


def test_a_leak_is_found_once() -> None:
    for name, (held, limit) in LEAKING.items():
        ((step, mib_per_step),) = leaks_found(LeakWatch(), held)
        assert step <= limit, name
        assert mib_per_step == pytest.approx(1, rel=0.2), name


def test_garbage_in_cycles_is_collected_and_is_no_leak() -> None:
    """Python looks for it seldom: the pictures of 4 validations were kept, 5.6 MiB each (measured)."""
    collected, step = [0], 0

    def held(now: int) -> float:
        nonlocal step
        step = now
        return LEVEL + step - collected[-1]

    assert not leaks_found(LeakWatch(collect=lambda: collected.append(step)), held)
    assert len(collected) > 1


class KeepsLosses(ReconstructionModule):
    """The usual mistake: after backward the graph's saved tensors are gone, its nodes are not."""

    losses: list[Tensor]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss)
        return loss


class StopsAtLeak(Callback):
    """Saves the steps after the leak was found."""

    def __init__(self, watching: MemoryMonitor) -> None:
        self.watching = watching

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = self.watching.leak is not None


class Takes(Callback):
    """64 MiB for a moment, in a hook and when the trainer is as told."""

    def __init__(self, hook: str, when: Callable[[L.Trainer], bool] = lambda trainer: True) -> None:
        self.when = when
        setattr(self, hook, self._take)

    def _take(self, trainer: L.Trainer, *_: Any) -> None:
        if self.when(trainer):
            fresh(16 * MIB)


def takes_in_step(step: int) -> Takes:
    return Takes("on_before_optimizer_step", lambda trainer: trainer.global_step + 1 == step)


def takes_after_batch(n: int) -> Takes:
    return Takes("on_after_backward", lambda trainer: trainer.fit_loop.batch_idx == n)


def train(module: ReconstructionModule, folder: Path, *callbacks: Callback, **options: Any) -> list[dict[str, str]]:
    """Rows of metrics.csv that hold memory."""
    options = {"limit_val_batches": 0, "log_every_n_steps": 1, "accelerator": "cpu", **options}
    trainer = L.Trainer(
        logger=CSVLogger(folder, name=""), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder, callbacks=list(callbacks),
        **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=SliceDataModule(module.config.data))
    rows = csv.DictReader((Path(str(trainer.log_dir)) / "metrics.csv").read_text().splitlines())
    return [row for row in rows if row["memory/allocated_mib"]]


def monitor() -> MemoryMonitor:
    return MemoryMonitor(Console(file=io.StringIO(), width=80))


def lines(watching: MemoryMonitor) -> list[str]:
    assert isinstance(watching.console.file, io.StringIO)
    return watching.console.file.getvalue().splitlines()


@pytest.fixture
def compact_heap() -> None:
    """Hand free pages back to the system: a leak would first fill, unseen, what earlier tests left free."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc has it
        trim(0)


@pytest.mark.usefixtures("compact_heap")
def test_losses_kept_with_their_graph_are_found(tiny_module: TinyModule, tmp_path: Path) -> None:
    watching, module = monitor(), tiny_module("model.n_iterations=4")
    watching._watch = LeakWatch(warm_up=16, window=10, n_windows=3, floor=2 * MIB, evenness=0.2)  # as doctor's
    module.__class__ = KeepsLosses
    module.losses = []
    train(module, tmp_path, watching, StopsAtLeak(watching), max_steps=200)
    assert watching.leak is not None
    assert 0.15 < watching.leak.bytes_per_step / MIB < 1
    _, line = lines(watching)
    assert line.startswith("memory: a leak? The memory at the end of a step has grown for 30 steps, from ")
    assert ".detach()" in line


@pytest.mark.slow
@pytest.mark.long
def test_the_same_run_without_the_leak_stays_silent(tiny_module: TinyModule, tmp_path: Path) -> None:
    """With a validation and its picture every 20 steps: of all that is healthy, what looks most like a leak."""
    watching, pictures = monitor(), IteratePictures(1, tmp_path / "pictures")
    module = tiny_module("model.n_iterations=4")
    often = {"val_check_interval": 20, "check_val_every_n_epoch": None, "limit_val_batches": 1}
    train(module, tmp_path, watching, pictures, max_steps=300, **often)
    assert watching.leak is None
    assert len(lines(watching)) == 1


def test_the_metrics_have_each_optimizer_step_and_the_peak_also_in_later_epochs(
    tiny_module: TinyModule, tmp_path: Path
) -> None:
    """Steps of two batches, epochs of two steps, a row every three. On a CPU one step is measured."""
    watching = monitor()
    rows = train(tiny_module(), tmp_path, watching, max_steps=6, accumulate_grad_batches=2, log_every_n_steps=3)
    assert [float(row["memory/peak_mib"]) for row in rows] == [pytest.approx(watching.measured_mib)] * 2
    assert "memory/device_used_mib" not in rows[0]
    for row in rows:
        assert 50 < float(row["memory/allocated_mib"]) <= float(row["memory/reserved_mib"])
    assert len(lines(watching)) == 1


@pytest.mark.parametrize("overrides", [[], ["data.simulation_factor=2"], ["callbacks=ema"]])
def test_after_the_second_step_a_line_says_what_the_plan_says_too(
    tiny_module: TinyModule, tmp_path: Path, overrides: list[str]
) -> None:
    watching, module = monitor(), tiny_module("model.n_iterations=4", *overrides)
    averaging = [MeanWeights()] if "ema" in module.config.callbacks else []
    rows = train(module, tmp_path, watching, *averaging, max_steps=4, gradient_clip_val=1.0)
    assert watching.measured_mib is not None
    assert lines(watching) == [f"memory: {watching.measured_mib:.0f} MiB in tensors at the peak of a step"]
    assert watching.record() == {"measured_step": watching.measured_mib}
    in_metrics = [row["memory/peak_mib"] for row in rows]
    assert in_metrics[0] == ""
    assert float(in_metrics[1]) == pytest.approx(watching.measured_mib)
    planned = Planner(module.config).estimate(module.config).peak / MIB
    assert watching.measured_mib == pytest.approx(planned, rel=0.02)


def test_with_compiled_code_there_is_no_figure(tiny_module: TinyModule, tmp_path: Path) -> None:
    """The tracker would not see what that code takes. (Nothing is compiled here.)"""
    watching = monitor()
    train(tiny_module("compile=true"), tmp_path, watching, max_steps=3)
    assert (watching.measured_mib, lines(watching)) == (None, [])


def test_a_run_that_fails_while_it_is_measured_counts_no_further(tiny_module: TinyModule, tmp_path: Path) -> None:
    watching = monitor()

    def fails(trainer: L.Trainer) -> bool:
        if trainer.global_step == 1:
            raise RuntimeError("refused")
        return False

    with pytest.raises(RuntimeError, match="refused"):
        train(tiny_module(), tmp_path, watching, Takes("on_before_optimizer_step", fails), max_steps=3)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def measured(module: ReconstructionModule, folder: Path, *callbacks: Callback) -> float:
    """MiB that the line after the second step says."""
    watching = monitor()
    train(module, folder, watching, *callbacks, max_steps=2, accumulate_grad_batches=2)
    assert watching.measured_mib is not None
    return watching.measured_mib


def test_it_is_the_second_step_with_all_its_batches_and_the_buffers_that_are_measured(
    tiny_module: TinyModule, tmp_path: Path
) -> None:
    plain = measured(tiny_module(), tmp_path)
    heavier = tiny_module()
    heavier.register_buffer("operator", fresh(16 * MIB))
    assert measured(heavier, tmp_path) - plain == pytest.approx(64, abs=0.1)
    assert measured(tiny_module(), tmp_path, takes_in_step(1)) == pytest.approx(plain, abs=0.1)
    # Two batches a step: after the first, and after the second batch of the second step.
    for n in (2, 3):  # the two batches of the second step
        assert measured(tiny_module(), tmp_path, takes_after_batch(n)) - plain == pytest.approx(64, abs=2)
