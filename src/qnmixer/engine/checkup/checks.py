"""The checklist of `qnmixer.doctor`: for each check what it tests, what it finds, and how to fix a failure."""

import logging
import math
import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from qnmixer.engine.checkup.rank import (
    STEPS,
    Number,
    Report,
    examine,
    named_ranks,
    read_report,
    reference_gradients,
    run_ranks,
)
from qnmixer.engine.cli import explain
from qnmixer.engine.config.run import Config, batch_of_replica, devices_per_replica, with_iterations
from qnmixer.engine.config.sections import PipelineConfig
from qnmixer.engine.memory.usage import MIB
from qnmixer.engine.parallel.devices import resolve_devices
from qnmixer.engine.reconstructor import Reconstructor
from qnmixer.errors import RankFailed, UserError
from qnmixer.machine import n_cores

PATIENCE = 180.0
"""If no rank makes progress for so many seconds, those furthest behind have hung."""

TOLERANCE = {"32": 1e-4, "16-mixed": 3e-2, "bf16-mixed": 1e-1}
"""Relative error of a gradient, compared with one process."""

# A gradient this much smaller than that of the whole network is mostly rounding. It is compared with this share of the
# whole gradient.
_SMALLEST_GRADIENT = 1e-3

_ITERATIONS_ON_CPU = 3
_LEAST_GROWTH = 4096  # bytes a step; a callback may store numbers


@dataclass(frozen=True)
class Check:
    """One line of the checklist: PASS, FAIL or SKIP. `mend` says how to fix a FAIL, and is empty otherwise."""

    name: str
    status: str
    found: str
    mend: str = ""

    def line(self) -> str:
        """The line of the table."""
        return f"{self.status}  {self.name:<15}{self.found}{self.mend and '. Fix: '}{self.mend}"


def judged(name: str, passes: bool, found: str, mend: str) -> Check:
    """A check that was tried."""
    return Check(name, "PASS", found) if passes else Check(name, "FAIL", found, mend)


def checkup(config: Config, folder: Path) -> Iterator[Check]:
    """Run every check of a run that would write into `folder`. Yields each check as soon as it is done.

    A check that depends on a failed check is skipped. Raises KeyboardInterrupt on Ctrl-C.
    """
    this_node = replace(config, trainer=replace(config.trainer, num_nodes=1))
    failed = []
    for check in _machine(config, this_node, folder):
        yield check
        failed += [check.name] * (check.status == "FAIL" and check.name not in ("shared memory", "disk"))
    if failed:
        yield Check("training", "SKIP", f"not tried, because {' and '.join(failed)} failed")
    else:
        yield from check_run(resolve_devices(this_node))


def _machine(config: Config, this_node: Config, folder: Path) -> Iterator[Check]:
    """The checks that run nothing."""
    trainer = config.trainer
    on_cuda = trainer.accelerator != "cpu" and torch.cuda.is_available()
    gpu = torch.cuda.get_device_name(0) if on_cuda else None
    found = f"python {platform.python_version()}, torch {torch.__version__}, lightning {version('lightning')}"
    versions = Check("versions", "SKIP", f"{found} on a CPU, which needs no kernels for an architecture")
    if gpu:
        versions = Check("versions", "PASS", f"{found}, CUDA {torch.version.cuda}: built for {gpu}")
    fine = {"versions": versions, "precision": Check("precision", "PASS", f"{trainer.precision} on {gpu or 'the CPU'}")}
    try:
        resolved = resolve_devices(this_node)
    except UserError as error:
        what = str(error)
        of_key = {"trainer.accelerator": "versions", "trainer.precision": "precision"}
        failed = of_key.get(what.partition("=")[0], "devices")
        yield from (check for name, check in fine.items() if failed not in (name, "versions"))
        yield Check(failed, "FAIL", *_split(what))
        return
    yield from fine.values()
    n = resolved.trainer.devices or 1
    what = f"{n} × {gpu}" if gpu else f"{n} on {n_cores()} CPU cores"
    nodes = "" if trainer.num_nodes == 1 else f"; this node of {trainer.num_nodes} only"
    yield Check("devices", "PASS", f"strategy={config.strategy.name}, {what}{nodes}")
    if n == 1:
        yield Check("backend", "SKIP", "a single device needs no communication")
    else:
        name, there = ("nccl", dist.is_nccl_available()) if on_cuda else ("gloo", dist.is_gloo_available())
        what = name if there else f"this torch has no {name}"
        yield judged("backend", there, what, "install torch from pytorch.org on Linux, or strategy=single")
    shared = Path("/dev/shm")
    if shared.is_dir():
        mend = "docker run --shm-size=8g (or --ipc=host), or lower data.num_workers"
        yield _space("shared memory", "data workers need", shared_memory_needed(resolved), shared, mend)
    else:
        yield Check("shared memory", "SKIP", "this system has no /dev/shm")
    existing = next(it for it in (folder, *folder.absolute().parents) if it.exists())
    mend = "free some space, or another folder (hydra.run.dir=…)"
    # best, last, and one that is being written
    yield _space("disk", "3 checkpoints need", 3 * checkpoint_bytes(resolved), existing, mend)


