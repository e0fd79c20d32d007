"""Compare a training step and an inference of QN-Mixer with a plain implementation, part by part.

    python tests/benchmarks/bench_step.py [--sizes 64 128 256] [--json PATH]

The network is the one that the paper's figures draw (`plain_qn_mixer.FIGURE`), so that both compute the same; a row
shows the default besides. Medians of rounds in which all variants take turns, all from one run on one machine.

The floor of a part is the larger of two times: its operations at the rate of a large matrix product, and its bytes at
the bandwidth of a large copy, both measured in the same run. Bytes are what it takes in, its weights and matrices, and,
twice, what it leaves for backward. What stays in a cache, as of small images, can be faster than this floor.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hardware import copy_bandwidth, matrix_rate, slowdown_beside_busy_core
from plain_qn_mixer import FIGURE, PlainOperator, PlainQNMixer, two_loops
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from qnmixer.config import Config, override, parse
from qnmixer.config.compose import compose
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.files import write_text
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.models import QNMixer
from qnmixer.models.data_term import data_gradient
from qnmixer.models.latent_bfgs import History
from qnmixer.optimization.optimizers import build_optimizer
from qnmixer.parallel.compilation import compile_blocks
from qnmixer.reconstructor import AUTOCAST
from qnmixer.training.module import ReconstructionModule

VARIANTS = {
    "keep": "",
    "recompute": "memory=recompute",
    "offload": "memory=offload",
    "keep, bf16-mixed": "trainer.precision=bf16-mixed",
    "keep, compiled": "compile=true",
    "recompute, compiled": "memory=recompute compile=true",
}
DEFAULT = "keep, our additions"
ASKED = {"keep": 1.5, "recompute": 1.0}
"""How many times as fast as the plain step these are to be, at 256 × 256."""
Call = Callable[[], object]


class Step:
    """A training step of a network: measure, forward, backward, clip, AdamW."""

    def __init__(self, network: nn.Module, measure: Callable[[Tensor], Tensor], config: Config, x: Tensor) -> None:
        self.network, self.measure, self.x = network, measure, x
        self.dtype = AUTOCAST[config.trainer.precision]
        self.parameters = list(network.parameters())
        self.optimizer = build_optimizer(config.optimizer, network)

    def __call__(self) -> None:
        with torch.no_grad():
            y = self.measure(self.x)
        with torch.autocast(self.x.device.type, dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            loss = (self.network(y) - self.x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.update()

    def update(self) -> None:
        """What follows backward."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()


class Plain(nn.Module):
    """The plain network with its operator."""

    def __init__(self, ours: QNMixer, x: Tensor) -> None:
        super().__init__()
        self.operator = PlainOperator(ours.projector.geometry, x.device)
        self.net = PlainQNMixer(ours, self.operator).to(x.device)

    def forward(self, y: Tensor) -> Tensor:
        return self.net(y)


def medians(calls: dict[str, Call], rounds: int, device: torch.device, warm: bool = False) -> dict[str, float]:
    """Median seconds of each, the first round left out; warm: right after another call of the same."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            if warm:
                call()
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: median(values[1:]) for name, values in seconds.items()}


def forward_and_backward(function: Callable[..., Tensor], *inputs: Tensor) -> Call:
    """A call that goes through a function and back, with a gradient of ones."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)

    def call() -> None:
        result = function(*inputs)
        result.backward(torch.ones_like(result))
        for x in inputs:
            x.grad = None

    return call


def our_latent_loop(codes: list[Tensor]) -> Tensor:
    """H of T gradient codes, as in `QNMixer`; the sum of the steps."""
    history = History.begin(codes[0], len(codes)).advance(codes[0])
    for r in codes[1:]:
        history, _ = history.way()
        history = history.advance(r)
    return history.way()[1]


def plain_latent_loop(codes: list[Tensor]) -> Tensor:
    """The same by two loops."""
    pairs: list[Any] = []
    before, s = codes[0], -codes[0]
    way = s
    for r in codes[1:]:
        z = r - before
        pairs.append((s, z, 1 / (z * s).sum((1, 2, 3), keepdim=True)))
        before, s = r, -two_loops(pairs, r)
        way = way + s
    return way


