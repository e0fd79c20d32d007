"""Data and start-up: the loader alone, the share of a training step that waits for it, and the time to the first step.

    python tests/benchmarks/bench_data.py [--root FOLDER_OF_DICOM] [--json PATH]

The loader alone is in slices a second, by source and number of workers, once workers run. Training is that of the demo
and of the default, with the default loader: from the end of one step to the end of the next, and the part of it in
which Lightning waits for the next batch. Start-up is that of real commands, from the start of python to the first row
of metrics.csv, which the end of the first step brings.
"""

import argparse
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import SimpleProfiler
from rich.console import Console
from rich.table import Table

from qnmixer.config import parse
from qnmixer.config.compose import compose
from qnmixer.config.data import DataConfig
from qnmixer.config.run import section
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.files import write_text
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.parallel.devices import resolve_devices
from qnmixer.tracking.loggers import build_loggers
from qnmixer.training.callbacks import build_callbacks
from qnmixer.training.module import ReconstructionModule
from qnmixer.training.trainer import build_trainer

TRAINING = {"demo": ["experiment=demo"], "default": []}
SIZES, WORKERS = (64, 256), (0, 1, 2)
WARM_UP = 2  # steps
HELPS = 5
MINUTE = 60  # seconds
Row = dict[str, Any]


class Ends(Callback):
    """When each batch ended."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter())


class Waits(SimpleProfiler):
    """Times what Lightning does, and prints no table of it."""

    def summary(self) -> str:
        return ""


def time_loader(config: DataConfig, part: str, n_slices: int) -> float:
    """Slices a second of a loader, from its first batch on; starts over where there are fewer slices."""
    loader = SliceDataModule(config).loader(part)
    batches = iter(loader)
    next(batches)
    start, done = time.perf_counter(), 0
    while done < n_slices:
        try:
            done += len(next(batches)["image"])
        except StopIteration:
            batches = iter(loader)
    return done / (time.perf_counter() - start)


def loader_rows(root: str | None, n_slices: int) -> list[Row]:
    """Phantoms, and DICOM from the cache of decoded slices where there is a folder of them."""
    rows: list[Row] = []
    for size in SIZES:
        for n_workers in WORKERS:
            common: dict[str, Any] = {"image_size": size, "num_workers": n_workers}
            sources: list[tuple[DataConfig, str]] = [(section("data", "phantoms", **common), "train")]
            if root is not None:
                sources.append((section("data", "dicom", root=root, split="all", **common), "test"))
            for config, part in sources:
                speed = time_loader(config, part, n_slices)
                rows.append(
                    {"source": config.name, "image_size": size, "workers": n_workers, "slices_per_second": speed}
                )
    return rows


def time_training(name: str, overrides: list[str], n_steps: int) -> Row:
    """Median seconds of a training step, and the share of all steps that waits for data, after `WARM_UP` steps."""
    bare = ["logger=csv", "trainer.val_every_n_steps=1000000", f"trainer.max_steps={n_steps + WARM_UP}"]
    config = resolve_devices(parse(compose("train", [*TRAINING[name], *overrides, *bare])))
    L.seed_everything(config.seed, verbose=False)
    module = ReconstructionModule(config)
    apply_memory_mode(module.network, config.memory)
    ends, waiting = Ends(), Waits()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(
            config, Path(folder), [ends, *build_callbacks(config.callbacks)], build_loggers(config, Path(folder), [])
        )
        trainer.profiler = waiting
        trainer.fit(module, datamodule=SliceDataModule(config.data))
    waits = waiting.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"][WARM_UP : n_steps + WARM_UP]
    steps = [end - start for start, end in zip(ends.seconds[WARM_UP - 1 :], ends.seconds[WARM_UP:], strict=False)]
    return {
        "training": name,
        "image_size": config.data.image_size,
        "iterations": config.model.T,
        "batch": config.data.batch_size,
        "workers": config.data.num_workers,
        "step_s": median(steps),
        "wait_ms": median(waits) * 1e3,
        "waiting_share": sum(waits) / sum(steps),
    }


def time_help() -> float:
    """Median seconds of `python -m qnmixer.train --help`."""
    times = []
    for _ in range(HELPS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "qnmixer.train", "--help"], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return median(times)


def time_first_step(name: str, overrides: list[str]) -> float:
    """Seconds from the start of python to the end of the first training step; the run is stopped then."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.csv"
        command = [sys.executable, "-m", "qnmixer.train", *TRAINING[name], *overrides, "trainer.log_every_n_steps=1"]
        start = time.perf_counter()
        run = subprocess.Popen(
            [*command, "test_after_training=false", f"hydra.run.dir={metrics.parent}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            while not metrics.exists():
                if run.poll() is not None or time.perf_counter() - start > 10 * MINUTE:
                    run.kill()
                    raise RuntimeError(f"{' '.join(command)} came to no step: {run.communicate()[1]}")
                time.sleep(0.01)
            return time.perf_counter() - start
        finally:
            run.send_signal(signal.SIGTERM)
            run.communicate(timeout=MINUTE)


def show(loaders: list[Row], training: list[Row], start: Row) -> None:
    """Print the table."""
    table = Table("what", "setting", "measured", title=f"{os.cpu_count()} cores, {torch.get_num_threads()} threads")
    for row in loaders:
        setting = f"{row['source']}, {row['image_size']}², {row['workers']} workers"
        table.add_row("loader alone", setting, f"{row['slices_per_second']:.0f} slices a second")
    table.add_section()
    for row in training:
        setting = f"{row['training']}, {row['image_size']}², T = {row['iterations']}, batch {row['batch']}"
        table.add_row("training step", setting, f"{row['step_s']:.3f} s")
        table.add_row("waiting for data", setting, f"{100 * row['waiting_share']:.2f} % ({row['wait_ms']:.1f} ms)")
    table.add_section()
    table.add_row("--help", "train", f"{start['help_s']:.2f} s")
    for name, seconds in start["first_step_s"].items():
        table.add_row("first step has ended", name, f"{seconds:.1f} s after the start of python")
    Console().print(table)


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", help="a folder of DICOM, for the loader")
    parser.add_argument("--slices", type=int, default=200, help="of each measurement of the loader")
    parser.add_argument("--steps", type=int, default=15, help="of each training, after the first two")
    parser.add_argument("--trainings", nargs="*", choices=TRAINING, default=list(TRAINING), help="which to run")
    parser.add_argument("--overrides", default="", help="of the trainings")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    arguments = parser.parse_args()
    overrides = arguments.overrides.split()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    loaders = loader_rows(arguments.root, arguments.slices)
    training = [time_training(name, overrides, arguments.steps) for name in arguments.trainings]
    first_steps = {name: time_first_step(name, overrides) for name in arguments.trainings}
    start = {"help_s": time_help(), "first_step_s": first_steps}
    show(loaders, training, start)
    if arguments.json:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        record = {"machine": machine, "loader": loaders, "training": training, "start": start}
        write_text(arguments.json, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
