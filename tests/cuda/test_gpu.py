"""Tests that need a GPU: of its values, memory and time. `make test-gpu` runs them, and ends with one table.

Every body takes the device as a parameter, and runs on the CPU too: none is run first on somebody's GPU.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from notebooks.benchmarks.measuring import Row, medians
from torch import Tensor

from qnmixer.commands.checkup.rank import untrained
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.measurement.build import measure_of
from qnmixer.memory import modes
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.memory.plan import Planner
from qnmixer.module.build import build_module
from qnmixer.parallel.device_memory import MIB, WORKSPACE, on_a_gpu
from qnmixer.parallel.devices import allow_tf32, compile_blocks, has_bf16
from qnmixer.parallel.parallelism import build_precision
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.physics.scan import ScanMatrix
from qnmixer.runs.terminal import Console
from qnmixer.settings.override import override
from qnmixer.settings.run import Config
from qnmixer.training.callbacks import MemoryMonitor
from qnmixer.training.steps import build_trainer

from ..conftest import PHANTOMS, TINY, config_of, metrics
from ..promises.test_gradients_of_one_process import COMPETITORS, MODEL

SMALL = [word for word in TINY if not word.startswith("model.")] + ["data.n_train=8", "data.n_val=3", "data.n_test=4"]
NETWORKS = {"qn_mixer": MODEL} | COMPETITORS
IN_32 = 1e-4
"""Relative error of loss and gradient against those of a CPU in 32. Half precision may add `allowed`."""
ROUNDING = {"32": 0.0, "16-mixed": 2.0**-11, "bf16-mixed": 2.0**-8}
"""Relative error of one rounding."""
FLOOR = "× as long as the bytes take that must be moved, at the speed of the copy"


@cache
def small(model: str, memory: str, precision: str) -> Config:
    """The smallest config of a network; the accelerator is not asked."""
    words = f"{NETWORKS[model]} memory={memory} trainer.precision={precision} noise=field"
    return override(config_of(*SMALL), words)


def loss_and_gradients(config: Config, device: torch.device) -> tuple[float, Tensor]:
    """Loss of the first batch, and its gradient as one vector on the host."""
    allow_tf32(False)
    module = untrained(config).to(device)
    data = SliceDataModule(config.data, measure=measure_of(config))
    batch = data.transfer_batch_to_device(next(iter(data.loader("train"))), device, 0)
    scale = 2.0**10 if config.trainer.precision == "16-mixed" else 1.0
    with build_precision(config.trainer, device.type).forward_context():
        loss = module.training_step(batch, 0)
    (loss.float() * scale).backward()
    gradients = [p.grad.flatten().float().cpu() for p in module.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat(gradients) / scale


@cache
def on_a_cpu(model: str, precision: str = "32") -> tuple[float, Tensor]:
    return loss_and_gradients(small(model, "keep", precision), torch.device("cpu"))


def errors_of(found: tuple[float, Tensor], expected: tuple[float, Tensor]) -> tuple[float, float]:
    """Relative errors of loss and gradient."""
    (loss, gradient), (true_loss, truth) = found, expected
    return abs(loss - true_loss) / true_loss, float((gradient - truth).norm() / truth.norm())


def allowed(model: str, precision: str) -> tuple[float, float]:
    """Thrice the CPU's own errors. Of the loss, one number that can be right by luck, at least one rounding."""
    loss, gradient = errors_of(on_a_cpu(model, precision), on_a_cpu(model))
    return IN_32 + max(3 * loss, ROUNDING[precision]), IN_32 + 3 * gradient


@pytest.mark.parametrize(
    ("model", "memory", "precision"),
    list(product(NETWORKS, ("keep", "recompute", "offload"), ("32", "16-mixed", "bf16-mixed"))),
)
def test_losses_and_gradients_are_those_of_a_cpu(
    device: torch.device, findings: list[Row], monkeypatch: pytest.MonkeyPatch, model: str, memory: str, precision: str
) -> None:
    if precision == "bf16-mixed" and device.type == "cuda" and not has_bf16():
        pytest.skip(f"{torch.cuda.get_device_name()} has no bf16")
    if device.type == "cpu" and model != "qn_mixer" and (memory != "keep" or precision == "32"):
        pytest.skip("on a CPU tests/models/test_networks.py has the memory modes of all networks, to the last bit")
    monkeypatch.setattr(modes, "_SMALLEST_OFFLOADED", 0)
    exact = on_a_cpu(model)
    errors = errors_of(loss_and_gradients(small(model, memory, precision), device), exact)
    findings.append(Row("Relative error of a gradient, to a CPU in 32", f"{model}, {memory}", precision, errors[1]))
    loss, gradient = allowed(model, precision)
    assert errors[0] <= loss
    assert errors[1] <= gradient


@cache
def projector_of(size: int) -> FanBeamProjector:
    return FanBeamProjector(FanBeamGeometry.paper(32, image_size=size))