def parts_of(ours: QNMixer, plain: Plain, step: Step, plain_step: Step) -> dict[str, tuple[Call, Call, int]]:
    """By part: ours, the plain one, and how often a step does it."""
    x, T = step.x, ours.n_iterations
    y = ours.projector(x)
    (G,) = ours.regularizers
    plain_net, operator = plain.net, plain.operator
    latent = ours.codec.encode(x)
    codes = [torch.randn_like(latent) for _ in range(T)]
    flat = [code.flatten(1) for code in codes]

    def regularizations(x: Tensor) -> Tensor:
        weights, images = ours.shared_weights(range(T)), []
        for _ in range(T):
            with weights.in_use():
                images.append(G(x))
        return torch.cat(images)

    def plain_gradient(x: Tensor) -> Tensor:
        return operator.filtered_adjoint(operator.forward(x) - y)

    return {
        "operator": (
            forward_and_backward(lambda x: data_gradient(ours.projector, "fbp", x, y), x),
            forward_and_backward(plain_gradient, x),
            T,
        ),
        "regulariser": (  # T at once: iterations share some of the work
            forward_and_backward(regularizations, x),
            forward_and_backward(lambda x: torch.cat([plain_net.G(x) for _ in range(T)]), x),
            1,
        ),
        "codec": (
            forward_and_backward(lambda x: ours.codec.decode(ours.codec.encode(x)), x),
            forward_and_backward(
                lambda x: plain_net.shuffle(plain_net.decoder(plain_net.encoder(plain_net.unshuffle(x)))), x
            ),
            T,
        ),
        "BFGS": (
            forward_and_backward(lambda *codes: our_latent_loop(list(codes)), *flat),
            forward_and_backward(lambda *codes: plain_latent_loop(list(codes)), *codes),
            1,
        ),
        "optimizer": (step.update, plain_step.update, 1),
        "simulation": (partial(step.measure, x), partial(plain_step.measure, x), 1),
    }


def floor_of(part: str, call: Call, ours: QNMixer, bandwidth: float, rate: float) -> tuple[float, str]:
    """The least seconds of one call, and what bounds it."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    weights = sum(p.nbytes for p in ours.parameters())
    image = ours.projector.geometry.image_size**2 * 4
    matrices = sum(buffer.nbytes for buffer in ours.projector.buffers())
    moved = 2 * sum(kept.values()) + 2 * image
    if part == "operator":
        moved += matrices  # each of A, Aᵀ, and those of back-projection, once on the way there and back
    elif part == "simulation":
        moved += matrices // 4
    elif part == "optimizer":
        moved = 7 * weights  # weights, gradient and two moments read; all but the gradient written
    by_bytes, by_operations = moved / bandwidth, counter.get_total_flops() / rate
    return max(by_bytes, by_operations), "bytes" if by_bytes > by_operations else "operations"


def config_of(size: int, T: int, overrides: str, figure: bool = True) -> Config:
    """A config of the network of the figures, or of the default."""
    scan = f"data.image_size={size} geometry.n_detectors={2 * size} geometry.detector_pitch={480 / size}"
    # So that 256 × 256 is the paper's scan, and smaller images have one of as many bins a pixel.
    every = f"{scan} model.n_iterations={T} data.batch_size=1 {FIGURE if figure else ''}"
    return parse(compose("train", f"{every} {overrides}".split()))


def network_of(config: Config, weights: dict[str, Tensor] | None, device: torch.device) -> QNMixer:
    """The network of a config, with given weights, in its memory mode."""
    module = ReconstructionModule(config)
    network = module.network
    assert isinstance(network, QNMixer)
    network = network.to(device)
    if weights:
        network.load_state_dict(weights)
    apply_memory_mode(network, config.memory)
    if config.compile:
        compile_blocks(network)
    return network


def bench(size: int, variants: list[str], T: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Steps, inferences and parts at one size."""
    torch.compiler.reset()  # else it compiles a second size for any size, and stops compiling at the eighth graph
    torch.manual_seed(0)
    base = config_of(size, T, "")
    # An image as in training: how far its values reach decides how many features a CPU computes (`models.narrowing`).
    x = SliceDataModule(base.data).dataset("train")[0]["image"][None].to(device)
    ours = network_of(base, None, device)
    weights = {name: value.clone() for name, value in ours.state_dict().items()}
    plain = Plain(ours, x)
    plain_step = Step(plain, plain.operator.forward, base, x)
    steps = {"plain": plain_step}
    for name in variants:
        config = override(base, VARIANTS[name])
        network = network_of(config, weights, device)
        steps[name] = Step(network, network.projector, config, x)
    default = config_of(size, T, "", figure=False)
    network = network_of(default, None, device)
    steps[DEFAULT] = Step(network, network.projector, default, x)
    seconds = medians(dict(steps), rounds, device)

    y = ours.projector(x)

    def infer(network: nn.Module) -> Call:
        return torch.no_grad()(partial(network, y))

    inference = {name: infer(steps[name].network) for name in ("plain", "keep", DEFAULT)}
    inferred = medians(inference, rounds, device)

    for p in ours.parameters():  # away from G = 0, through which no gradient flows
        nn.init.normal_(p, std=0.02)
    first = Step(ours, ours.projector, base, x)
    parts = parts_of(ours, plain, first, plain_step)
    # Pairs take turns among themselves: what runs before a short call decides its time.
    found = {}
    for name, (call, other, _) in parts.items():
        short = name != "regulariser"  # whose call is T of them
        found[name] = medians({"ours": call, "plain": other}, 3 * rounds if short else rounds, device, warm=short)
    bandwidth, rate = copy_bandwidth(device), matrix_rate(device, torch.float32)
    rows = []
    for name, (call, _, times) in parts.items():
        floor, bound = floor_of(name, call, ours, bandwidth, rate)
        here, there = found[name]["ours"] * times, found[name]["plain"] * times
        rows.append(
            {"part": name, "seconds": here, "plain": there, "ratio": there / here, "floor": floor * times,
             "over_floor": here / (floor * times), "bound": bound, "of_step": here / seconds["keep"]}
        )  # fmt: skip
    return {
        "size": size,
        "T": T,
        "bandwidth": bandwidth,
        "matrix_rate": rate,
        "slowdown_beside_busy_core": slowdown_beside_busy_core(),
        "steps": {name: {"seconds": s, "times_as_fast": seconds["plain"] / s} for name, s in seconds.items()},
        "inference": {name: {"seconds": s, "times_as_fast": inferred["plain"] / s} for name, s in inferred.items()},
        "parts": rows,
    }


