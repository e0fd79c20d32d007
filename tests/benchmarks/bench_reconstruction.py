"""Reconstruct a whole series by `qnmixer.reconstruct`: its speed after the start, and its memory, which must not grow.

The command runs as a process of its own, on DICOM slices and on a stack of sinograms, with an untrained network: no
number depends on the weights. Resident memory includes pages of mapped files.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from report import Row, finish, options_of

from qnmixer.engine.build import build_module
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import parse, to_plain
from qnmixer.engine.data.phantoms import phantom
from qnmixer.engine.inference.writers import write_dicom
from qnmixer.module import ReconstructionModule
from qnmixer.weights import CHECKPOINT_KEY

_PHANTOMS = 20  # different ones; the series repeats them
_COMMAND = """
import runpy
try:
    runpy.run_module("qnmixer.reconstruct", run_name="__main__")
finally:
    with open("/proc/self/status") as status:
        print("", *(line.split()[1] for line in status if line.startswith("VmHWM:")), sep="\\n")
"""


def make_run(path: Path, overrides: list[str]) -> ReconstructionModule:
    """A network with random weights, as the checkpoint of a run."""
    module = build_module(parse(compose("train", overrides)))
    content = {"format": 1, "config": to_plain(module.config)}
    torch.save({"state_dict": module.state_dict(), CHECKPOINT_KEY: content}, path)
    return module


def make_series(path: Path, count: int, module: ReconstructionModule) -> None:
    """Slices in a folder of DICOM, or sinograms, value × mm, in a .npy file [count, V, D]."""
    size, hu_max = module.config.data.image_size, module.config.data.hu_max
    hu = [phantom(size, seed=0, part="test", index=k) for k in range(min(count, _PHANTOMS))]
    if path.suffix == ".npy":
        x = (torch.from_numpy(np.stack(hu)).clamp(-1000, hu_max) + 1000) / (hu_max + 1000)
        with torch.no_grad():
            y = module.projector(x[:, None].float())
        np.save(path, y[torch.arange(count) % len(y), 0].numpy())
        return
    for k in range(count):
        of_series = {"series_uid": "1.2.3", "description": "a phantom", "instance_number": k + 1}
        write_dicom(path / f"{k:05d}.dcm", hu[k % len(hu)], **of_series)


def run(arguments: list[str]) -> tuple[float, float]:
    """Seconds of the command, and the peak of its resident memory in MiB."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _COMMAND, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return time.perf_counter() - start, float(done.stdout.splitlines()[-1]) / 1024


def series_rows(kind: str, count: int, overrides: str, options: list[str]) -> Iterator[Row]:
    """A quarter of a series through the command, then all of it, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), []
        module = make_run(folder / "run.ckpt", overrides.split())
        for n in (count // 4, count):
            source = folder / f"{n}{'.npy' * (kind == 'sinograms')}"
            make_series(source, n, module)
            given = [f"run={folder / 'run.ckpt'}", f"input={source}", f"output={folder / f'out{n}'}", f"kind={kind}"]
            found.append(run([*given, *["unit=value"] * (kind == "sinograms"), *options]))
    (quarter, small), (all_of_it, large) = found
    title, line = f"reconstruct, {overrides}", f"{count:,} {kind}"
    yield Row(title, line, "speed", (count - count // 4) / max(0.01, all_of_it - quarter), "slices/s")
    yield Row(title, line, "peak", large, "MiB")
    yield Row(title, line, "peak, all : a quarter", large / small)


def main() -> None:
    """Run the series that were asked for."""
    parser = options_of(__doc__)
    parser.add_argument("--slices", type=int, default=400)
    parser.add_argument("--inputs", nargs="*", default=["slices", "sinograms"], choices=["slices", "sinograms"])
    parser.add_argument("--overrides", default="data.image_size=64 model.n_iterations=4 model.channels=16 noise=field")
    parser.add_argument("--options", nargs="*", default=[], help="of reconstruct, as in batch_size=8")
    arguments = parser.parse_args()
    given = arguments.slices, arguments.overrides, arguments.options
    finish([row for kind in arguments.inputs for row in series_rows(kind, *given)], arguments.json)


if __name__ == "__main__":
    main()