def test_adjointness_and_gain(device: torch.device, findings: list[Row]) -> None:
    """⟨A x, y⟩ = ⟨x, Aᵀ y⟩; A, Aᵀ and FBP are those of the CPU; FBP gives a disc back."""
    of = "The operator, 64², 32 views"
    projector, moved = projector_of(64), FanBeamProjector(projector_of(64).geometry).to(device)
    x, y = torch.rand(2, 1, 64, 64), torch.rand(2, 1, 32, projector.geometry.n_detectors)
    ax, aty, fbp = (f(z.to(device)).cpu() for f, z in ((moved, x), (moved.adjoint, y), (moved.fbp, y)))
    left, right = (ax.double() * y).sum(), (aty.double() * x).sum()
    error = float((left - right).abs() / left)
    findings.append(Row(of, "⟨A x, y⟩ against ⟨x, Aᵀ y⟩, relative", "", error))
    assert error < 1e-6
    for found, expected in ((ax, projector(x)), (aty, projector.adjoint(y)), (fbp, projector.fbp(y))):
        assert float((found - expected).norm() / expected.norm()) < 1e-5
    axis = torch.linspace(-1, 1, 64, device=device)
    disc = (axis**2 + axis[:, None] ** 2 < 0.25).float()[None, None]
    inside = axis**2 + axis[:, None] ** 2 < 0.15
    gain = float(moved.fbp(moved(disc))[0, 0][inside].mean())
    findings.append(Row(of, "FBP of a disc of 1", "", gain))
    assert gain == pytest.approx(1, abs=0.02)


@contextmanager
def waits_are_errors(device: torch.device) -> Iterator[None]:
    """Within it torch raises for whatever makes the host wait for the queue of a GPU."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


class _OneStep(Callback):
    """Runs the third step, from the arrival of its batch, under `waits_are_errors`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.done = device, False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self._watching = waits_are_errors(self.device)
            self._watching.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self._watching.__exit__(None, None, None)
            self.done = True


def trained(config: Config, device: torch.device, folder: Path, *callbacks: Callback) -> L.Trainer:
    """Trains as `fit` does, without validation and loggers."""
    accelerator = "cuda" if device.type == "cuda" else "cpu"
    no_validation = {"val_every_n_steps": None, "limit_val_batches": 0}
    t = config.trainer.model_copy(update={"accelerator": accelerator, "devices": 1} | no_validation)
    config = config.changed(trainer=t)
    L.seed_everything(0, verbose=False)
    module = build_module(config)
    apply_memory_mode(module.network, config.memory)
    if config.compile:
        compile_blocks(module.network)
    trainer = build_trainer(config, folder, callbacks, [])
    trainer.fit(module, datamodule=SliceDataModule(config.data, measure=measure_of(config)))
    return trainer


