"""The operator: ours, deepinv's and ASTRA's; then a training step of QN-Mixer in each memory mode and precision.

    python notebooks/benchmarks/bench_step.py

One thread. Medians of rounds in which all variants take turns. Each peak is what the resident memory of a process of
its own grows by, matrices included, to about 1 MiB. All three operators have the same flat fan beam. Where deepinv or
ASTRA is missing, its row says so; the Makefile says how to install them.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from bench_memory import Step, config_of, measured_alone
from measuring import MIB, Row, machine, markdown, medians
from operators import OPERATORS, lacking, stand_in_for_torchvision
from torch import Tensor

from qnmixer.data.phantoms.phantoms import phantom
from qnmixer.physics import FanBeamGeometry

BATCH = 4
VARIANTS = {
    "keep": "",
    "recompute": "memory=recompute",
    "offload": "memory=offload",
    "keep, bf16-mixed": "trainer.precision=bf16-mixed",
    "keep, compiled": "compile=true",
}


def scan(size: int) -> FanBeamGeometry:
    """The paper's scan; smaller images have as many bins and views a pixel. 256 pixels: 64 views, 512 bins."""
    paper = FanBeamGeometry.paper(size // 4, size)
    n_bins = 2 * size
    return replace(paper, n_detectors=n_bins, detector_pitch=paper.detector_pitch * paper.n_detectors / n_bins)


def images(size: int) -> Tensor:
    """Phantoms, scaled to [0, 1]."""
    hu = torch.stack([torch.from_numpy(phantom(size, seed=0, part="train", index=k)) for k in range(BATCH)])
    return ((hu.float() + 1000) / 2000).clamp(0, 1)[:, None]


def operator_rows(size: int, rounds: int) -> Iterator[Row]:
    """A, Aᵀ and FBP; how far A is from ours; what stands in memory."""
    of = f"The operator, {size}², {scan(size).n_views} views of a flat fan beam, batch {BATCH}, one thread (× ours)"
    why_not = {name: reason for name in OPERATORS if (reason := lacking(name))}
    projectors = {name: OPERATORS[name](scan(size)) for name in OPERATORS if name not in why_not}
    x = images(size)
    y = projectors["ours"](x)
    for column, calls in {
        "A": {name: partial(projector, x) for name, projector in projectors.items()},
        "Aᵀ": {name: partial(projector.adjoint, y) for name, projector in projectors.items()},
        "FBP": {name: partial(projector.fbp, y) for name, projector in projectors.items()},
    }.items():
        seconds = medians(calls, rounds)
        for name in calls:
            yield Row(of, name, column, 1e3 * seconds[name], "ms", seconds[name] / seconds["ours"])
    for name, projector in projectors.items():
        yield Row(of, name, "‖A x − ours‖ : ‖ours‖", 100 * float((projector(x) - y).norm() / y.norm()), "%")
        yield Row(of, name, "its matrices or grids", sum(b.nbytes for b in projector.buffers()) / MIB, "MiB")
    for name, reason in why_not.items():
        yield Row(of, name, "A", reason)


def variant_rows(base: str, variants: list[str], rounds: int) -> Iterator[Row]:
    """Steps of QN-Mixer in each memory mode and precision: seconds and peak."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    overrides = {name: f"{base} {VARIANTS[name]}" for name in variants}
    seconds = medians({name: Step(config_of(words), device) for name, words in overrides.items()}, rounds)
    of = f"A training step of QN-Mixer, {base}, one thread (× keep; compiled: its compiler counts)"
    peaks = {name: measured_alone(words) for name, words in overrides.items()}
    for name in variants:
        yield Row(of, name, "step", seconds[name], "s", seconds[name] / seconds["keep"])
        yield Row(of, name, "peak", peaks[name], "MiB", peaks[name] / peaks["keep"])


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    stand_in_for_torchvision()
    rows = [row for size, rounds in ((64, 12), (256, 3)) for row in operator_rows(size, rounds)]
    rows += variant_rows("experiment=demo", list(VARIANTS), rounds=12)
    print(f"`make bench` on {machine()}. The figures of a table are of one run.\n{markdown(rows)}", end="")


if __name__ == "__main__":
    main()
