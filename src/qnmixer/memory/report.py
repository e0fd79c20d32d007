"""The output of `qnmixer.plan`: the parts of a run's footprint, and how settings change it."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import product

import torch

from qnmixer.memory.plan import Planner, changed_to, channels_of, with_assumed_devices
from qnmixer.memory.plan_config import DEVICES, PlanConfig, device_memory
from qnmixer.parallel.device_memory import MIB, DevicePlan, on_a_gpu
from qnmixer.runs.tables import Table
from qnmixer.runs.terminal import Console, progress
from qnmixer.settings.options import options
from qnmixer.settings.run import Config, effective_batch
from qnmixer.settings.strategies import StrategyConfig

PRECISIONS = (("32",), ("16-mixed", "bf16-mixed"))
"""Precisions in one row need the same memory. (A V100 has no bf16.)"""

BATCHES = (1, 8)
"""Batch sizes per device; for a pipeline in micro-batches."""

LEVERS = {
    "strategy=ddp trainer.devices=4": "four devices, and each has the whole graph",
    "memory=recompute": "time: each iteration is run forward twice",
    "memory=offload": "time on the bus, and host memory",
    "trainer.precision=16-mixed": "half the digits in the regulariser",
    "data.batch_size=1 trainer.accumulate_grad_batches=4": "less parallel work a step",
    "strategy=pipeline trainer.devices=4 data.batch_size=1": "four devices, which wait for each other",
    f"{StrategyConfig.one_in_flight} trainer.devices=4 data.batch_size=1": "one device works at a time",
}
"""What people try in order to save memory, and what it costs. Data parallelism is here because it saves none."""


def usable(device: str) -> float:
    """MiB of a device that a run can use. The share of CUDA, its libraries and gaps between tensors is assumed."""
    return 0.95 * device_memory(device) - 1024


def print_plan(config: PlanConfig) -> None:
    """Print the plan of one run in the given format. Raises ConfigError or GeometryError."""
    run = with_assumed_devices(config.run)
    assumed = "" if run == config.run else ", assumed"
    planner = Planner(run)
    torch.set_num_threads(1)  # tensors without data need no more, which would only wait
    if config.format == "levers":
        print(levers_table(run, planner))
        return
    devices = list(DEVICES) if config.device is None else [config.device]
    if config.format == "json":
        print(json.dumps(as_object(run, planner, devices)))
        return
    console = Console()
    _print_run(console, run, planner, assumed)
    if len(devices_of_batch := planner.devices(run)) > 1:
        _print_devices(console, run, devices_of_batch)
    _print_tables(console, run, devices, planner)


def as_object(config: Config, planner: Planner, devices: list[str]) -> dict[str, object]:
    """The plan as plain data, in MiB. `fits` says for some devices whether the run fits into them."""
    footprint, growth = planner.estimate(config), planner.growth(config)
    plan: dict[str, object] = {
        "strategy": config.strategy.name,
        "peak_mib": _mib(footprint.peak),
        "per_iteration_mib": None if growth is None else _mib(growth),
        "parts": {name: _mib(value) for name, value in footprint.parts().items()},
        "fits": {name: footprint.peak / MIB <= usable(name) for name in devices},
        "devices": [_mib(device.footprint.peak) for device in planner.devices(config)],
    }
    return plan | ({"idle_share": round(idle, 4)} if (idle := config.strategy.idle_share(config)) else {})


def _mib(n_bytes: float) -> float:
    return round(n_bytes / MIB, 3)


def levers_table(config: Config, planner: Planner, levers: Mapping[str, str] = LEVERS) -> str:
    """A Markdown table of levers: the run's peak with each lever alone. Levers that the run refuses are left out."""
    base = planner.estimate(config).peak
    rows = []
    for overrides, cost in progress(levers.items(), len(levers), "planning", "lever", Console(stderr=True)):
        if variant := changed_to(config, overrides):
            peak = planner.estimate(variant).peak
            rows.append([f"`{overrides}`", f"{peak / MIB:,.0f}", f"{1 - peak / base:.2%}", cost])
    title = f"{_setting(config)}: {base / MIB:,.0f} MiB"
    return Table(["lever", "peak, MiB", "saves", "costs"], rows, title).markdown()


