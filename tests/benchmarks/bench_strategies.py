"""Compare the step times of the strategies, on four processes (or all GPUs) of this machine.

Every strategy trains the same network on the same samples; seconds are of one optimizer step, ratios are to ddp. On a
CPU with fewer cores than processes the devices take turns, so that a pipeline's idle devices cost nothing: there the
table shows what each strategy adds in work and messages, not how it scales.
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import Profiler
from report import Row, finish, options_of

from qnmixer.engine.build import build_module
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import Config, parse
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.memory.modes import apply_memory_mode
from qnmixer.engine.parallel.devices import resolve_devices
from qnmixer.engine.processes.launch import launch
from qnmixer.engine.processes.process import rank
from qnmixer.engine.tracking.loggers import build_loggers
from qnmixer.engine.training.callbacks import build_callbacks
from qnmixer.engine.training.steps import build_trainer

VARIANTS = {
    "ddp": "strategy=ddp",
    "ddp, recompute": "strategy=ddp memory=recompute",
    "fsdp": "strategy=fsdp",
    "pipeline, 1f1b": "strategy=pipeline",
    "pipeline, interleaved": "strategy=pipeline strategy.schedule=interleaved strategy.stages_per_device=2",
    "pipeline, sequential": "strategy=pipeline strategy.schedule=sequential",
    "pipeline, 1f1b, recompute": "strategy=pipeline memory=recompute",
    "two pipelines of two": "strategy=pipeline strategy.devices_per_pipeline=2",
}
WARM_UP = 2  # steps


class Clock(Callback):
    """Seconds from the end of one batch to the end of the next; the first from the start of training."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._before = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._before = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        self._before, before = time.perf_counter(), self._before
        self.seconds.append(self._before - before)


def config_of(overrides: str) -> Config:
    """A checked config that trains and does nothing else."""
    return resolve_devices(parse(compose("train", f"trainer.val_every_n_steps=1000000 logger=csv {overrides}".split())))


def fit(overrides: str, folder: Path, clock: Clock, profiler: Profiler | None = None) -> Config:
    """Train as the command does; the config."""
    config = config_of(overrides)
    L.seed_everything(1, verbose=False)
    module = build_module(config)
    apply_memory_mode(module.network, config.memory)
    callbacks = [clock, *build_callbacks(config.callbacks)]
    trainer = build_trainer(config, folder, callbacks, build_loggers(config, folder, []))
    if profiler is not None:
        trainer.profiler = profiler
    trainer.fit(module, datamodule=SliceDataModule(config.data))
    return config


def time_here(variants: list[str], folder: Path) -> list[float]:
    """As one rank: median seconds of a step of each variant, without the first ones."""
    medians = []
    for k, overrides in enumerate(variants):
        fit(overrides, folder / str(k), clock := Clock())
        medians.append(median(clock.seconds[WARM_UP:]))
    return medians


def main() -> None:
    """Time all variants, or those named, in one group of processes."""
    parser = options_of(__doc__)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), help="which to time")
    parser.add_argument("--overrides", default="data.image_size=64 model.n_iterations=8 model.channels=32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", type=Path, help="the job of which this process is a rank")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        job = json.loads(arguments.rank.read_text())
        medians = time_here(job["variants"], Path(job["folder"]))
        if rank() == 0:
            (Path(job["folder"]) / "medians.json").write_text(json.dumps(medians))
        return
    n = torch.cuda.device_count() if torch.cuda.is_available() else 4
    common = f"{arguments.overrides} data.num_workers=0 trainer.devices={n} trainer.max_steps={arguments.steps}"
    variants = [f"{common} {VARIANTS[name]}" for name in arguments.variants]
    for overrides in variants:
        config_of(overrides)  # a wrong one is refused before anything is started
    with tempfile.TemporaryDirectory() as folder:
        job_path = Path(folder) / "job.json"
        job_path.write_text(json.dumps({"variants": variants, "folder": folder}))
        launch([__file__, "--rank", str(job_path)], n)
        medians = json.loads((Path(folder) / "medians.json").read_text())
    title = f"A training step on {n} devices, {arguments.overrides} (× as long as {arguments.variants[0]})"
    pairs = zip(arguments.variants, medians, strict=True)
    finish([Row(title, name, "step", seconds, "s", seconds / medians[0]) for name, seconds in pairs], arguments.json)


if __name__ == "__main__":
    main()