@pytest.mark.parametrize("memory", ["keep", "recompute", "offload"])
def test_a_step_waits_for_nothing(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    if device.type == "cpu" and memory != "keep":
        pytest.skip("one setting shows on a CPU that the body runs")
    monkeypatch.setattr(modes, "_SMALLEST_OFFLOADED", 0)
    config = override(small("qn_mixer", memory, "32"), "trainer.log_every_n_steps=100")
    callback = _OneStep(device)
    trained(config, device, tmp_path, callback)
    assert callback.done


def size_for(device: torch.device) -> list[str]:
    """Overrides: on a GPU the default network."""
    if device.type == "cuda":
        return ["data.n_train=64", "logger=csv", "data.num_workers=2", "trainer.log_every_n_steps=100"]
    return [*SMALL, *MODEL.split()]


@pytest.mark.parametrize(
    "overrides", ["", "memory=recompute", "memory=offload", "trainer.precision=16-mixed"], ids=lambda it: it or "keep"
)
def test_the_measured_peak_is_that_of_the_plan(
    device: torch.device, findings: list[Row], tmp_path: Path, overrides: str
) -> None:
    """On a GPU of the default network, with what cuBLAS and the allocator take."""
    if device.type == "cpu" and (not overrides or "offload" in overrides):
        pytest.skip("on a CPU tests/training/test_memory_monitor.py has it, and the host is the device")
    config = override(config_of(*size_for(device), "trainer.max_steps=3"), overrides)
    planned = Planner(config).estimate(config).peak
    if device.type == "cuda":
        planned = on_a_gpu(planned, WORKSPACE if torch.cuda.get_device_capability()[0] >= 9 else 8.1 * MIB)
    monitor = MemoryMonitor(Console(quiet=True))
    trained(config, device, tmp_path, monitor)
    ratio = monitor.measured_mib * MIB / planned
    findings.append(Row(f"Measured peak : plan for a GPU, T = {config.model.T}", overrides or "keep", "", ratio))
    assert ratio == pytest.approx(1, abs=0.05)


def bytes_moved(projector: FanBeamProjector, matrix: ScanMatrix, batch: int) -> int:
    """Matrix, images and sinograms, once each."""
    geometry = projector.geometry
    numbers = batch * (geometry.image_size**2 + geometry.n_views * geometry.n_detectors)
    return sum(buffer.nbytes for buffer in matrix.buffers()) // 2 + numbers * 4


ROUNDS = 9


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / medians({"": lambda: target.copy_(source)}, ROUNDS)[""]


@pytest.mark.parametrize("batch", [1, 4])
def test_time_of_the_operator(device: torch.device, findings: list[Row], batch: int) -> None:
    size = 256 if device.type == "cuda" else 64
    projector = FanBeamProjector(projector_of(size).geometry).to(device)
    x = torch.rand(batch, 1, size, size, device=device)
    y, bandwidth = projector(x), copy_bandwidth(device)
    of = f"Time of the operator, {size}², 32 views ({FLOOR})"
    floor = bytes_moved(projector, projector._rays, batch) / bandwidth
    findings.append(Row(of, "copy", f"batch {batch}", bandwidth / 1e9, "GB/s"))
    for name, seconds in medians({"A": lambda: projector(x), "Aᵀ": lambda: projector.adjoint(y)}, ROUNDS).items():
        findings.append(Row(of, name, f"batch {batch}", seconds * 1e3, "ms", seconds / floor))
        assert seconds > 0


class _Clock(Callback):
    """Seconds of each step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks = device, list[float]()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())


STEPS = [
    "", "data.batch_size=4", "data.batch_size=16", "memory=recompute", "trainer.precision=16-mixed",
    "trainer.tf32=true",
]  # fmt: skip
COMPILED = ["compile=true", "compile=true data.batch_size=4", "compile=true data.batch_size=16"]


@pytest.mark.parametrize("overrides", [*STEPS, *COMPILED])
def test_time_of_a_step(device: torch.device, findings: list[Row], tmp_path: Path, overrides: str) -> None:
    """The floor: the peak of the step's memory, read and written once."""
    if device.type == "cpu" and overrides:
        pytest.skip("one setting shows on a CPU that the body runs")
    n_steps = 20 if device.type == "cuda" else 4
    config = override(config_of(*size_for(device), f"trainer.max_steps={n_steps}"), overrides)
    clock, monitor = _Clock(device), MemoryMonitor(Console(quiet=True))
    trained(config, device, tmp_path, monitor, clock)
    steps = [after - before for before, after in zip(clock.marks[1:-1], clock.marks[2:], strict=True)]
    floor = 2 * monitor.measured_mib * 2**20 / copy_bandwidth(device)
    seconds = statistics.median(steps)
    of = f"A training step, T = {config.model.T}, {config.data.image_size}² ({FLOOR})"
    findings.append(Row(of, overrides or "keep, 32", "", seconds * 1e3, "ms", seconds / floor))
    assert seconds > 0


DEVICES_LONG = [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda", marks=pytest.mark.cuda)]


def train(folder: Path, accelerator: str, *overrides: str) -> list[float]:
    """The losses of a run of the real command, which resumes what is in the folder."""
    new = [*TINY, *PHANTOMS, f"trainer.accelerator={accelerator}", f"hydra.run.dir={folder}"]
    words = [f"resume={folder}"] if folder.exists() else new
    subprocess.run([sys.executable, "-m", "qnmixer.train", *words, *overrides], check=True, cwd=folder.parent)
    return metrics(folder)["train/loss"]


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", DEVICES_LONG)
def test_a_deterministic_run_resumes_bit_for_bit(accelerator: str, tmp_path: Path) -> None:
    options = ["trainer.deterministic=true", "noise=field", "schedule=constant"]
    whole = train(tmp_path / "whole", accelerator, *options)
    train(tmp_path / "parts", accelerator, *options, "trainer.max_steps=2")
    assert train(tmp_path / "parts", accelerator, "trainer.max_steps=4") == whole
    states = [
        torch.load(tmp_path / run / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")["state_dict"]
        for run in ("whole", "parts")
    ]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
@pytest.mark.parametrize("accelerator", DEVICES_LONG)
def test_all_devices_together_learn_what_one_does(accelerator: str, strategy: str, tmp_path: Path) -> None:
    n = torch.cuda.device_count() if accelerator == "cuda" else 2
    if n < 2:
        pytest.skip("one GPU: there is nothing to share")
    n = min(n, 8)
    T = f"model.n_iterations={n}"
    one = train(tmp_path / "one", accelerator, T, f"data.batch_size={n}", "trainer.devices=1")
    options = [f"strategy={strategy}", f"trainer.devices={n}", "data.batch_size=1"]
    together = train(tmp_path / "all", accelerator, T, *options)
    assert together == pytest.approx(one, rel=1e-4)