def _space(name: str, what: str, needed: int, folder: Path, mend: str) -> Check:
    free = shutil.disk_usage(folder).free
    return judged(name, free >= needed, f"{what} {_size(needed)}, {_size(free)} are free in {folder}", mend)


def shared_memory_needed(config: Config) -> int:
    """Bytes of batches that all data workers of a node prepare, in training and validation."""
    data, geometry = config.data, config.geometry
    values = data.image_size**2
    if data.measured or config.noise.name != "none":  # with its sinogram, as the workers draw the noise
        values += geometry.n_views * geometry.n_detectors
    elif data.simulation_factor > 1:  # with a finer image, to simulate from
        values += (data.simulation_factor * data.image_size) ** 2
    workers = (config.trainer.devices or 1) * data.num_workers
    return workers * data.prefetch_factor * (batch_of_replica(config) + data.batch_size) * 4 * values


def checkpoint_bytes(config: Config) -> int:
    """Bytes of weights, of their mean, which some runs have, and of an optimizer's two numbers for each weight."""
    return 4 * sum(p.nbytes for p in Reconstructor(config).parameters())


def check_run(config: Config, patience: float = PATIENCE) -> Iterator[Check]:
    """Run some real steps over all devices, and check their results. `config` must come from `resolve_devices`."""
    run, changes = shortened(config)
    n, start = run.trainer.devices or 1, time.monotonic()
    failure, fix = None, "python -m qnmixer.train with these settings prints where it fails"
    if n > 1:
        fix += "; if this checkup passes with strategy=single, the fault is between the processes"
    with tempfile.TemporaryDirectory(prefix="qnmixer-doctor-") as temporary:
        folder = Path(temporary)
        with _silence():
            try:
                if run.strategy.name == "single":
                    examine(run, folder, patience)
                else:
                    run_ranks(run, folder, n, patience)
            except Exception as error:
                failure = explain(error, "doctor") or f"{type(error).__name__}: {' '.join(str(error).split())}"
                if isinstance(error, UserError) and not isinstance(error, RankFailed):
                    fix = ""  # its line says it
        seconds = time.monotonic() - start
        reports = [read_report(folder, rank) for rank in range(n)]
    communication = check_communication(run, reports, failure)
    yield communication
    if communication.status == "FAIL":
        yield Check("training", "SKIP", "not tried, because communication failed")
        return
    if failure is not None:
        diverged = any(report.diverged for report in reports)
        yield Check("training", "FAIL", *_split(failure, "see below" if diverged else fix))
    else:
        yield Check("training", "PASS", f"T = {run.model.T}{changes}: {seconds:.0f} s")
    with _silence():
        yield _check_gradients(run, reports)
    yield check_sharding(run, reports)
    yield check_growth(reports)
    yield check_finite(run.trainer.precision, reports)


