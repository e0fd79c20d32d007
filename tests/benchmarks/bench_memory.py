"""The plan against real steps, and what recomputing costs in time, on this machine: one run, one table each.

On a CPU the memory of a real step is what the process's resident memory grows by, pages of files left out, measured in
a process of its own whose C library gives freed memory back at once; on CUDA it is torch's own count.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from qnmixer.cli import compose
from qnmixer.config import Config, override, parse
from qnmixer.files import write_text
from qnmixer.parallel.memory import apply_memory_mode
from qnmixer.parallel.usage import read_usage, reset_peak
from qnmixer.training.module import ReconstructionModule
from qnmixer.training.optimizers import build_optimizer
from qnmixer.training.planning import AUTOCAST, MIB, Planner

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


def measured_mib(overrides: str, device: torch.device) -> float:
    """Peak of the second real step of a config, MiB, in this process."""
    config = parse(compose("train", overrides.split()))
    if device.type == "cpu":  # torch's own code and buffers come in with a first small step
        tiny = "data.image_size=32 data.batch_size=1 model.n_iterations=2 geometry.n_detectors=64"
        Step(override(config, tiny), device)()
    step = Step(config, device)
    held = sum(tensor.nbytes for tensor in [*step.module.parameters(), *step.module.buffers()])
    before = read_usage(device)
    step()
    reset_peak(device)
    step()
    peak = read_usage(device)
    if device.type == "cuda":
        return peak.peak / MIB
    files = peak.reserved - peak.allocated
    return (peak.peak - files - before.allocated + held) / MIB


def compare(overrides: str) -> dict[str, float | str]:
    """Plan and measurement of one config; the latter in a fresh process."""
    config = parse(compose("train", overrides.split()))
    predicted = Planner(config).predict(config).footprint.peak / MIB
    command = [sys.executable, __file__, "--one", overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **_GIVE_BACK})
    measured = float(done.stdout)
    return {"overrides": overrides, "predicted_mib": predicted, "measured_mib": measured, "ratio": predicted / measured}


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
    parser.add_argument("--configs", type=int, nargs="*", default=range(len(CONFIGS)), help="which of them to compare")
    parser.add_argument("--iterations", type=int, default=14, help="T of the timed step")
    parser.add_argument("--json", type=Path, help="where to write the results too")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.one is not None:
        print(measured_mib(arguments.one, device))
        return
    console = Console()
    rows = [compare(CONFIGS[k]) for k in arguments.configs]
    table = Table("overrides", "plan, MiB", "measured", "plan / measured", title=f"plan against real steps on {device}")
    for row in rows:
        numbers = (f"{row['predicted_mib']:.1f}", f"{row['measured_mib']:.1f}", f"{row['ratio']:.3f}")
        table.add_row(str(row["overrides"]), *numbers)
    console.print(table)
    seconds = time_modes(f"model.n_iterations={arguments.iterations}", device)
    ratio = seconds["recompute"] / seconds["keep"]
    console.print(
        f"256², T = {arguments.iterations}, batch 1, {torch.get_num_threads()} threads: a step takes "
        f"{seconds['keep']:.2f} s with memory=keep, {ratio:.2f} times that with memory=recompute",
        highlight=False,
        soft_wrap=True,
    )
    if arguments.json is not None:
        write_text(arguments.json, json.dumps({"plan": rows, "step_seconds": seconds, "ratio": ratio}, indent=2) + "\n")


if __name__ == "__main__":
    main()
