"""Reconstruct a whole series by `qnmixer.reconstruct`: time and memory of a slice must not grow.

The command runs as a process of its own, on DICOM slices and on a stack of sinograms, with an untrained network: no
number depends on the weights. Resident memory is read from /proc while it runs, pages of mapped files included.
`--large`: A and FBP of 512 × 512 pixels, 512 views and 1,024 bins too, up to 40 slices at once (minutes, 10 GB).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qnmixer.checkpoints.weights_file import CHECKPOINT_KEY
from qnmixer.config import parse, to_plain
from qnmixer.config.compose import compose
from qnmixer.data.phantoms import phantom
from qnmixer.files import write_text
from qnmixer.inference.writers import write_dicom
from qnmixer.memory.usage import read_usage, reset_peak
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.training.module import ReconstructionModule

MIB = 2**20
_PHANTOMS = 20  # different ones; the series repeats them
_SECONDS = 0.05  # between two looks at the process
_BATCHES = (1, 8, 40)  # of the large geometry


@dataclass
class Sample:
    """The command at one moment."""

    seconds: float
    slices: int  # written
    mib: float  # resident


def make_run(path: Path, overrides: list[str]) -> ReconstructionModule:
    """A network with random weights, as the checkpoint of a run."""
    module = ReconstructionModule(parse(compose("train", overrides)))
    content = {"format": 1, "config": to_plain(module.config), "largest_norm": 0.0}
    torch.save({"state_dict": module.state_dict(), CHECKPOINT_KEY: content}, path)
    return module


def make_slices(folder: Path, count: int, size: int) -> None:
    """A series in DICOM."""
    hu = [phantom(size, seed=0, part="test", index=k) for k in range(min(count, _PHANTOMS))]
    for k in range(count):
        path = folder / f"{k:05d}.dcm"
        write_dicom(path, hu[k % len(hu)], series_uid="1.2.3", description="a phantom", instance_number=k + 1)


def make_stack(path: Path, count: int, module: ReconstructionModule) -> None:
    """A series of sinograms, value × mm, [count, V, D]."""
    size, hu_max = module.config.data.image_size, module.config.data.hu_max
    hu = np.stack([phantom(size, seed=0, part="test", index=k) for k in range(min(count, _PHANTOMS))])
    with torch.no_grad():
        y = module.projector(torch.from_numpy((hu.clip(-1000, hu_max) + 1000) / (hu_max + 1000))[:, None].float())
    stack = np.lib.format.open_memmap(path, "w+", np.float32, (count, *y.shape[2:]))
    for k in range(count):
        stack[k] = y[k % len(y), 0].numpy()
    stack.flush()


def watch(command: list[str], output: Path) -> list[Sample]:
    """Run a command to its end; its samples, from the first slice that it wrote on."""
    samples, start = [], time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            slices = sum(name.endswith(".npy") for name in os.listdir(output)) if output.is_dir() else 0
            if slices and (mib := resident(process.pid)):
                samples.append(Sample(time.perf_counter() - start, slices, mib))
            time.sleep(_SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return samples


def resident(pid: int) -> float:
    """MiB of a process, 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except ProcessLookupError:
        return 0.0
    return sum(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def row(kind: str, samples: list[Sample], count: int) -> dict[str, Any]:
    """What the samples of a series say: its first and its last tenth, and their ratio."""
    first = [sample for sample in samples if sample.slices <= count / 10] or samples[:1]
    last = [sample for sample in samples if sample.slices >= 0.9 * count]
    early, late = mean(s.mib for s in first), mean(s.mib for s in last)
    half = next(sample for sample in samples if sample.slices >= count / 2)
    begin, end = samples[0], next(sample for sample in samples if sample.slices == samples[-1].slices)
    halves = [(b.seconds - a.seconds) / max(1, b.slices - a.slices) for a, b in ((begin, half), (half, end))]
    return {
        "input": kind, "slices": count,
        "slices_per_second": (end.slices - begin.slices) / max(_SECONDS, end.seconds - begin.seconds),
        "seconds_ratio": halves[1] / halves[0] if halves[0] else None,
        "mib_first_tenth": early, "mib_last_tenth": late, "mib_peak": max(s.mib for s in samples),
        "ratio": late / early,
    }  # fmt: skip


def time_series(kind: str, count: int, overrides: list[str], options: list[str]) -> dict[str, Any]:
    """One series through the command, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module = make_run(folder / "run.ckpt", overrides)
        source = folder / ("scans.npy" if kind == "sinograms" else "slices")
        if kind == "sinograms":
            make_stack(source, count, module)
        else:
            make_slices(source, count, module.config.data.image_size)
        given = [f"run={folder / 'run.ckpt'}", f"input={source}", f"output={folder / 'out'}", f"kind={kind}"]
        unit = ["unit=value"] if kind == "sinograms" else []
        command = ["qnmixer.reconstruct", *given, *unit, *options]
        return row(kind, watch(command, folder / "out"), count)


def measure_large() -> list[dict[str, Any]]:
    """Milliseconds and MiB of a slice through A and FBP, by how many go at once."""
    geometry = FanBeamGeometry(512, 400 / 512, 512, 1024, 0.75, 595.0, 490.6)
    start = time.perf_counter()
    projector = FanBeamProjector(geometry)
    built = time.perf_counter() - start
    with torch.no_grad():  # once, for the pages of the mapped matrices to be there
        projector.fbp(projector(torch.rand(1, 1, 512, 512)))
    rows = []
    for batch in _BATCHES:
        x = torch.rand(batch, 1, 512, 512)
        y = torch.rand(batch, 1, 512, 1024)
        for name, apply, argument in (("A", projector, x), ("FBP", projector.fbp, y)):
            seconds, mib = cost(apply, argument)
            rows.append(
                {"operator": name, "batch": batch, "ms_per_slice": 1e3 * seconds / batch, "mib_per_slice": mib / batch,
                 "build_seconds": built}
            )  # fmt: skip
    return rows


def cost(apply: Callable[[Tensor], Tensor], argument: Tensor) -> tuple[float, float]:
    """Seconds of one application, and by how many MiB it made this process grow."""
    with torch.no_grad():
        reset_peak(argument.device)
        before, start = read_usage(argument.device).reserved, time.perf_counter()
        apply(argument)
        return time.perf_counter() - start, (read_usage(argument.device).peak - before) / MIB


def show(result: dict[str, Any]) -> None:
    """The tables."""
    names = ("input", "slices", "slices/s", "time a slice, 2nd half : 1st", "MiB first tenth", "last", "ratio", "peak")
    table = Table(*names, title=result["network"])
    for r in result["series"]:
        table.add_row(
            r["input"], f"{r['slices']:,}", f"{r['slices_per_second']:.1f}",
            f"{r['seconds_ratio']:.2f}" if r["seconds_ratio"] else "", f"{r['mib_first_tenth']:.1f}",
            f"{r['mib_last_tenth']:.1f}", f"{r['ratio']:.3f}", f"{r['mib_peak']:.1f}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    if result["large"]:
        title = f"512 × 512, 512 views, 1,024 bins; built in {result['large'][0]['build_seconds']:.0f} s"
        table = Table("operator", "slices at once", "ms a slice", "MiB a slice", title=title)
        for r in result["large"]:
            table.add_row(r["operator"], str(r["batch"]), f"{r['ms_per_slice']:.0f}", f"{r['mib_per_slice']:.1f}")
        console.print(table)


def main() -> None:
    """Run the series, and what else was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slices", type=int, default=1000)
    parser.add_argument("--inputs", nargs="*", default=["slices", "sinograms"], choices=["slices", "sinograms"])
    parser.add_argument("--overrides", default="data.image_size=64 model.n_iterations=4 model.channels=16 noise=field")
    parser.add_argument("--options", nargs="*", default=[], help="of reconstruct, as in batch_size=8")
    parser.add_argument("--large", action="store_true", help="A and FBP of a large geometry too")
    parser.add_argument("--json", type=Path, help="where to write the results too")
    arguments = parser.parse_args()
    overrides = arguments.overrides.split()
    series = [time_series(kind, arguments.slices, overrides, arguments.options) for kind in arguments.inputs]
    result = {"network": arguments.overrides, "series": series, "large": measure_large() if arguments.large else []}
    show(result)
    if arguments.json is not None:
        write_text(arguments.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