def shortened(config: Config) -> tuple[Config, str]:
    """A version with fewer iterations for a CPU, and a text that says so. A pipeline needs all of them."""
    if config.trainer.accelerator == "cuda" or isinstance(config.strategy, PipelineConfig):
        return config, ""
    run = with_iterations(config, min(_ITERATIONS_ON_CPU, config.model.T))
    return run, " (shortened on a CPU)" if run != config else ""


def check_communication(run: Config, reports: Sequence[Report], failure: str | None) -> Check:
    """Check collectives, and ddp on one linear layer."""
    name, n = "communication", len(reports)
    if n == 1:
        return Check(name, "SKIP", "a single device needs no communication")
    fix = "GLOO_SOCKET_IFNAME=lo in the environment"
    if run.trainer.accelerator == "cuda":
        fix = "NCCL_DEBUG=INFO shows why; NCCL_P2P_DISABLE=1 if GPUs cannot reach each other; docker --ipc=host"
    if not all(report.total for report in reports):
        return Check(name, "FAIL", failure or "a rank ended without a report", fix)
    expected = n * (n + 1) / 2
    if wrong := [rank for rank, report in enumerate(reports) if report.total != (expected, expected)]:
        return Check(name, "FAIL", f"{named_ranks(wrong)}: a wrong all-reduce, {reports[wrong[0]].total}", fix)
    if wrong := [rank for rank, report in enumerate(reports) if report.weights != reports[0].weights]:
        return Check(name, "FAIL", f"{named_ranks(wrong)}: weights differ from rank 0 after three steps of ddp", fix)
    slowest = max(report.seconds for report in reports)
    return Check(name, "PASS", f"{n} ranks: sums right, weights equal in ddp, 16 MiB in {1e3 * slowest:.1f} ms")


def _check_gradients(run: Config, reports: Sequence[Report]) -> Check:
    if not all(report.gradients for report in reports):
        return Check("gradients", "SKIP", "no step had finite gradients on all ranks")
    samples = [number for report in reports[:: devices_per_replica(run)] for number in report.window]
    expected = reference_gradients(run, samples, reports[0].scale)
    rounded_to_10_bits = run.trainer.tf32 and run.trainer.accelerator == "cuda"
    precision = "16-mixed" if rounded_to_10_bits and run.trainer.precision == "32" else run.trainer.precision
    return compare_gradients([report.gradients for report in reports], expected, TOLERANCE[precision], len(samples))


def compare_gradients(
    found: Sequence[Mapping[str, Tensor]], expected: Mapping[str, Tensor], tolerance: float, n_samples: int
) -> Check:
    """Compare the gradients of each rank, by parameter, with those of one process over the same samples."""
    smallest = _SMALLEST_GRADIENT * math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))

    def largest_error(gradients: Mapping[str, Tensor]) -> tuple[float, str]:
        differences = ((name, gradients.get(name, torch.zeros(())) - truth) for name, truth in expected.items())
        return max((float(it.norm()) / max(float(expected[name].norm()), smallest), name) for name, it in differences)

    errors = [largest_error(gradients) for gradients in found]
    wrong = [rank for rank, (error, _) in enumerate(errors) if not error <= tolerance]  # a nan is wrong too
    error, parameter = max(errors)
    what = f"{named_ranks(wrong)}: gradients differ from" if wrong else "every rank has those of"
    found_error = f"relative error {error:.1e} in {parameter}, {tolerance:.0e} allowed"
    fix = "look for code that changes gradients on these ranks only: no_sync, a hook, parameters that only some use"
    return judged("gradients", not wrong, f"{what} one process over the same {n_samples} slices: {found_error}", fix)


