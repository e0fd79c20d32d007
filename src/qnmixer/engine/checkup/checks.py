"""The checklist of `qnmixer.doctor`: for each check what it tests, what it finds, and how to fix a failure."""

import json
import logging
import math
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qnmixer.engine.checkup.machine import (
    Check,
    check_backend,
    check_disk,
    check_precision,
    check_shared_memory,
    check_versions,
    checkpoint_bytes,
    existing,
    free_bytes,
    shared_memory_needed,
)
from qnmixer.engine.checkup.rank import GROWTH_STEPS, Number, Report, read_report, reference_gradients, train_a_little
from qnmixer.engine.checkup.ranks import named_ranks, run_ranks
from qnmixer.engine.cli import explain
from qnmixer.engine.config import Config, to_plain
from qnmixer.engine.config.rules import validate
from qnmixer.engine.config.run import devices_per_replica, with_iterations
from qnmixer.engine.config.sections import PipelineConfig
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.memory.footprint import MIB
from qnmixer.engine.parallel.devices import gpu_problem, has_bf16, resolve_devices
from qnmixer.engine.processes.cores import n_cores
from qnmixer.engine.reconstructor import build_geometry
from qnmixer.errors import RankFailed, UserError

PATIENCE = {"communication": 60.0, "training": 180.0}
"""If no rank makes progress for so many seconds, those furthest behind have hung."""

TOLERANCE = {"32": 1e-4, "16-mixed": 3e-2, "bf16-mixed": 1e-1}
"""Relative error of a gradient, compared with one process."""

# A gradient this much smaller than that of the whole network is mostly rounding. It is compared with this share of the
# whole gradient.
_SMALLEST_GRADIENT = 1e-3

_ITERATIONS_ON_CPU = 4


def checkup(config: Config, folder: Path) -> Iterator[Check]:
    """Run every check of a run that would write into `folder`. Yields each check as soon as it is done.

    A check that depends on a failed check is skipped. Raises KeyboardInterrupt on Ctrl-C.
    """
    on_cuda = config.trainer.accelerator != "cpu" and torch.cuda.is_available()
    gpu = torch.cuda.get_device_name(0) if on_cuda else None
    problem = None if config.trainer.accelerator == "cpu" else gpu_problem(config.trainer.devices or 1)
    first = [
        check_versions(problem, gpu),
        check_precision(config.trainer.precision, gpu, on_cuda and has_bf16()),
    ]
    yield from first
    asked = config if first[1].status != "FAIL" else _with_trainer(config, precision="32")  # reported only once
    try:
        config = resolve_devices(_with_trainer(asked, num_nodes=1))
    except UserError as error:
        failure = Check("devices", "FAIL", *_split(str(error)))
        first.append(failure if problem is None else Check("devices", "SKIP", "not checked, because versions failed"))
        yield first[-1]
    else:
        n = config.trainer.devices or 1
        what = f"{n} × {gpu}" if gpu else f"{n} on {n_cores()} CPU cores"
        nodes = "" if asked.trainer.num_nodes == 1 else f"; this node of {asked.trainer.num_nodes} only"
        yield Check("devices", "PASS", f"strategy={config.strategy.name}, {what}{nodes}")
        first.append(check_backend(config, dist.is_nccl_available(), dist.is_gloo_available()))
        yield first[-1]
        yield check_shared_memory(free_bytes(Path("/dev/shm")), shared_memory_needed(config))
        yield check_disk(free_bytes(existing(folder)), checkpoint_bytes(config), folder)
    failed = [check.name for check in first if check.status == "FAIL"]
    if not failed:
        communication = check_communication(config)
        yield communication
        failed = [communication.name] if communication.status == "FAIL" else []
    if not failed:
        yield from check_training(config)
    else:
        yield Check("training", "SKIP", f"not tried, because {' and '.join(failed)} failed")


def check_communication(config: Config, patience: float = PATIENCE["communication"]) -> Check:
    """Test collectives, and ddp on one linear layer. All devices take part, each in a new process."""
    name, n = "communication", config.trainer.devices or 1
    if n == 1:
        return Check(name, "SKIP", "a single device needs no communication")
    fix = "GLOO_SOCKET_IFNAME=lo in the environment"
    if config.trainer.accelerator == "cuda":
        fix = "NCCL_DEBUG=INFO shows why; NCCL_P2P_DISABLE=1 if GPUs cannot reach each other; docker --ipc=host"
    with tempfile.TemporaryDirectory(prefix="qnmixer-doctor-") as temporary:
        folder = Path(temporary)
        try:
            run_ranks({"accelerator": config.trainer.accelerator, "config": None}, folder, n, patience)
            ranks = [json.loads((folder / f"communication_{rank}.json").read_text()) for rank in range(n)]
        except RankFailed as error:
            return Check(name, "FAIL", str(error), fix)
    expected = n * (n + 1) / 2
    if wrong := [rank for rank, found in enumerate(ranks) if found["total"] != [expected, expected]]:
        return Check(name, "FAIL", f"{named_ranks(wrong)}: a wrong all-reduce, {ranks[wrong[0]]['total']}", fix)
    if wrong := [rank for rank, found in enumerate(ranks) if found["weights"] != ranks[0]["weights"]]:
        return Check(name, "FAIL", f"{named_ranks(wrong)}: weights differ from rank 0 after three steps of ddp", fix)
    slowest = max(found["seconds"] for found in ranks)
    return Check(name, "PASS", f"{n} ranks: sums right, weights equal in ddp, 16 MiB in {1e3 * slowest:.1f} ms")


