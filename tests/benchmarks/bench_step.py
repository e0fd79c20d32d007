"""A training step and the operator alone: ours, deepinv's and ASTRA's; then QN-Mixer's memory modes and precisions.

    python tests/benchmarks/bench_step.py [--sizes 64 256] [--json PATH]

One thread. Medians of rounds in which all variants take turns. Each peak is what the resident memory of a process of
its own grows by, matrices included, to about 1 MiB. All three operators have the same flat fan beam. Where deepinv or
ASTRA is missing, its row says so; the Makefile says how to install them.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from bench_memory import Step as ConfiguredStep
from bench_memory import measured_alone
from measuring import MIB, in_own_process, medians, peak_mib
from operators import OPERATORS, lacking, stand_in_for_torchvision
from report import Row, finish, options_of
from torch import Tensor, nn

from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import parse
from qnmixer.engine.data.phantoms import phantom
from qnmixer.models import LEARN
from qnmixer.physics import FanBeamGeometry

BATCH, T, CHANNELS = 4, 4, 16
DEMO = "experiment=demo"
VARIANTS = {
    "keep": "",
    "recompute": "memory=recompute",
    "offload": "memory=offload",
    "keep, bf16-mixed": "trainer.precision=bf16-mixed",
    "keep, compiled": "compile=true",
}


class DataTerm(nn.Module):
    """QN-Mixer's data term alone: u ← u − λ_t A†(A u − y), from FBP(y)."""

    def __init__(self, projector: nn.Module) -> None:
        super().__init__()
        self.projector = projector
        self.step_sizes = nn.Parameter(torch.full((T,), 0.1))

    def forward(self, y: Tensor) -> Tensor:
        """u_T."""
        u = self.projector.fbp(y)
        for step_size in self.step_sizes:
            u = u - step_size * self.projector.filtered_residual(u, y)
        return u


NETWORKS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "LEARN": partial(LEARN, n_iterations=T, channels=CHANNELS),
    "data term": DataTerm,
}


class Step:
    """Forward, backward, AdamW."""

    def __init__(self, network: str, operator: str, size: int) -> None:
        self.x = images(size)
        projector = OPERATORS[operator](scan(size))
        with torch.no_grad():
            self.y = projector(self.x)
        self.module = NETWORKS[network](projector)
        self.optimizer = torch.optim.AdamW(self.module.parameters())

    def __call__(self) -> None:
        """One step."""
        loss = (self.module(self.y) - self.x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def scan(size: int) -> FanBeamGeometry:
    """The paper's scan; smaller images have as many bins and views a pixel. 256 pixels: 64 views, 512 bins."""
    paper = FanBeamGeometry.paper(size // 4, size)
    n_bins = 2 * size
    return replace(paper, n_detectors=n_bins, detector_pitch=paper.detector_pitch * paper.n_detectors / n_bins)


def images(size: int) -> Tensor:
    """Phantoms, scaled to [0, 1]."""
    hu = torch.stack([torch.from_numpy(phantom(size, seed=0, part="train", index=k)) for k in range(BATCH)])
    return ((hu.float() + 1000) / 2000).clamp(0, 1)[:, None]


def title_of(size: int) -> str:
    """What all tables of a size say."""
    return f"{size}², {scan(size).n_views} views of a flat fan beam, batch {BATCH}, one thread"


def operator_rows(size: int, operators: list[str], rounds: int) -> Iterator[Row]:
    """A, Aᵀ and FBP; how far A is from ours; what stands in memory."""
    of = f"The operator alone, {title_of(size)} (× as long as ours)"
    x, projectors = images(size), {name: OPERATORS[name](scan(size)) for name in operators}
    y = projectors["ours"](x)
    difference = {name: float((projector(x) - y).norm() / y.norm()) for name, projector in projectors.items()}
    for column, calls in {
        "A": {name: partial(projector, x) for name, projector in projectors.items()},
        "Aᵀ": {name: partial(projector.adjoint, y) for name, projector in projectors.items()},
        "FBP": {name: partial(projector.fbp, y) for name, projector in projectors.items()},
    }.items():
        seconds = medians(calls, rounds)
        for name in calls:
            yield Row(of, name, column, 1e3 * seconds[name], "ms", seconds[name] / seconds["ours"])
    for name, projector in projectors.items():
        yield Row(of, name, "‖A x − ours‖ : ‖ours‖", 100 * difference[name], "%")
        yield Row(of, name, "its matrices or grids", sum(b.nbytes for b in projector.buffers()) / MIB, "MiB")


def step_rows(size: int, operators: list[str], rounds: int) -> Iterator[Row]:
    """Steps of each network on each operator: seconds and peak."""
    layers = f"T = {T}; LEARN of {CHANNELS} channels, and QN-Mixer's data term alone"
    of = f"A training step, {title_of(size)}, {layers} (× ours)"
    for network in NETWORKS:
        seconds = medians({name: Step(network, name, size) for name in operators}, rounds)
        peaks = {name: float(in_own_process(__file__, "--peak", network, name, str(size))) for name in operators}
        for name in operators:
            yield Row(of, name, f"{network}, step", seconds[name], "s", seconds[name] / seconds["ours"])
            yield Row(of, name, f"{network}, peak", peaks[name], "MiB", peaks[name] / peaks["ours"])


def variant_rows(base: str, variants: list[str], rounds: int, device: torch.device) -> Iterator[Row]:
    """Steps of our QN-Mixer in each memory mode and precision: seconds and peak."""
    overrides = {name: f"{base} {VARIANTS[name]}" for name in variants}
    steps = {name: ConfiguredStep(parse(compose("train", overrides[name].split())), device) for name in variants}
    seconds = medians(steps, rounds)
    of = f"A training step of QN-Mixer, {base}, one thread (× keep; compiled: its compiler counts)"
    peaks = {name: measured_alone(overrides[name]) for name in variants}
    for name in variants:
        yield Row(of, name, "step", seconds[name], "s", seconds[name] / seconds["keep"])
        yield Row(of, name, "peak", peaks[name], "MiB", peaks[name] / peaks["keep"])


def print_peak(network: str, operator: str, size: int) -> None:
    """Print the peak of a step in this process. A small step before brings in the code of all libraries."""
    Step(network, operator, 16)()
    print(peak_mib(partial(Step, network, operator, size), torch.device("cpu")))


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = options_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=3, help="at 256; smaller sizes have more")
    parser.add_argument("--base", default=DEMO, help="overrides of QN-Mixer")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS), help="of QN-Mixer")
    parser.add_argument("--peak", nargs=3, metavar=("NETWORK", "OPERATOR", "SIZE"), help="print this peak, in MiB")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stand_in_for_torchvision()
    if arguments.peak is not None:
        network, operator, size = arguments.peak
        print_peak(network, operator, int(size))
        return
    why_not = {name: reason for name in OPERATORS if (reason := lacking(name))}
    here = [name for name in OPERATORS if name not in why_not]
    rows: list[Row] = []
    for measure in (step_rows, operator_rows):
        for size in arguments.sizes:
            first, *others = measure(size, here, max(1, arguments.rounds * 256 // size))
            absent = [first._replace(line=name, value=reason, ratio=None) for name, reason in why_not.items()]
            rows += [first, *others, *absent]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.variants:
        rows += variant_rows(arguments.base, arguments.variants, 4 * arguments.rounds, device)
    finish(rows, arguments.json)


if __name__ == "__main__":
    main()
