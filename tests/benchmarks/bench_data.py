"""Data and start-up: the loader alone, the share of a training step that waits for it, and the time to the first step.

    python tests/benchmarks/bench_data.py [--json PATH]

The loader alone is in slices a second, once workers run. Training is that of the demo and of the default, with the
default loader: from the end of one step to the end of the next, and the part of it in which Lightning waits for data.
Start-up is that of real commands, from the start of python to the first row of metrics.csv: the end of the first step.
"""

import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench_strategies import Clock, fit
from lightning.pytorch.profilers import SimpleProfiler
from measuring import seconds_of
from report import Row, finish, options_of

from qnmixer.engine.config.run import section
from qnmixer.engine.data.datamodule import SliceDataModule

TRAINING = {"demo": "experiment=demo", "default": ""}
SIZES, WORKERS = (64, 256), (0, 2)
WARM_UP = 2  # steps
HELPS = 3
MINUTE = 60  # seconds


class Waits(SimpleProfiler):
    """Times what Lightning does, and prints no table of it."""

    def summary(self) -> str:
        return ""


def loader_rows(n_slices: int) -> Iterator[Row]:
    """Phantoms a second, from the first batch on."""
    for size in SIZES:
        for n_workers in WORKERS:
            config = section("data", "phantoms", image_size=size, num_workers=n_workers)
            batches = iter(SliceDataModule(config).loader("train"))
            next(batches)
            start, done = time.perf_counter(), 0
            while done < n_slices:
                done += len(next(batches)["image"])
            speed = done / (time.perf_counter() - start)
            yield Row("The loader alone", f"phantoms, {size}²", f"{n_workers} workers", speed, "slices/s")


def training_rows(name: str, overrides: str, n_steps: int) -> Iterator[Row]:
    """Median seconds of a training step, and the share of all steps that waits for data, after `WARM_UP` steps."""
    clock, waiting = Clock(), Waits()
    with tempfile.TemporaryDirectory() as folder:
        given = f"{TRAINING[name]} {overrides} trainer.max_steps={n_steps + WARM_UP}"
        config = fit(given, Path(folder), clock, waiting)
    waits = waiting.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"][WARM_UP : n_steps + WARM_UP]
    steps = clock.seconds[WARM_UP:]
    line = f"{name}, {config.data.image_size}², T = {config.model.T}, batch {config.data.batch_size}"
    yield Row("Training by Lightning, all threads", line, "a step", median(steps), "s")
    yield Row("Training by Lightning, all threads", line, "waiting for data", 100 * sum(waits) / sum(steps), "%")


def time_first_step(name: str, overrides: str) -> float:
    """Seconds from the start of python to the end of the first training step; the run is stopped then."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.csv"
        given = f"{TRAINING[name]} {overrides} trainer.log_every_n_steps=1 test_after_training=false".split()
        command = [sys.executable, "-m", "qnmixer.train", *given, f"hydra.run.dir={metrics.parent}"]
        start = time.perf_counter()
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
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


def start_rows(trainings: list[str], overrides: str) -> Iterator[Row]:
    """Commands that are typed, from the start of python."""
    of, help_ = "The start of python", [sys.executable, "-m", "qnmixer.train", "--help"]
    helps = [seconds_of(lambda: subprocess.run(help_, check=True, stdout=subprocess.DEVNULL)) for _ in range(HELPS)]
    yield Row(of, "train --help", "until its end", median(helps), "s")
    for name in trainings:
        yield Row(of, f"train, {name}", "until the first step has ended", time_first_step(name, overrides), "s")


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = options_of(__doc__)
    parser.add_argument("--slices", type=int, default=100, help="of each measurement of the loader")
    parser.add_argument("--steps", type=int, default=15, help="of each training, after the first two")
    parser.add_argument("--trainings", nargs="*", choices=TRAINING, default=list(TRAINING), help="which to run")
    parser.add_argument("--overrides", default="", help="of the trainings")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    rows = list(loader_rows(arguments.slices))
    for name in arguments.trainings:
        rows += training_rows(name, arguments.overrides, arguments.steps)
    finish([*rows, *start_rows(arguments.trainings, arguments.overrides)], arguments.json)


if __name__ == "__main__":
    main()
