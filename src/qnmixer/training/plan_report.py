"""What `qnmixer.plan` prints: the parts of one run's footprint, and how it changes with what a user can turn."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace

from rich.console import Console
from rich.progress import track
from rich.table import Table

from qnmixer.config import DEVICES, GROUPS, Config, PlanConfig, device_memory, override
from qnmixer.training.planning import MIB, Planner, Prediction

PRECISIONS = (("32",), ("16-mixed", "bf16-mixed"))
"""Those of one row need the same memory. (A V100 has no bf16.)"""

BATCHES = (1, 8)

LEVERS = {
    "memory=recompute": "time: each iteration is run forward twice",
    "memory=offload": "time on the bus, and host memory",
    "trainer.precision=16-mixed": "half the digits in the regulariser",
    "memory=recompute trainer.precision=16-mixed": "both",
    "data.batch_size=1 trainer.accumulate_grad_batches=4": "less parallel work a step",
    "model.n_iterations=7": "quality",
    "model.channels=48": "quality",
    "model.hessian=identity": "the second order",
    "model.hessian_gradient=detach": "the gradient through H",
    "optimizer=sgd": "its learning rate needs tuning",
    "optimizer=adafactor": "a little accuracy",
}
"""What saves memory, and what it costs."""


def usable(device: str) -> float:
    """MiB that a run can have of a device: what CUDA, its libraries and gaps between tensors take is an assumption."""
    return 0.95 * device_memory(device) - 1024


def print_plan(config: PlanConfig) -> None:
    """Print one run's plan in the format asked for; raises ConfigError, GeometryError."""
    planner = Planner(config.run)
    if config.format == "levers":
        print(levers_table(config.run, planner))
        return
    prediction = planner.predict(config.run)
    if config.format == "json":
        print(json.dumps(as_object(prediction, _devices(config))))
        return
    console = Console()
    _print_run(console, config.run, prediction)
    _print_tables(console, config, planner)


def as_object(prediction: Prediction, devices: list[str]) -> dict[str, object]:
    """The plan as plain data, MiB."""
    footprint = prediction.footprint
    return {
        "peak_mib": round(footprint.peak / MIB, 3),
        "per_iteration_mib": round(prediction.per_iteration / MIB, 3),
        "parts": {name: round(value / MIB, 3) for name, value in footprint.parts().items()},
        "host_mib": round(footprint.host / MIB, 3),
        "fits": {name: footprint.peak / MIB <= usable(name) for name in devices},
    }


def levers_table(config: Config, planner: Planner, levers: Mapping[str, str] = LEVERS) -> str:
    """A Markdown table of what each lever by itself makes of a run's peak."""
    base = planner.estimate(config).peak
    lines = [
        f"**{_setting(config)}: {base / MIB:,.0f} MiB**",
        "",
        "| lever | peak, MiB | saves | costs |",
        "|---|---|---|---|",
    ]
    for overrides, cost in levers.items():
        peak = planner.estimate(override(config, overrides)).peak
        lines.append(f"| `{overrides}` | {peak / MIB:,.0f} | {1 - peak / base:.2%} | {cost} |")
    return "\n".join(lines)


def _setting(config: Config) -> str:
    return (
        f"T = {config.model.n_iterations}, C = {config.model.channels}, {config.data.image_size} × "
        f"{config.data.image_size} pixels, batch {config.data.batch_size}, {config.trainer.precision}, "
        f"memory={config.memory.name}, {config.optimizer.name}"
    )


def _print_run(console: Console, config: Config, prediction: Prediction) -> None:
    footprint = prediction.footprint
    parts = " · ".join(f"{name} {value / MIB:,.1f}" for name, value in footprint.parts().items())
    host = f"\nmoved to host memory: {footprint.host / MIB:,.0f} MiB" if footprint.host else ""
    console.print(
        f"{_setting(config)}\n"
        f"peak of a training step: {footprint.peak / MIB:,.1f} MiB ({parts})\n"
        f"each further iteration adds {prediction.per_iteration / MIB:,.1f} MiB{host}",
        highlight=False,
        soft_wrap=True,
    )


def _print_tables(console: Console, config: PlanConfig, planner: Planner) -> None:
    """Peak by batch, largest batch by device, and the optimizers."""
    peaks = _table("peak of a training step, MiB", "memory", "precision", *(f"batch {b}" for b in BATCHES))
    columns: list[list[str]] = []
    variants = [(memory, precision) for memory in GROUPS["memory"] for precision in PRECISIONS]
    for memory, precisions in track(
        variants, "planning", console=console, transient=True, disable=not console.is_terminal
    ):
        # A segment that was asked for stays.
        group = "" if memory == config.run.memory.name else f"memory={memory} "
        run = override(config.run, f"{group}trainer.precision={precisions[0]}")
        of = {b: planner.estimate(replace(run, data=replace(run.data, batch_size=b))).peak / MIB for b in BATCHES}
        peaks.add_row(memory, ", ".join(precisions), *(f"{of[b]:,.0f}" for b in BATCHES))
        columns.append([f"{memory}\n{precisions[0]}", *(_largest_batch(of, usable(d)) for d in _devices(config))])
    console.print(peaks)

    largest = _table("largest batch that fits", "device", *(column[0] for column in columns))
    for row, device in enumerate(_devices(config), start=1):
        largest.add_row(device, *(column[row] for column in columns))
    console.print(largest)
    console.print(
        "Counted as lost: 1 GiB and 5 % to CUDA and its libraries (assumed). A V100 has no bf16.\n", style="dim"
    )

    optimizers = _table("optimizers, MiB", "optimizer", "state", "peak of a training step")
    base = planner.estimate(config.run)
    for name in GROUPS["optimizer"]:
        state = planner.optimizer_state(override(config.run, f"optimizer={name}"))
        optimizers.add_row(name, f"{state / MIB:,.1f}", f"{(base.peak - base.optimizer + state) / MIB:,.1f}")
    console.print(optimizers)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        words = column in ("memory", "precision", "device", "optimizer")
        table.add_column(column, justify="left" if words else "right")
    return table


def _largest_batch(peaks: dict[int, float], limit: float) -> str:
    """Where the line through two known batches meets the limit."""
    (few, small), (many, large) = sorted(peaks.items())
    batch = math.floor(few + (limit - small) * (many - few) / (large - small))
    return f"{batch:,}" if batch >= 1 else "none"


def _devices(config: PlanConfig) -> list[str]:
    return list(DEVICES) if config.device is None else [config.device]
