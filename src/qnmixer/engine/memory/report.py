"""The output of `qnmixer.plan`: the parts of a run's footprint, and how settings change it."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rich.console import Console
from rich.progress import Progress

from qnmixer.engine.config import Config, effective_batch
from qnmixer.engine.config.commands import DEVICES, PlanConfig, device_memory
from qnmixer.engine.config.rules import validate
from qnmixer.engine.config.sections import PipelineConfig
from qnmixer.engine.config.target import options
from qnmixer.engine.memory.advice import changed_to
from qnmixer.engine.memory.footprint import MIB, Prediction, on_a_gpu
from qnmixer.engine.memory.pipeline import cut_of, idle, n_microbatches
from qnmixer.engine.memory.plan import Planner, with_assumed_devices
from qnmixer.engine.reports.tables import markdown_table, terminal_table
from qnmixer.errors import ConfigError

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
    "strategy=pipeline strategy.schedule=sequential trainer.devices=4 data.batch_size=1": "one device works at a time",
}
"""What people try in order to save memory, and what it costs. Data parallelism is here because it saves none."""


def usable(device: str) -> float:
    """MiB of a device that a run can use. The share of CUDA, its libraries and gaps between tensors is assumed."""
    return 0.95 * device_memory(device) - 1024


def print_plan(config: PlanConfig) -> None:
    """Print the plan of one run in the given format. Raises ConfigError or GeometryError."""
    assumed = ", assumed" if with_assumed_devices(config.run) != config.run else ""
    config = replace(config, run=with_assumed_devices(config.run))
    planner = Planner(config.run)
    if config.format == "levers":
        print(levers_table(config.run, planner))
        return
    prediction = planner.predict(config.run)
    if config.format == "json":
        print(json.dumps(as_object(config.run, prediction, _devices(config))))
        return
    console = Console(markup=False)
    _print_run(console, config.run, prediction, assumed)
    if isinstance(config.run.strategy, PipelineConfig):
        _print_pipeline(console, config.run, config.run.strategy, prediction, planner)
    _print_tables(console, config, planner)
    _print_optimizers(console, config.run, planner)


def as_object(config: Config, prediction: Prediction, devices: list[str]) -> dict[str, object]:
    """The plan as plain data, in MiB. `fits` says for some devices whether the run fits into them."""
    footprint, grows = prediction.footprint, prediction.per_iteration
    plan: dict[str, object] = {
        "strategy": config.strategy.name,
        "peak_mib": round(footprint.peak / MIB, 3),
        "per_iteration_mib": None if grows is None else round(grows / MIB, 3),
        "parts": {name: round(value / MIB, 3) for name, value in footprint.parts().items()},
        "host_mib": round(footprint.host / MIB, 3),
        "fits": {name: footprint.peak / MIB <= usable(name) for name in devices},
        "devices": [round(device.footprint.peak / MIB, 3) for device in prediction.devices],
    }
    if isinstance(config.strategy, PipelineConfig):
        plan["idle_share"] = round(idle(config), 4)
    return plan


def levers_table(config: Config, planner: Planner, levers: Mapping[str, str] = LEVERS) -> str:
    """A Markdown table of levers: the run's peak with each lever alone. Levers that the run refuses are left out."""
    base = planner.estimate(config).peak
    rows = []
    for overrides, cost in levers.items():
        changed = changed_to(config, overrides)
        if changed is None:
            continue
        peak = planner.estimate(changed).peak
        rows.append([f"`{overrides}`", f"{peak / MIB:,.0f}", f"{1 - peak / base:.2%}", cost])
    table = markdown_table(["lever", "peak, MiB", "saves", "costs"], rows)
    return f"**{_setting(config)}: {base / MIB:,.0f} MiB**\n\n{table}"


def _setting(config: Config, assumed: str = "") -> str:
    spread = ""
    if config.strategy.name != "single":
        nodes = f" × {config.trainer.num_nodes} nodes" if config.trainer.num_nodes > 1 else ""
        spread = (
            f", strategy={config.strategy.name} on {config.trainer.devices} devices{nodes}{assumed} "
            f"({effective_batch(config)} slices an optimizer step)"
        )
    model, size = config.model, config.data.image_size
    width = f", C = {model.width}" if model.width else ""
    return (
        f"{model.name}, T = {model.T}{width}, {size} × {size} pixels, batch {config.data.batch_size}, "
        f"precision {config.trainer.precision}, memory={config.memory.name}, {config.optimizer.name}{spread}"
    )


def _print_run(console: Console, config: Config, prediction: Prediction, assumed: str) -> None:
    footprint = prediction.footprint
    parts = " · ".join(f"{name} {value / MIB:,.1f}" for name, value in footprint.parts().items())
    where = " on the fullest device" if len(prediction.devices) > 1 else ""
    grows, host = "", ""
    if prediction.per_iteration is not None:
        grows = f"\neach further iteration adds {prediction.per_iteration / MIB:,.1f} MiB"
    if footprint.host:
        host = f"\nmoved to host memory: {footprint.host / MIB:,.0f} MiB"
    if config.trainer.accelerator != "cpu":
        host += (
            f"\na run on a GPU shows about {on_a_gpu(footprint.peak) / MIB:,.0f} MiB: cuBLAS's workspaces "
            f"({on_a_gpu(0) / MIB:.0f} MiB) and 3 %, as measured on an H100"
        )
    console.print(
        f"{_setting(config, assumed)}\n"
        f"peak of a training step{where}: {footprint.peak / MIB:,.1f} MiB ({parts})"
        f"{grows}{host}",
        highlight=False,
        soft_wrap=True,
    )


