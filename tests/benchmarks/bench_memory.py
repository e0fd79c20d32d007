"""Compare the plan with real steps, and measure the time that recomputing costs, on this machine.

On a CPU the memory of a real step is what the process's resident memory grows by, pages of files left out, measured in
a process of its own whose C library gives freed memory back at once; on CUDA it is torch's own count. A pipeline is
measured on the CPU, one such process a device.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from qnmixer.config import Config, override, parse
from qnmixer.config.compose import compose
from qnmixer.config.run import batch_of_replica
from qnmixer.files import write_text
from qnmixer.memory.footprint import MIB
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.memory.pipeline import cut_of
from qnmixer.memory.plan import Planner
from qnmixer.memory.usage import Usage, read_usage, reset_peak
from qnmixer.optimization.optimizers import build_optimizer
from qnmixer.parallel.pipeline import Pipeline, sum_gradients
from qnmixer.reconstructor import AUTOCAST
from qnmixer.training.module import ReconstructionModule

CONFIGS = [
    "model.n_iterations=4",
    "memory=recompute",
    "memory=recompute data.batch_size=4 model.n_iterations=6",
    "model.n_iterations=4 trainer.precision=bf16-mixed",
    "model.n_iterations=4 data.image_size=128 data.batch_size=4",
    "memory=recompute data.image_size=512 geometry.n_detectors=512 model.n_iterations=4 data.batch_size=2",
    "memory=recompute memory.segment=2 model.n_iterations=6",
    "memory=recompute model.shared_regularizer=false trainer.accumulate_grad_batches=2 model.n_iterations=8",
]

N_DEVICES = 4

_DEEP = "model.n_iterations=16 model.channels=48 data.image_size=128 geometry.n_detectors=256"

PIPELINES = [
    (
        f"{_DEEP} data.batch_size=1",
        f"{_DEEP} data.batch_size=1 strategy=pipeline strategy.schedule=sequential",
    ),
    (
        f"{_DEEP} data.batch_size=8",
        f"{_DEEP} data.batch_size=2 strategy=pipeline strategy.schedule=1f1b memory=recompute",
    ),
]
"""A run on one device, and one on several, of whose activations those of the first are the measure."""

# glibc otherwise keeps what is freed, up to twice what is in use.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"}


class Step:
    """A training step of a config, ready to be run again and again."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.module = ReconstructionModule(config).to(device)
        apply_memory_mode(self.module.network, config.memory)
        self.optimizer = build_optimizer(config.optimizer, self.module.network)
        self.image = torch.rand(config.data.batch_size, 1, config.data.image_size, config.data.image_size).to(device)
        self.weight = torch.ones(config.data.batch_size, device=device)

    def __call__(self) -> None:
        """One optimizer step."""
        dtype = AUTOCAST[self.config.trainer.precision]
        for k in range(self.config.trainer.accumulate_grad_batches):
            with torch.no_grad():
                y = self.module.projector(self.image)
            with torch.autocast(self.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = self.module.batch_loss(self.module.network(y), self.image, self.weight)
            if k == 0:
                self.optimizer.zero_grad()  # where Lightning does it
            loss.backward()
            del loss, y
        torch.nn.utils.clip_grad_norm_(self.module.network.parameters(), 1.0)
        self.optimizer.step()


class PipelineStep:
    """This rank's part of a training step of a pipeline."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.module = ReconstructionModule(config)
        apply_memory_mode(self.module.network, config.memory)
        self.optimizer = build_optimizer(config.optimizer, self.module.network)
        self.pipeline: Pipeline | None = None

    def __call__(self) -> None:
        """One optimizer step."""
        size, n = self.config.data.image_size, batch_of_replica(self.config)
        batch = {"image": torch.rand(n, 1, size, size), "weight": torch.ones(n), "name": []}
        with torch.no_grad():
            y = self.module.projector(batch["image"])
        if self.pipeline is None:
            dtype = AUTOCAST[self.config.trainer.precision]
            context = partial(torch.autocast, "cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)
            assert dist.group.WORLD is not None
            self.pipeline = Pipeline(self.module, self.config, y, dist.group.WORLD, context)
        self.pipeline.step(y, batch, torch.ones(()))
        del y
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        sum_gradients(parameters, divisor=1)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measured_mib(overrides: str, device: torch.device, kind: Callable[[Config, torch.device], Any] = Step) -> float:
    """Peak of the second real step of a config, MiB, in this process."""
    config = parse(compose("train", overrides.split()))
    if device.type == "cpu":  # torch's own code and buffers come in with a first small step
        tiny = "data.image_size=32 data.batch_size=1 model.n_iterations=2 geometry.n_detectors=64 strategy=single"
        Step(override(config, f"{tiny} trainer.devices=1"), device)()
    step = kind(config, device)
    held = sum(tensor.nbytes for tensor in [*step.module.parameters(), *step.module.buffers()])
    before = read_usage(device)
    step()
    reset_peak(device)
    step()
    return _grown(before, read_usage(device), held, device) / MIB


def _grown(before: Usage, peak: Usage, held: int, device: torch.device) -> float:
    if device.type == "cuda":
        return peak.peak
    files = peak.reserved - peak.allocated
    return peak.peak - files - before.allocated + held


def measure_rank(overrides: str) -> None:
    """Measure this rank of a pipeline; the first prints the MiB of all."""
    dist.init_process_group("gloo")
    mine = measured_mib(overrides, torch.device("cpu"), PipelineStep)
    of = [0.0] * dist.get_world_size()
    dist.all_gather_object(of, mine)
    if dist.get_rank() == 0:
        print(json.dumps(of))
    dist.destroy_process_group()


def compare(overrides: str) -> dict[str, float | str]:
    """Plan and measurement of one config; the latter in a fresh process."""
    config = parse(compose("train", overrides.split()))
    predicted = Planner(config).predict(config).footprint.peak / MIB
    command = [sys.executable, __file__, "--one", overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **_GIVE_BACK})
    measured = float(done.stdout)
    return {"overrides": overrides, "predicted_mib": predicted, "measured_mib": measured, "ratio": predicted / measured}


def compare_pipeline(alone: str, together: str) -> list[dict[str, float | str | int]]:
    """Plan and measurement of every device of a pipeline, and what its activations are of those of a run on one."""
    spread = f"{together} trainer.devices={N_DEVICES}"
    config = parse(compose("train", spread.split()))
    cut = ",".join(map(str, cut_of(config)))
    spread += f" strategy.cut=[{cut}]"
    planner = Planner(config)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={N_DEVICES}"]
    environment = {**os.environ, **_GIVE_BACK}
    output = [
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
        for command in ([sys.executable, __file__, "--one", alone], [*torchrun, __file__, "--rank", spread])
    ]
    measured = [float(output[0]), *json.loads(output[1])]
    single = planner.predict(parse(compose("train", alone.split()))).devices
    plans = [*single, *planner.predict(config).devices]
    constant = [(plan.footprint.peak - plan.footprint.activations - plan.footprint.strategy) / MIB for plan in plans]
    rows: list[dict[str, float | str | int]] = []
    for device, (plan, real, rest) in enumerate(zip(plans, measured, constant, strict=True)):
        predicted = plan.footprint.peak / MIB
        rows.append(
            {
                "overrides": alone if device == 0 else together,
                "device": max(0, device - 1),
                "predicted_mib": predicted,
                "measured_mib": real,
                "ratio": predicted / real,
                "predicted_of_single": (predicted - rest) / (plans[0].footprint.peak / MIB - constant[0]),
                "measured_of_single": (real - rest) / (measured[0] - constant[0]),
            }
        )
    return rows


def time_modes(overrides: str, device: torch.device, n: int = 7) -> dict[str, float]:
    """Median seconds of a step in each memory mode, taken in turn."""
    base = parse(compose("train", overrides.split()))
    steps = {mode: Step(override(base, f"memory={mode}"), device) for mode in ("keep", "recompute")}
    seconds: dict[str, list[float]] = {mode: [] for mode in steps}
    for _ in range(n + 1):
        for mode, step in steps.items():
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[mode].append(time.perf_counter() - start)
    return {mode: median(values[1:]) for mode, values in seconds.items()}


def main() -> None:
    """Run all of it, or one measurement for `compare`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help="overrides of the one config to measure; prints MiB")
    parser.add_argument("--rank", help="overrides of the pipeline of which this process is a rank; prints MiB")
    parser.add_argument("--configs", type=int, nargs="*", default=range(len(CONFIGS)), help="which of them to compare")
    parser.add_argument("--pipelines", type=int, nargs="*", default=range(len(PIPELINES)), help="which to compare")
    parser.add_argument("--iterations", type=int, default=14, help="T of the timed step")
    parser.add_argument("--json", type=Path, help="where to write the results too")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.one is not None:
        print(measured_mib(arguments.one, device))
        return
    if arguments.rank is not None:
        measure_rank(arguments.rank)
        return
    console = Console()
    rows = [compare(CONFIGS[k]) for k in arguments.configs]
    table = Table("overrides", "plan, MiB", "measured", "plan / measured", title=f"plan against real steps on {device}")
    for row in rows:
        numbers = (f"{row['predicted_mib']:.1f}", f"{row['measured_mib']:.1f}", f"{row['ratio']:.3f}")
        table.add_row(str(row["overrides"]), *numbers)
    console.print(table)
    pipelines = [row for k in arguments.pipelines for row in compare_pipeline(*PIPELINES[k])]
    if pipelines:
        console.print(_pipeline_table(pipelines))
    seconds = time_modes(f"model.n_iterations={arguments.iterations}", device)
    ratio = seconds["recompute"] / seconds["keep"]
    console.print(
        f"256², T = {arguments.iterations}, batch 1, {torch.get_num_threads()} threads: a step takes "
        f"{seconds['keep']:.2f} s with memory=keep, {ratio:.2f} times that with memory=recompute",
        highlight=False,
        soft_wrap=True,
    )
    if arguments.json is not None:
        result = {"plan": rows, "pipelines": pipelines, "step_seconds": seconds, "ratio": ratio}
        write_text(arguments.json, json.dumps(result, indent=2) + "\n")


def _pipeline_table(rows: list[dict[str, float | str | int]]) -> Table:
    columns = ("device", "plan, MiB", "measured", "plan / measured", "activations, of one device's: plan", "measured")
    table = Table("overrides", *columns, title="pipelines against real steps on cpu")
    for row in rows:
        table.add_row(
            str(row["overrides"]),
            str(row["device"]),
            f"{row['predicted_mib']:.1f}",
            f"{row['measured_mib']:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['predicted_of_single']:.3f}",
            f"{row['measured_of_single']:.3f}",
        )
    return table


if __name__ == "__main__":
    main()
