"""Compare the plan's memory with that of real steps, one device alone and a pipeline, on this machine.

On a CPU the memory of a real step is what the process's resident memory grows by, pages of files left out, measured in
a process of its own whose C library gives freed memory back at once; on CUDA it is torch's own count. A pipeline is
measured on the CPU, one such process a device.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from measuring import GIVE_BACK, MIB, Row, in_own_process, markdown, peak_mib

from qnmixer.memory.modes import apply_memory_mode
from qnmixer.memory.plan import Planner
from qnmixer.module.build import build_module
from qnmixer.module.parts import build_optimizer
from qnmixer.parallel.devices import compile_blocks
from qnmixer.parallel.pipeline import Pipeline, sum_gradients
from qnmixer.parallel.tracker import AUTOCAST, batch_of
from qnmixer.settings.compose import compose
from qnmixer.settings.override import override
from qnmixer.settings.run import Config, parse
from qnmixer.settings.strategies import PipelineConfig

CONFIGS = [
    "model.n_iterations=4", "memory=recompute data.batch_size=4 model.n_iterations=6",
    "model.n_iterations=4 trainer.precision=bf16-mixed", "model.n_iterations=4 data.image_size=128 data.batch_size=4",
    "memory=recompute model.shared_regularizer=false trainer.accumulate_grad_batches=2 model.n_iterations=8",
]  # fmt: skip
N_DEVICES = 4
_DEEP = "model.n_iterations=16 model.channels=48 data.image_size=128 geometry.n_detectors=256"
_STAGES = "strategy=pipeline strategy.schedule"
PIPELINES = [
    (f"{_DEEP} data.batch_size=1", f"{_DEEP} data.batch_size=1 {_STAGES}=sequential"),
    (f"{_DEEP} data.batch_size=8", f"{_DEEP} data.batch_size=2 {_STAGES}=1f1b memory=recompute"),
]
"""A run on one device, and one on several, of whose activations those of the first are the measure."""


class Step:
    """A training step of a config, ready to be run again and again."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.module = build_module(config).to(device)
        apply_memory_mode(self.module.network, config.memory)
        if config.compile:
            compile_blocks(self.module.network)
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
                loss = self.module.training_step(batch_of(self.image, self.weight, y), 0)
            if k == 0:
                self.optimizer.zero_grad()  # where Lightning does it
            loss.backward()
            del loss, y
        torch.nn.utils.clip_grad_norm_(self.module.network.parameters(), 1.0)
        self.optimizer.step()


class PipelineStep:
    """This rank's part of a training step of a pipeline."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.module = build_module(config)
        apply_memory_mode(self.module.network, config.memory)
        self.optimizer = build_optimizer(config.optimizer, self.module.network)
        self.pipeline: Pipeline | None = None

    def __call__(self) -> None:
        """One optimizer step."""
        size, n = self.config.data.image_size, self.config.strategy.batch_of_replica(self.config)
        batch = {"image": torch.rand(n, 1, size, size), "weight": torch.ones(n), "name": []}
        with torch.no_grad():
            y = self.module.projector(batch["image"])
        if self.pipeline is None:
            dtype = AUTOCAST[self.config.trainer.precision]
            context = partial(torch.autocast, "cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)
            assert dist.group.WORLD is not None
            assert isinstance(self.config.strategy, PipelineConfig)
            how = self.config.strategy.schedule, self.config.strategy.microbatch_size
            self.pipeline = Pipeline(self.module, *how, y, dist.group.WORLD, context)
        self.pipeline.step(y, batch, 0, torch.ones(()))
        del y
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        sum_gradients(parameters, divisor=1)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def config_of(overrides: str) -> Config:
    """A checked config."""
    return parse(compose("train", overrides.split()))


def measured_here(overrides: str) -> float | list[float]:
    """Peak of a real step of a config in this process, MiB; as a rank of a pipeline: of every rank."""
    config = config_of(overrides)
    ranked = config.strategy.name == "pipeline"
    device = torch.device("cuda" if torch.cuda.is_available() and not ranked else "cpu")
    if device.type == "cpu":  # torch's own code and buffers come in with a first small step
        tiny = "data.image_size=32 data.batch_size=1 model.n_iterations=2 geometry.n_detectors=64 strategy=single"
        Step(override(config, f"{tiny} trainer.devices=1 compile=false"), device)()
    if not ranked:
        return peak_mib(partial(Step, config, device), device)
    dist.init_process_group("gloo")
    peaks = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_mib(partial(PipelineStep, config), device))
    is_first = dist.get_rank() == 0
    dist.barrier()  # a rank that leaves while another still sends can abort at its exit
    dist.destroy_process_group()
    return peaks if is_first else []


def measured_alone(overrides: str) -> float:
    """The same in a fresh process."""
    return float(in_own_process(__file__, "--one", overrides))


def plan_rows(overrides: str) -> Iterator[Row]:
    """Plan and measurement of one config."""
    config = config_of(overrides)
    planned = Planner(config).estimate(config).peak / MIB
    yield from _compared("The memory of a training step", overrides, planned, measured_alone(overrides))


def pipeline_rows(alone: str, together: str) -> Iterator[Row]:
    """Plan and measurement of every device of a pipeline, and what its activations are of those of a run on one."""
    title = f"The memory of each device of a pipeline (activations: of those of a run on one device), {_DEEP}"
    spread = f"{together} trainer.devices={N_DEVICES}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={N_DEVICES}"]
    ranks = subprocess.run(
        [*torchrun, __file__, "--one", spread],
        stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **GIVE_BACK},
    )  # fmt: skip
    measured = [measured_alone(alone), *json.loads(ranks.stdout)]
    plans = [plan for config in map(config_of, (alone, spread)) for plan in Planner(config).devices(config)]
    of_one: list[tuple[float, float]] = []
    for k, (plan, real) in enumerate(zip(plans, measured, strict=True)):
        planned = plan.footprint.peak / MIB
        rest = planned - (plan.footprint.activations + plan.footprint.strategy) / MIB
        of_one.append((planned - rest, real - rest))
        line = (alone if k == 0 else f"{together}, device {k - 1}").removeprefix(_DEEP).strip()
        yield from _compared(title, line, planned, real)
        for column, part, whole in zip(("planned", "measured"), of_one[k], of_one[0], strict=True):
            yield Row(title, line, f"activations, {column} : of one", part / whole)


def _compared(title: str, line: str, planned: float, measured: float) -> Iterator[Row]:
    yield Row(title, line, "planned", planned, "MiB")
    yield Row(title, line, "measured", measured, "MiB")
    yield Row(title, line, "planned : measured", planned / measured)


def main() -> None:
    """Run all of it, or one measurement in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", help="overrides of the one config to measure; prints MiB")
    arguments = parser.parse_args()
    if arguments.one is not None:
        if found := measured_here(arguments.one):
            print(json.dumps(found))
        return
    rows = [row for overrides in CONFIGS for row in plan_rows(overrides)]
    print(markdown([*rows, *(row for pair in PIPELINES for row in pipeline_rows(*pair))]), end="")


if __name__ == "__main__":
    main()