def _print_pipeline(
    console: Console, config: Config, options: PipelineConfig, prediction: Prediction, planner: Planner
) -> None:
    """Print the plan of each device, and the memory under other schedules."""
    rows = [
        [str(n), ", ".join(map(_span, it.stages)), str(it.in_flight), f"{it.footprint.peak / MIB:,.0f}"]
        for n, it in enumerate(prediction.devices)
    ]
    headings = ["device", "iterations", "micro-batches in flight", "peak, MiB"]
    console.print(terminal_table(headings, rows, words=2, title="devices"))

    rows = []
    for variant in schedules(config, options):
        plans = planner.devices(variant)
        rows.append([
            variant.strategy.schedule,  # type: ignore[attr-defined]  # a pipeline's
            str(n_microbatches(variant)),
            str(max(plan.in_flight for plan in plans)),
            f"{max(plan.footprint.peak for plan in plans) / MIB:,.0f}",
            f"{idle(variant):.0%}",
        ])  # fmt: skip
    headings = ["schedule", "micro-batches", "most in flight", "peak of the fullest device, MiB", "idle"]
    console.print(terminal_table(headings, rows, title="schedules"))


def schedules(config: Config, options: PipelineConfig) -> Iterator[Config]:
    """The pipeline under each schedule that its batch and T allow."""
    for schedule in ("sequential", "gpipe", "1f1b", "interleaved"):
        per_device = max(2, options.stages_per_device) if schedule == "interleaved" else 1
        cut = cut_of(config) if per_device == options.stages_per_device else None
        strategy = replace(options, schedule=schedule, stages_per_device=per_device, cut=cut)
        variant = replace(config, strategy=strategy)
        try:
            validate(variant)
        except ConfigError:
            continue
        yield variant


def _span(iterations: range) -> str:
    first, last = iterations.start, iterations.stop - 1
    return str(first) if first == last else f"{first}–{last}"


def _print_tables(console: Console, config: PlanConfig, planner: Planner) -> None:
    """Print the peak by batch size, and the largest batch by device."""
    strategy = config.run.strategy
    least = strategy.microbatch_size if isinstance(strategy, PipelineConfig) else 1
    batches = [b * least for b in BATCHES]
    each = " of a device" if strategy.name != "single" else ""
    peaks: list[list[str]] = []
    columns: list[list[str]] = []
    variants = [(memory, precisions) for memory in options("memory") for precisions in PRECISIONS]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        planning = progress.add_task("planning", total=len(variants) * len(batches))
        for memory, precisions in variants:
            run = changed_to(config.run, f"memory={memory} trainer.precision={precisions[0]}")
            if run is None:
                progress.advance(planning, len(batches))
                continue
            of = {}
            for batch in batches:
                of[batch] = planner.estimate(replace(run, data=replace(run.data, batch_size=batch))).peak / MIB
                progress.advance(planning)
            peaks.append([memory, ", ".join(precisions), *(f"{of[b]:,.0f}" for b in batches)])
            columns.append([f"{memory}\n{precisions[0]}", *(_largest_batch(of, usable(d)) for d in _devices(config))])
    headings = ["memory", "precision", *(f"batch {b}{each}" for b in batches)]
    title = "peak of a training step, MiB"
    console.print(terminal_table(headings, peaks, words=2, title=title))
    headings, *largest = map(list, zip(["device", *_devices(config)], *columns, strict=True))
    title = f"largest batch{each} that fits"
    console.print(terminal_table(headings, largest, title=title))
    console.print(
        "Counted as lost: 1 GiB and 5 % to CUDA and its libraries (assumed). A V100 has no bf16.\n", style="dim"
    )


def _print_optimizers(console: Console, config: Config, planner: Planner) -> None:
    """Print state and peak by optimizer. A user's own optimizer is shown only if it is chosen."""
    rows = []
    base, chosen = planner.estimate(config), config.optimizer.name
    for name in dict.fromkeys([*options("optimizer"), chosen]):
        run = config if name == chosen else changed_to(config, f"optimizer={name}")
        if run is None:
            continue
        state = planner.optimizer_state(run)
        rows.append([name, f"{state / MIB:,.1f}", f"{(base.peak - base.optimizer + state) / MIB:,.1f}"])
    headings = ["optimizer", "state", "peak of a training step"]
    console.print(terminal_table(headings, rows, title="optimizers, MiB"))


def _largest_batch(peaks: dict[int, float], limit: float) -> str:
    """The batch size at which the line through two known peaks reaches the limit."""
    (few, small), (many, large) = sorted(peaks.items())
    batch = math.floor(few + (limit - small) * (many - few) / (large - small))
    return f"{batch:,}" if batch >= 1 else "none"


def _devices(config: PlanConfig) -> list[str]:
    return list(DEVICES) if config.device is None else [config.device]
