"""Reconstruct a whole series by `qnmixer.reconstruct`: time and memory of a slice must not grow.

The command runs as a process of its own, on DICOM slices and on a stack of sinograms, with an untrained network: no
number depends on the weights. Resident memory is read from /proc while it runs, pages of mapped files included.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from report import Row, finish

from qnmixer.engine.build import build_module
from qnmixer.engine.config import parse, to_plain
from qnmixer.engine.config.compose import compose
from qnmixer.engine.data.phantoms import phantom
from qnmixer.engine.inference.writers import write_dicom
from qnmixer.module import ReconstructionModule
from qnmixer.weights import CHECKPOINT_KEY

_PHANTOMS = 20  # different ones; the series repeats them
_SECONDS = 0.05  # between two looks at the process


@dataclass
class Sample:
    """The command at one moment."""

    seconds: float
    slices: int  # written
    mib: float  # resident


def make_run(path: Path, overrides: list[str]) -> ReconstructionModule:
    """A network with random weights, as the checkpoint of a run."""
    module = build_module(parse(compose("train", overrides)))
    content = {"format": 1, "config": to_plain(module.config)}
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


def rows_of(title: str, line: str, samples: list[Sample], count: int) -> Iterator[Row]:
    """What the samples of a series say: its speed, its memory, and whether either grows."""
    first = [sample.mib for sample in samples if sample.slices <= count / 10] or [samples[0].mib]
    last = [sample.mib for sample in samples if sample.slices >= 0.9 * count]
    begin, end = samples[0], next(sample for sample in samples if sample.slices == samples[-1].slices)
    half = next(sample for sample in samples if sample.slices >= count / 2)
    early, late = ((b.seconds - a.seconds) / max(1, b.slices - a.slices) for a, b in ((begin, half), (half, end)))
    speed = (end.slices - begin.slices) / max(_SECONDS, end.seconds - begin.seconds)
    yield Row(title, line, "speed", speed, "slices/s")
    yield Row(title, line, "time, second half : first", late / early if early else "too short")
    yield Row(title, line, "resident at the end", mean(last), "MiB")
    yield Row(title, line, "memory, last tenth : first", mean(last) / mean(first))


def series_rows(kind: str, count: int, overrides: str, options: list[str]) -> Iterator[Row]:
    """One series through the command, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module = make_run(folder / "run.ckpt", overrides.split())
        source = folder / ("scans.npy" if kind == "sinograms" else "slices")
        if kind == "sinograms":
            make_stack(source, count, module)
            options = [*options, "unit=value"]
        else:
            make_slices(source, count, module.config.data.image_size)
        given = [f"run={folder / 'run.ckpt'}", f"input={source}", f"output={folder / 'out'}", f"kind={kind}"]
        samples = watch(["qnmixer.reconstruct", *given, *options], folder / "out")
    yield from rows_of(f"reconstruct, {overrides}", f"{count:,} {kind}", samples, count)


def main() -> None:
    """Run the series that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slices", type=int, default=400)
    parser.add_argument("--inputs", nargs="*", default=["slices", "sinograms"], choices=["slices", "sinograms"])
    parser.add_argument("--overrides", default="data.image_size=64 model.n_iterations=4 model.channels=16 noise=field")
    parser.add_argument("--options", nargs="*", default=[], help="of reconstruct, as in batch_size=8")
    parser.add_argument("--json", type=Path, help="where to write the results too")
    arguments = parser.parse_args()
    given = arguments.slices, arguments.overrides, arguments.options
    finish([row for kind in arguments.inputs for row in series_rows(kind, *given)], arguments.json)


if __name__ == "__main__":
    main()
