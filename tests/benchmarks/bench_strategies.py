"""Compare the step times of the strategies, on four processes (or all GPUs) of this machine.

Every strategy trains the same network on the same samples; seconds are of one optimizer step, ratios are to ddp. On a
CPU with fewer cores than processes the devices take turns, so that a pipeline's idle devices cost nothing: there the
table shows what each strategy adds in work and messages, not how it scales.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table

from qnmixer.config import Config, parse
from qnmixer.config.compose import compose
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.files import write_text
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.parallel.devices import resolve_devices
from qnmixer.processes.launch import launch
from qnmixer.processes.ranks import rank
from qnmixer.tracking.loggers import build_loggers
from qnmixer.training.callbacks import build_callbacks
from qnmixer.training.module import ReconstructionModule
from qnmixer.training.trainer import build_trainer

VARIANTS = {
    "ddp": "strategy=ddp",
    "ddp, static graph": "strategy=ddp strategy.static_graph=true",
    "ddp, recompute": "strategy=ddp memory=recompute",
    "fsdp": "strategy=fsdp",
    "fsdp, weights stay": "strategy=fsdp strategy.reshard_after_forward=false",
    "pipeline, 1f1b": "strategy=pipeline",
    "pipeline, gpipe": "strategy=pipeline strategy.schedule=gpipe",
    "pipeline, interleaved": "strategy=pipeline strategy.schedule=interleaved strategy.stages_per_device=2",
    "pipeline, sequential": "strategy=pipeline strategy.schedule=sequential",
    "pipeline, 1f1b, recompute": "strategy=pipeline memory=recompute",
    "two pipelines of two": "strategy=pipeline strategy.devices_per_pipeline=2",
}


class Clock(Callback):
    """Seconds of every optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._start = self._now(pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.seconds.append(self._now(pl_module) - self._start)

    @staticmethod
    def _now(pl_module: L.LightningModule) -> float:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def config_of(overrides: str) -> Config:
    """A checked config that trains and does nothing else."""
    bare = "data.num_workers=0 trainer.val_every_n_steps=1000000 logger=csv"
    return resolve_devices(parse(compose("train", f"{bare} {overrides}".split())))


def time_here(variants: list[str], folder: Path) -> list[float]:
    """As one rank: median seconds of a step of each variant, the first two left out."""
    medians = []
    for k, overrides in enumerate(variants):
        config, clock = config_of(overrides), Clock()
        L.seed_everything(1, verbose=False)
        module = ReconstructionModule(config)
        apply_memory_mode(module.network, config.memory)
        trainer = build_trainer(
            config,
            folder / str(k),
            [clock, *build_callbacks(config.callbacks)],
            build_loggers(config, folder / str(k), []),
        )
        trainer.fit(module, datamodule=SliceDataModule(config.data))
        medians.append(median(clock.seconds[2:]))
    return medians


def main() -> None:
    """Time all variants, or those named, in one group of processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), help="which to time")
    parser.add_argument("--overrides", default="data.image_size=64 model.n_iterations=8 model.channels=32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="where to write the results too")
    parser.add_argument("--rank", type=Path, help="the job of which this process is a rank")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        job = json.loads(arguments.rank.read_text())
        medians = time_here(job["variants"], Path(job["folder"]))
        if rank() == 0:
            (Path(job["folder"]) / "medians.json").write_text(json.dumps(medians))
        return
    n = torch.cuda.device_count() if torch.cuda.is_available() else 4
    common = f"{arguments.overrides} trainer.devices={n} trainer.max_steps={arguments.steps}"
    variants = [f"{common} {VARIANTS[name]}" for name in arguments.variants]
    for overrides in variants:
        config_of(overrides)  # a wrong one is refused before anything is started
    with tempfile.TemporaryDirectory() as folder:
        job_path = Path(folder) / "job.json"
        job_path.write_text(json.dumps({"variants": variants, "folder": folder}))
        launch([__file__, "--rank", str(job_path)], n)
        medians = json.loads((Path(folder) / "medians.json").read_text())
    rows = [
        {"variant": name, "seconds": seconds, "ratio": seconds / medians[0]}
        for name, seconds in zip(arguments.variants, medians, strict=True)
    ]
    table = Table(
        "strategy", "seconds a step", f"of {arguments.variants[0]}", title=f"{n} devices, {arguments.overrides}"
    )
    for row in rows:
        table.add_row(str(row["variant"]), f"{row['seconds']:.3f}", f"{row['ratio']:.2f}")
    Console().print(table)
    if arguments.json is not None:
        write_text(arguments.json, json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