def show(found: dict[str, Any], console: Console) -> None:
    """The tables of one size."""
    size, T = found["size"], found["T"]
    table = Table("", "training, s", "× as fast", "inference, s", "× as fast")
    table.title = f"A step of QN-Mixer, {size} × {size}, T = {T}, batch 1, against the plain one"
    for name, row in found["steps"].items():
        asked = ASKED.get(name) if size == 256 else None
        mark = "" if asked is None else f" ({asked} asked: {'yes' if row['times_as_fast'] >= asked else 'NO'})"
        inferred = found["inference"].get(name)
        cells = ("", "") if inferred is None else (f"{inferred['seconds']:.3f}", f"{inferred['times_as_fast']:.2f}")
        table.add_row(name, f"{row['seconds']:.3f}", f"{row['times_as_fast']:.2f}{mark}", *cells)
    console.print(table)
    table = Table("part", "ms", "of step", "plain", "× as fast", "floor", "× above", "bound by")
    table.title = (
        f"By part, forward and backward, ms; floors at {found['bandwidth'] / 1e9:.1f} GB/s and "
        f"{found['matrix_rate'] / 1e9:.0f} GFLOP/s. Beside a busy core a loop takes "
        f"{found['slowdown_beside_busy_core']:.2f} times as long"
    )
    for row in found["parts"]:
        table.add_row(
            row["part"], f"{row['seconds'] * 1e3:.1f}", f"{row['of_step']:.1%}", f"{row['plain'] * 1e3:.1f}",
            f"{row['ratio']:.2f}", f"{row['floor'] * 1e3:.1f}", f"{row['over_floor']:.1f}", row["bound"],
        )  # fmt: skip
    console.print(table)


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--iterations", type=int, default=14, help="T")
    parser.add_argument("--rounds", type=int, default=5, help="at the largest size; smaller ones get more")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, help="of ours; default: all at the largest size")
    parser.add_argument("--json", type=Path, help="where to write the results too")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console()
    results = []
    for size in arguments.sizes:
        every = list(VARIANTS) if size == max(arguments.sizes) else ["keep", "recompute"]
        rounds = arguments.rounds * max(arguments.sizes) // size  # short steps differ more from each other
        results.append(bench(size, arguments.variants or every, arguments.iterations, rounds, device))
        show(results[-1], console)
    if arguments.json is not None:
        machine = {
            "processor": torch.cuda.get_device_name()
            if device.type == "cuda"
            else platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        write_text(arguments.json, json.dumps({"machine": machine, "sizes": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
