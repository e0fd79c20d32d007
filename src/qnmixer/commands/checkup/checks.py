"""The checklist of `qnmixer.doctor`: for each check what it tests, what it finds, and how to fix a failure."""

import logging
import math
import platform
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from qnmixer.commands.checkup.rank import STEPS, Report, examine, read_report, run_ranks, train_a_little
from qnmixer.errors import RankFailed, UserError
from qnmixer.machine import n_cores
from qnmixer.parallel.device_memory import MIB
from qnmixer.parallel.devices import check_precision, choose_device, resolve_devices
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.runs.processes.folders import temporary_folder
from qnmixer.runs.run import Run
from qnmixer.settings.error_lines import explain
from qnmixer.settings.run import Config, effective_batch
from qnmixer.settings.sections import MemoryConfig
from qnmixer.settings.strategies import SingleConfig

TOLERANCE = {"64": 1e-6, "32": 1e-4, "16-mixed": 3e-2, "bf16-mixed": 1e-1}
"""Relative error of a gradient, compared with one process. In float64 a part that a user keeps in float32 rounds."""

# A gradient this much smaller than that of the whole network is mostly rounding. It is compared with this share of the
# whole gradient.
_SMALLEST_GRADIENT = 1e-3

_LEAST_GROWTH = 4096  # bytes a step; a callback may store numbers


@dataclass(frozen=True)
class Check:
    """One line of the checklist: PASS, FAIL or SKIP. `mend` says how to fix a FAIL, and is empty otherwise."""

    name: str
    status: str
    found: str  # as in format=json
    mend: str = ""

    def line(self) -> str:
        """The line of the table."""
        return f"{self.status}  {self.name:<15}{self.found}{self.mend and '. Fix: '}{self.mend}"


def judged(name: str, passes: bool, finding: str, mend: str) -> Check:
    """A check that was tried."""
    return Check(name, "PASS", finding) if passes else Check(name, "FAIL", finding, mend)


def checkup(config: Config, folder: Path) -> Iterator[Check]:
    """Run every check of a run that would write into `folder`. Yields each check as soon as it is done.

    A check that depends on a failed check is skipped. Raises KeyboardInterrupt on Ctrl-C.
    """
    this_node = config.changed(trainer=config.trainer.changed(num_nodes=1))
    failures = []
    for check in _machine(this_node, folder):
        yield check
        if check.status == "FAIL" and check.name not in ("shared memory", "disk"):
            failures.append(check.name)
    if failures:
        yield Check("training", "SKIP", f"not tried, because {' and '.join(failures)} failed")
    else:
        yield from check_run(resolve_devices(this_node))


def _machine(config: Config, folder: Path) -> Iterator[Check]:
    """The checks that run nothing."""
    trainer, name = config.trainer, "versions"
    try:
        device = choose_device(trainer.accelerator, "trainer.accelerator")
        gpu = torch.cuda.get_device_name(0) if device.type == "cuda" else None
        built = f"CUDA {torch.version.cuda}, built for {gpu}" if gpu else "on a CPU"
        python = f"python {platform.python_version()}, torch {torch.__version__}, lightning {version('lightning')}"
        yield Check(name, "PASS", f"{python}, {built}")
        name = "precision"
        check_precision(device, trainer.precision)
        yield Check(name, "PASS", f"{trainer.precision} on {gpu or 'the CPU'}")
        name = "devices"
        resolved = resolve_devices(config)
    except UserError as error:
        yield Check(name, "FAIL", *_split(str(error)))
        return
    n = resolved.trainer.per_node or 1
    hardware = f"{n} × {gpu}" if gpu else f"{n} on {n_cores()} CPU cores"
    yield Check(name, "PASS", f"strategy={config.strategy.name}, {hardware} of this node")
    backend = "nccl" if gpu else "gloo"
    if n == 1:
        yield Check("backend", "SKIP", "a single device needs no communication")
    else:
        mend = "install torch from pytorch.org on Linux, or strategy=single"
        yield judged("backend", dist.is_backend_available(backend), backend, mend)
    if (shared := Path("/dev/shm")).is_dir():
        mend = "docker run --shm-size=8g (or --ipc=host), or lower data.num_workers"
        yield _space("shared memory", "data workers need", shared_memory_needed(resolved), shared, mend)
    ancestor = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    mend = "free some space, or another folder (hydra.run.dir=…)"
    # best, last, and one that is being written
    yield _space("disk", "3 checkpoints need", 3 * checkpoint_bytes(resolved), ancestor, mend)


def _space(name: str, need: str, needed: int, folder: Path, mend: str) -> Check:
    free_bytes = shutil.disk_usage(folder).free
    finding = f"{need} {needed / MIB:,.0f} MiB, {free_bytes / MIB:,.0f} MiB are free in {folder}"
    return judged(name, free_bytes >= needed, finding, mend)