def check_sharding(run: Config, reports: Sequence[Report]) -> Check:
    """Check that the ranks share every sample of an epoch once, in training and validation."""
    if not all(report.shares for report in reports):
        return Check("sharding", "SKIP", "training failed before it loaded data")
    lengths, problems = reports[0].lengths, []
    # All devices of a pipeline train on the same samples.
    for part, first_ranks in (
        ("train", range(0, len(reports), devices_per_replica(run))),
        ("val", range(len(reports))),
    ):
        shares = {rank: reports[rank].shares[part] for rank in first_ranks}
        problems += [f"{part}: {problem}" for problem in sharing_problems(shares, lengths[part])]
    found = f"every slice once in an epoch: {lengths['train']} of train and {lengths['val']} of val"
    if problems:
        found = "; ".join(problems[:4]) + (f", and {len(problems) - 4} more" if len(problems) > 4 else "")
    fix = "put no sampler between EpochSampler and the loaders (use_distributed_sampler stays False)"
    return judged("sharding", not problems, found, fix)


def sharing_problems(shares: Mapping[int, Sequence[Number]], length: int) -> list[str]:
    """Those of samples 0 … length − 1 that the ranks do not share once. Samples of weight 0 only fill batches."""
    holders: dict[int, list[int]] = {n: [] for n in range(length)}
    for rank, share in shares.items():
        for n, weight in share:
            if weight > 0:
                holders.setdefault(n, []).append(rank)
    problems = []
    for n, ranks in sorted(holders.items()):
        if len(ranks) != (n < length):  # once, but never if there is no such sample
            problems.append(f"sample {n} {len(ranks)} times" + f" ({named_ranks(sorted({*ranks}))})" * bool(ranks))
    return problems


def check_growth(reports: Sequence[Report]) -> Check:
    """Check that tensors do not become more after each step. The first two steps make buffers and optimizer state."""
    name, fix = "memory growth", "look for a loss, an image or a state that is stored from step to step, .detach() it"
    if any(report.n_finite < STEPS for report in reports):
        return Check(name, "SKIP", "training did not get so far")
    for rank, report in enumerate(reports):
        graphs, sizes = zip(*report.held[2:], strict=True)
        if (more := min(b - a for a, b in pairwise(graphs))) > 0:
            return Check(name, "FAIL", f"rank {rank}: {more} more tensors with their graphs after each step", fix)
        if (more := min(b - a for a, b in pairwise(sizes))) >= _LEAST_GROWTH:
            return Check(name, "FAIL", f"rank {rank}: {more / MIB:.2g} MiB more after each step", fix)
    return Check(name, "PASS", f"no tensors are kept from step to step, in {len(reports[0].held)} steps")


def check_finite(precision: str, reports: Sequence[Report]) -> Check:
    """Check that loss and gradients are finite. A GradScaler may skip some steps, but not all."""
    name, scaled = "finite values", precision == "16-mixed"
    fix = "trainer.precision=32, or bf16-mixed if the GPU has it" if scaled else "debug=anomaly names the line"
    for rank, report in enumerate(reports):
        if report.diverged:
            return Check(name, "FAIL", f"rank {rank}, {precision}: {report.diverged}", fix)
        if report.n_skipped and not (scaled and report.n_finite):
            steps = f"{report.n_skipped} of {report.n_skipped + report.n_finite} steps"
            what = f"the gradient of {report.bad_gradient} is not finite in {steps}"
            return Check(name, "FAIL", f"rank {rank}, {precision}: {what}", fix)
    n_finite, n_skipped = reports[0].n_finite, reports[0].n_skipped
    if not n_finite:
        return Check(name, "SKIP", "training did not get so far")
    skipped = f", after {n_skipped} that the GradScaler skipped" if n_skipped else ""
    return Check(name, "PASS", f"{precision}: loss and gradients of {n_finite} steps{skipped}")


@contextmanager
def _silence() -> Iterator[None]:
    """Hide the output of libraries, which would stand between the lines of the checklist."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _size(n_bytes: float) -> str:
    return f"{n_bytes / MIB:,.0f} MiB" if n_bytes < 1024 * MIB else f"{n_bytes / 1024 / MIB:,.1f} GiB"


def _split(line: str, fix: str = "") -> tuple[str, str]:
    """Split the line of an error at its last colon: before it is what is wrong, after it is how to fix it."""
    found, _, rest = line.rpartition(": ")
    return (line, fix) if fix or not found else (found, rest)