def check_training(config: Config, patience: float = PATIENCE["training"]) -> Iterator[Check]:
    """Run some real steps over all devices, and check their results. `config` must come from `resolve_devices`."""
    run, changes = shortened(config)
    n, start = run.trainer.devices or 1, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="qnmixer-doctor-") as temporary:
        folder, failure, fix = Path(temporary), None, "try strategy=single first"
        try:
            with _silence():
                SliceDataModule(run.data, geometry=build_geometry(run)).prepare_data()
                if run.strategy.name == "single":
                    train_a_little(run, folder)
                else:
                    job = {"accelerator": run.trainer.accelerator, "config": to_plain(run)}
                    run_ranks(job, folder, n, patience)
        except Exception as error:
            failure = explain(error, "doctor") or f"{type(error).__name__}: {' '.join(str(error).split())}"
            if isinstance(error, UserError) and not isinstance(error, RankFailed):
                fix = ""  # its line says it
        seconds = time.monotonic() - start
        reports = [read_report(folder, rank) or Report() for rank in range(n)]
        if failure is not None:
            diverged = any(report.diverged for report in reports)
            yield Check("training", "FAIL", *_split(failure, "see below" if diverged else fix))
        else:
            yield Check("training", "PASS", f"T = {run.model.T}{changes}: {seconds:.0f} s")
        with _silence():
            yield _check_gradients(run, folder, reports)
    yield check_sharding(run, reports)
    yield check_growth(reports)
    yield check_finite(run.trainer.precision, reports)


def shortened(config: Config) -> tuple[Config, str]:
    """A shorter version of the run, and a text that says what is shorter. On a GPU the run stays as it is."""
    if config.trainer.accelerator == "cuda":
        return config, ""
    strategy, T, batch = config.strategy, _ITERATIONS_ON_CPU, min(config.data.batch_size, 2)
    if isinstance(strategy, PipelineConfig):
        T = max(T, devices_per_replica(config) * strategy.stages_per_device)
        batch = strategy.microbatch_size
        if config.model.T > T:
            strategy = replace(strategy, cut=None)
    T = min(T, config.model.T)
    accumulate = min(config.trainer.accumulate_grad_batches, 2)
    values = {
        "T": (T, config.model.T),
        "data.batch_size": (batch, config.data.batch_size),
        "accumulate_grad_batches": (accumulate, config.trainer.accumulate_grad_batches),
    }
    # Nothing here uses it, and it may be no multiple of the smaller number of batches.
    extra = {name: value for name, value in config.trainer.extra.items() if name != "limit_train_batches"}
    changes = [f"{name} {before}" for name, (now, before) in values.items() if now != before]
    run = replace(
        with_iterations(config, T),
        strategy=strategy,
        data=replace(config.data, batch_size=batch),
        trainer=replace(config.trainer, accumulate_grad_batches=accumulate, extra=extra),
    )
    validate(run)
    return run, f" (shortened on a CPU, from {', '.join(changes)})" if changes else ""


def _check_gradients(run: Config, folder: Path, reports: Sequence[Report]) -> Check:
    kept = [folder / f"gradients_{rank}.pt" for rank in range(len(reports))]
    if not all(path.exists() and report.n_finite for path, report in zip(kept, reports, strict=True)):
        return Check("gradients", "SKIP", "no step had finite gradients on all ranks")
    samples = [number for report in reports[:: devices_per_replica(run)] for number in report.window]
    expected = reference_gradients(run, samples, reports[0].scale)
    found = [torch.load(path, weights_only=True) for path in kept]
    rounded_to_10_bits = run.trainer.tf32 and run.trainer.accelerator == "cuda"
    precision = "16-mixed" if rounded_to_10_bits and run.trainer.precision == "32" else run.trainer.precision
    return compare_gradients(found, expected, TOLERANCE[precision], len(samples))


def compare_gradients(
    found: Sequence[Mapping[str, Tensor]], expected: Mapping[str, Tensor], tolerance: float, n_samples: int
) -> Check:
    """Compare the gradients of each rank, by parameter, with those of one process over the same samples."""
    smallest = _SMALLEST_GRADIENT * math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
    errors: dict[int, tuple[float, str]] = {}
    for rank, gradients in enumerate(found):
        errors[rank] = max(
            (float((gradients.get(name, torch.zeros(())) - truth).norm()) / max(float(truth.norm()), smallest), name)
            for name, truth in expected.items()
        )
    wrong = [rank for rank, (error, _) in errors.items() if not error <= tolerance]
    error, parameter = max(errors.values())
    size = f"relative error {error:.1e} in {parameter}, {tolerance:.0e} allowed"
    if wrong:
        return Check(
            "gradients",
            "FAIL",
            f"{named_ranks(wrong)}: gradients differ from one process over the same {n_samples} slices: {size}",
            "look for code that changes gradients on these ranks only: no_sync, a communication hook, parameters that "
            "only some ranks use",
        )
    return Check("gradients", "PASS", f"every rank has those of one process over the same {n_samples} slices: {size}")