def shared_memory_needed(config: Config) -> int:
    """At most so many bytes of batches do the data workers of a node prepare, in training and validation."""
    data, geometry = config.data, config.geometry
    # A slice, perhaps on a finer grid, and its sinogram.
    values = (data.simulation_factor * data.image_size) ** 2 + geometry.n_views * geometry.n_detectors
    workers = (config.trainer.per_node or 1) * data.num_workers
    return workers * data.prefetch_factor * (config.strategy.batch_of_replica(config) + data.batch_size) * 4 * values


def checkpoint_bytes(config: Config) -> int:
    """Bytes of weights, of their mean, which some runs have, and of an optimizer's two numbers for each weight."""
    return 4 * sum(p.nbytes for p in Reconstructor(config).parameters())


@dataclass(frozen=True)
class Trial:
    """What some real steps gave."""

    reports: list[Report]  # one of each rank
    reference: Report  # of the first step in one process; an empty one if that was not reached
    failure: str | None  # what ended the steps, in one line
    fix: str
    seconds: float


def check_run(config: Config) -> Iterator[Check]:
    """Run some real steps over all devices, and check their results. `config` must come from `resolve_devices`."""
    trial = run_steps(config)
    yield (communication := check_communication(config, trial))
    if communication.status == "FAIL":
        yield Check("training", "SKIP", "not tried, because communication failed")
        return
    if trial.failure is not None:
        yield Check("training", "FAIL", *_split(trial.failure, trial.fix))
    else:
        yield Check("training", "PASS", f"{STEPS} steps, T = {config.model.T}: {trial.seconds:.0f} s")
    yield check_gradients(config, trial)
    yield check_sharding(config, trial.reports)
    yield check_growth(trial.reports)
    yield check_finite(config.trainer.precision, trial.reports)


def run_steps(config: Config) -> Trial:
    """Run the steps over all devices, then the first of them in one process. Their errors become a line."""
    n, start, failure, reference = config.trainer.per_node or 1, time.monotonic(), None, Report()
    fix = "python -m qnmixer.train with these settings prints where it fails"
    if n > 1:
        fix += "; if this checkup passes with strategy=single, the fault is between the processes"
    with temporary_folder("doctor") as folder, _silence():
        try:
            if config.strategy.is_parallel:
                run_ranks(config, folder, n)
            else:
                examine(config, Run(folder))
            # The ranks say whether float64 worked, and whether the module optimizes by itself.
            reports = [read_report(folder, rank) for rank in range(n)]
            alone, exact = single_process(config, reports[0].manual), all(report.in_float64 for report in reports)
            train_a_little(reference, alone, folder, n_steps=1, in_float64=exact)
        except Exception as error:
            failure = explain(error, "doctor") or f"{type(error).__name__}: {' '.join(str(error).split())}"
            if isinstance(error, UserError) and not isinstance(error, RankFailed):
                fix = ""  # its line says it
        reports = [read_report(folder, rank) for rank in range(n)]  # also of ranks that ended early
    return Trial(reports, reference, failure, fix, time.monotonic() - start)


def check_communication(config: Config, trial: Trial) -> Check:
    """Check that the ranks reached each other, before anything was trained."""
    name, n = "communication", len(trial.reports)
    if n == 1:
        return Check(name, "SKIP", "a single device needs no communication")
    if all(report.talks for report in trial.reports):
        return Check(name, "PASS", f"{n} ranks: sums right, weights of a linear layer equal in ddp")
    mend = "GLOO_SOCKET_IFNAME=lo in the environment"
    if config.trainer.accelerator == "cuda":
        mend = "NCCL_DEBUG=INFO shows why; NCCL_P2P_DISABLE=1 if GPUs cannot reach each other; docker --ipc=host"
    return Check(name, "FAIL", trial.failure or "a rank ended without a report", mend)


def check_gradients(config: Config, trial: Trial) -> Check:
    """Check the gradients of all ranks against those of one process: in float64 if it worked on all of them."""
    name, reports, expected = "gradients", trial.reports, trial.reference.gradients
    if not config.datamodule.is_of_slices:
        return Check(name, "SKIP", f"several devices share the slices of {config.datamodule.target} in another order")
    if expected and all(report.in_float64 for report in reports):
        return compare_gradients([report.in_float64 for report in reports], expected, TOLERANCE["64"])
    if not expected or not all(report.gradients for report in reports):
        return Check(name, "SKIP", "the first step had no finite gradients on all ranks")
    precision = config.trainer.precision
    if precision == "32" and config.trainer.tf32 and config.trainer.accelerator == "cuda":
        precision = "16-mixed"  # TF32 rounds to 10 bits, as fp16 does
    return compare_gradients([report.gradients for report in reports], expected, TOLERANCE[precision])