def _setting(config: Config, assumed: str = "") -> str:
    spread = ""
    if config.strategy.is_parallel:
        nodes = f" × {config.trainer.num_nodes} nodes" if config.trainer.num_nodes > 1 else ""
        spread = (
            f", strategy={config.strategy.name} on {config.trainer.per_node} devices{nodes}{assumed} "
            f"({effective_batch(config)} slices an optimizer step)"
        )
    model, size = config.model, config.data.image_size
    width = f", C = {channels}" if (channels := channels_of(model)) else ""
    return (
        f"{model.name}, T = {model.T}{width}, {size} × {size} pixels, batch {config.data.batch_size}, "
        f"precision {config.trainer.precision}, memory={config.memory.name}, {config.optimizer.name}{spread}"
    )


def _print_run(console: Console, config: Config, planner: Planner, assumed: str) -> None:
    console.print(_setting(config, assumed), highlight=False, soft_wrap=True)  # before the plan, which takes seconds
    footprint, growth = planner.estimate(config), planner.growth(config)
    parts = " · ".join(f"{name} {value / MIB:,.1f}" for name, value in footprint.parts().items())
    where = " on the fullest device" if len(planner.devices(config)) > 1 else ""
    lines = [f"peak of a training step{where}: {footprint.peak / MIB:,.1f} MiB ({parts})"]
    if growth is not None:
        lines.append(f"each further iteration adds {growth / MIB:,.1f} MiB")
    if config.trainer.accelerator != "cpu":
        lines.append(
            f"a run on a GPU shows about {on_a_gpu(footprint.peak) / MIB:,.0f} MiB: cuBLAS's workspaces "
            f"({on_a_gpu(0) / MIB:.0f} MiB) and 3 %, as measured on an H100"
        )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _print_devices(console: Console, config: Config, devices: Sequence[DevicePlan]) -> None:
    """Print the plan of each device that works on one batch, and how long they wait for each other."""
    rows = [
        [str(n), _span(device.iterations), str(device.in_flight), f"{device.footprint.peak / MIB:,.0f}"]
        for n, device in enumerate(devices)
    ]
    headings = ["device", "iterations", "micro-batches in flight", "peak, MiB"]
    console.print(Table(headings, rows, "devices").terminal(words=2))
    idle, least_memory = config.strategy.idle_share(config), config.strategy.one_in_flight
    console.print(f"each device is idle {idle:.0%} of the time; {least_memory} takes the least memory")


def _span(iterations: range) -> str:
    start, end = iterations.start, iterations.stop - 1
    return str(start) if start == end else f"{start}–{end}"


def _print_tables(console: Console, config: Config, devices: list[str], planner: Planner) -> None:
    """Print the peak by batch size, and the largest batch by device."""
    batches = [b * config.strategy.samples_at_once for b in BATCHES]
    suffix = " of a device" if config.strategy.is_parallel else ""
    peaks: list[list[str]] = []
    largest: list[list[str]] = [devices]
    headings = ["device"]
    variants = list(product(options("memory"), PRECISIONS))
    for memory, precisions in progress(variants, len(variants), "planning", "setting", console):
        run = changed_to(config, f"memory={memory} trainer.precision={precisions[0]}")
        if run is None:
            continue
        peak_of = {b: planner.estimate(run.changed(data=run.data.changed(batch_size=b))).peak / MIB for b in batches}
        peaks.append([memory, ", ".join(precisions), *(f"{peak_of[b]:,.0f}" for b in batches)])
        headings.append(f"{memory}\n{precisions[0]}")
        largest.append([largest_batch(peak_of, usable(name)) for name in devices])
    columns = ["memory", "precision", *(f"batch {b}{suffix}" for b in batches)]
    console.print(Table(columns, peaks, "peak of a training step, MiB").terminal(words=2))
    console.print(Table(headings, [*zip(*largest, strict=True)], f"largest batch{suffix} that fits").terminal())
    console.print(
        "Counted as lost: 1 GiB and 5 % to CUDA and its libraries (assumed). A V100 has no bf16.\n", style="dim"
    )


def largest_batch(peaks: dict[int, float], limit: float) -> str:
    """The batch size at which the line through two known peaks reaches the limit."""
    # A line, because weights take the same at any batch, and every slice has a graph of its own.
    (small_batch, small_peak), (large_batch, large_peak) = sorted(peaks.items())
    batch = math.floor(small_batch + (limit - small_peak) * (large_batch - small_batch) / (large_peak - small_peak))
    return f"{batch:,}" if batch >= 1 else "none"