def check_sharding(run: Config, reports: Sequence[Report]) -> Check:
    """Check that the ranks share every sample of an epoch once, in training and validation."""
    if not all(report.shares for report in reports):
        return Check("sharding", "SKIP", "training failed before it loaded data")
    problems = []
    for part, together in (("train", devices_per_replica(run)), ("val", 1)):
        shares = [report.shares[part] for report in reports]
        problems += [f"{part}: {problem}" for problem in sharing_problems(shares, reports[0].lengths[part], together)]
    if problems:
        more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
        return Check(
            "sharding",
            "FAIL",
            "; ".join(problems[:4]) + more,
            "put no sampler between EpochSampler and the loaders (use_distributed_sampler stays False)",
        )
    counts = " and ".join(f"{length} of {part}" for part, length in reports[0].lengths.items())
    return Check("sharding", "PASS", f"every slice once in an epoch: {counts}")


def sharing_problems(shares: Sequence[Sequence[Number]], length: int, together: int = 1) -> list[str]:
    """Errors in how ranks share samples 0 … length − 1, as texts. Samples of weight 0 only fill batches.

    Args:
        shares: the samples of each rank.
        length: samples of the epoch.
        together: number of neighbouring ranks that work on the same samples.
    """
    problems = []
    holders: dict[int, list[int]] = defaultdict(list)
    for first in range(0, len(shares), together):
        others = [r for r in range(first, first + together) if list(shares[r]) != list(shares[first])]
        if others:
            problems.append(f"{named_ranks(others)}: other samples than rank {first} of the same pipeline")
        for n, weight in shares[first]:
            if weight > 0:
                holders[n].append(first)
    problems += [
        f"sample {n} {len(ranks)} times ({named_ranks(sorted(set(ranks)))})"
        for n, ranks in sorted(holders.items())
        if len(ranks) > 1
    ]
    problems += [f"sample {n} missing" for n in range(length) if n not in holders]
    problems += [f"sample {n} does not exist ({named_ranks(holders[n])})" for n in holders if not 0 <= n < length]
    return problems


def check_growth(reports: Sequence[Report]) -> Check:
    """Check that the memory at the end of a step does not keep growing."""
    name = "memory growth"
    if leaking := {rank: report.leak for rank, report in enumerate(reports) if report.leak is not None}:
        steps, before, after = max(leaking.values(), key=lambda leak: leak[2] - leak[1])
        return Check(
            name,
            "FAIL",
            f"{named_ranks(list(leaking))}: {(after - before) / steps / MIB:.2g} MiB more after each of {steps} steps",
            "look for a loss, an image or a state that is stored from step to step without .detach()",
        )
    held = [report.held for report in reports if report.held is not None]
    if len(held) < len(reports):
        return Check(name, "SKIP", "training did not get so far")
    most = max(after - before for before, after in held)
    return Check(name, "PASS", f"at most {most / MIB:+.1f} MiB on a rank over {GROWTH_STEPS} small steps")


def check_finite(precision: str, reports: Sequence[Report]) -> Check:
    """Check that loss and gradients are finite. A GradScaler may skip some steps, but not all."""
    name = "finite values"
    fix = "trainer.precision=32, or bf16-mixed if the GPU has it" if precision == "16-mixed" else "look at that module"
    for rank, report in enumerate(reports):
        where = f"; the first such output was that of {report.not_finite}" if report.not_finite else ""
        if report.diverged:
            return Check(name, "FAIL", f"rank {rank}, {precision}: {report.error}{where}", fix)
        if report.n_skipped and (precision != "16-mixed" or not report.n_finite):
            steps = f"{report.n_skipped} of {report.n_skipped + report.n_finite} steps"
            what = f"the gradient of {report.bad_gradient} is not finite in {steps}"
            return Check(name, "FAIL", f"rank {rank}, {precision}: {what}{where}", fix)
    n_finite, n_skipped = reports[0].n_finite, reports[0].n_skipped
    if not n_finite:
        return Check(name, "SKIP", "training did not get so far")
    skipped = f", after {n_skipped} that the GradScaler skipped" if n_skipped else ""
    return Check(name, "PASS", f"{precision}: loss and gradients of {n_finite} steps{skipped}")


@contextmanager
def _silence() -> Iterator[None]:
    """Hide the output of libraries, which would stand between the lines of the checklist."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _with_trainer(config: Config, **changes: Any) -> Config:
    return replace(config, trainer=replace(config.trainer, **changes))


def _split(line: str, fix: str = "") -> tuple[str, str]:
    """Split the line of an error at its last colon: before it is what is wrong, after it is how to fix it."""
    found, _, rest = line.rpartition(": ")
    return (line, fix) if fix or not found else (found, rest)