def single_process(config: Config, at_once: bool = False) -> Config:
    """The same optimizer step in one process, one slice at a time, or all slices at once."""
    batch = effective_batch(config)
    trainer = config.trainer.changed(devices=1, accumulate_grad_batches=1 if at_once else batch)
    # One device has no room for the graph that a pipeline spreads over several. The gradients are bit-identical.
    memory = MemoryConfig(name="recompute") if trainer.accelerator == "cuda" else config.memory
    data = config.data.changed(batch_size=batch if at_once else 1)
    return config.changed(strategy=SingleConfig(), trainer=trainer, memory=memory, data=data)


def compare_gradients(
    gradients_of_ranks: Sequence[Mapping[str, Tensor]], expected: Mapping[str, Tensor], tolerance: float
) -> Check:
    """Compare the gradients of each rank, by parameter, with those of one process over the same slices."""
    smallest = _SMALLEST_GRADIENT * math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
    errors = []
    for rank, gradients in enumerate(gradients_of_ranks):
        for name, truth in expected.items():
            difference = gradients.get(name, torch.zeros(())) - truth
            error = difference.norm() / truth.norm().clamp_min(smallest)
            errors.append((float(error.nan_to_num(nan=math.inf)), rank, name))
    largest, rank, parameter = max(errors)
    passes = largest <= tolerance
    verdict = "every rank has those of" if passes else f"rank {rank}: gradients differ from"
    found_error = f"relative error {largest:.1e} in {parameter}, {tolerance:.0e} allowed"
    fix = "look for code that changes gradients on these ranks only: no_sync, a hook, parameters that only some use"
    return judged("gradients", passes, f"{verdict} one process over the same slices: {found_error}", fix)


def check_sharding(run: Config, reports: Sequence[Report]) -> Check:
    """Check that the ranks share every sample of an epoch once, in training and validation."""
    if not all(report.shares for report in reports):
        reason = "" if run.datamodule.is_of_slices else f", or {run.datamodule.target} shares its slices itself"
        return Check("sharding", "SKIP", f"training failed before it loaded data{reason}")
    lengths, problems = reports[0].lengths, list[str]()
    # All devices of a pipeline train on the same samples.
    for part, by in (("train", reports[:: run.strategy.devices_per_replica(run)]), ("val", reports)):
        # Samples of weight 0 only fill batches.
        times = Counter(n for report in by for n, weight in report.shares[part] if weight > 0)
        wrong = [n for n in sorted({*times, *range(lengths[part])}) if times[n] != (n < lengths[part])]
        problems += [f"{part}: sample {n} {times[n]} times" for n in wrong]
    finding = f"every slice once in an epoch: {lengths['train']} of train and {lengths['val']} of val"
    fix = "put no sampler between EpochSampler and the loaders (use_distributed_sampler stays False)"
    return judged("sharding", not problems, "; ".join(problems[:4]) or finding, fix)


def check_growth(reports: Sequence[Report]) -> Check:
    """Check that tensors do not become more after each step. The first two steps make buffers and optimizer state."""
    name, fix = "memory growth", "look for a loss, an image or a state that is stored from step to step, .detach() it"
    if any(len(report.held) < STEPS for report in reports):
        return Check(name, "SKIP", "training did not get so far")
    for rank, report in enumerate(reports):
        steps = list(pairwise(report.held[2:]))
        graphs = min(end[0] - start[0] for start, end in steps)
        n_bytes = min(end[1] - start[1] for start, end in steps)
        if graphs > 0 or n_bytes >= _LEAST_GROWTH:
            finding = f"rank {rank}: {graphs} more tensors with graphs and {n_bytes / MIB:.2g} MiB more after each step"
            return Check(name, "FAIL", finding, fix)
    return Check(name, "PASS", f"no tensors are kept from step to step, in {len(reports[0].held)} steps")


def check_finite(precision: str, reports: Sequence[Report]) -> Check:
    """Check that loss and gradients are finite."""
    name, scaled = "finite values", precision == "16-mixed"
    fix = "trainer.precision=32, or bf16-mixed if the GPU has it" if scaled else "debug=anomaly names the line"
    for rank, report in enumerate(reports):
        if report.not_finite:
            return Check(name, "FAIL", f"rank {rank}, {precision}: {report.not_finite}", fix)
    if not reports[0].held:
        return Check(name, "SKIP", "training did not get so far")
    return Check(name, "PASS", f"{precision}: loss and gradients of {len(reports[0].held)} steps")


@contextmanager
def _silence() -> Iterator[None]:
    """Hide the output of libraries, which would stand between the lines of the checklist."""
    with warnings.catch_warnings(action="ignore"):
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _split(line: str, fix: str = "") -> tuple[str, str]:
    """Split the line of an error at its last colon: before it is what is wrong, after it is how to fix it."""
    finding, _, remedy = line.rpartition(": ")
    return (line, fix) if fix or not finding else (finding, remedy)
