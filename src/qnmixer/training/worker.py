"""One run in several processes: the launcher starts a rank for each device, and each rank runs the same function.

The function is the one that the key `fit` names: `qnmixer.fit.fit`, or the user's own.

Modules that load torch are imported late, so that a rank can be stopped before they load.
"""

import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from qnmixer.errors import ConfigError, RankFailed, Stopped
from qnmixer.files import path_in_errors, write_text
from qnmixer.machine import THREADS, collect_garbage_as_before, collect_garbage_rarely, threads_each
from qnmixer.runs.processes.folders import temporary_folder
from qnmixer.runs.processes.output import lasting_output, warnings_in_one_line
from qnmixer.runs.processes.process import (
    by_srun,
    end_after_sigterm,
    end_with_parent,
    is_rank,
    is_secondary,
    leave,
    loading,
    rank,
    stop_signals,
    world_size,
)
from qnmixer.runs.records import read_results
from qnmixer.runs.run import Run, resume_hint
from qnmixer.settings.error_lines import explain
from qnmixer.settings.plugins import Kind, load_plugin
from qnmixer.settings.run import Config, parse
from qnmixer.settings.strategies import strategies_with

_FIT = Kind("a function (config, run)", lambda value: callable(value) and not isinstance(value, type))


def check_processes(config: Config) -> None:
    """Raise ConfigError if the config needs another number of processes than were started.

    Also for a SLURM job of several processes that Lightning would not recognise.
    """
    trainer, n = config.trainer, world_size()
    if by_srun() and "SLURM_NTASKS_PER_NODE" not in os.environ:
        raise ConfigError("SLURM got --ntasks only: give --ntasks-per-node=GPUS_OF_A_NODE instead")
    if by_srun() and (name := os.environ.get("SLURM_JOB_NAME")) in ("bash", "interactive"):
        raise ConfigError(f"Lightning treats a job named {name} as one process: put SLURM_JOB_NAME=train before srun")
    if not is_rank():
        if trainer.num_nodes > 1:
            raise ConfigError(
                f"trainer.num_nodes={trainer.num_nodes}, but nothing has been started on other nodes: "
                "conf/trainer/torchrun.yaml and slurm.yaml show how, or set it to 1"
            )
    elif not config.strategy.is_parallel and n > 1:
        others = strategies_with("is_parallel")
        raise ConfigError(f"strategy={config.strategy.name}, but {n} processes were started: choose strategy={others}")
    elif trainer.per_node is not None and trainer.n_devices != n:
        raise ConfigError(
            f"trainer.devices={trainer.devices} × trainer.num_nodes={trainer.num_nodes} is not the number of processes "
            f"that were started, {n}: change them, or the command that started this one"
        )


def fit_in_processes(config: Config, run: Run) -> float:
    """Run the function that trains in one process for each device. Returns the best monitored value.

    Raises UserError before any rank starts if data or checkpoints are missing. Raises RankFailed, with the rank's
    number, if a rank fails. results.json then says failed, or interrupted after Ctrl-C and SIGTERM, whatever the ranks
    wrote.
    """
    n_devices = config.trainer.per_node
    assert n_devices is not None
    try:
        _check_inputs(config, run)
        with temporary_folder("job") as temporary:
            launch_ranks(config, run, temporary, n_devices, lambda: _ask_to_stop(temporary, n_devices))
    except KeyboardInterrupt as stop:
        run.record_end("interrupted")
        raise Stopped(getattr(stop, "number", signal.SIGINT), resume_hint(run.folder)) from None
    except BaseException as error:
        run.record_end("failed", error)
        raise
    best = read_results(run.folder).get("best")
    if not isinstance(best, dict):
        raise RankFailed(f"all ranks succeeded, but rank 0 wrote no result into {run.folder}")
    return float(best.get(config.monitor, math.nan))


def launch_ranks(config: Config, run: Run, place: Path, n: int, ask_to_stop: Callable[[], bool]) -> None:
    """Run the function that trains in n ranks of our launcher, by a file in the folder `place`. Raises as `launch`."""
    from qnmixer.runs.processes.launch import launch

    folder, path = str(run.folder.absolute()), place / "job.json"
    job = {"config": config.plain(), "folder": folder, "overrides": run.overrides, "launcher": os.getpid()}
    path.write_text(json.dumps(job), encoding="utf-8")
    launch(["-m", "qnmixer.training.worker", str(path)], n, ask_to_stop)


def fit_as_rank(config: Config, run: Run) -> float:
    """Run the function that trains in a rank that torchrun or srun started. After a failure, end the process."""
    end_with_parent()
    try:
        with path_in_errors(run.folder):
            return _fit(config, run, None)
    except BaseException as error:
        if not is_secondary(error):
            run.record_end("failed", RankFailed(f"rank {rank()}: {error}"))
        leave(error, explain(error, "train"), say=True)


def main(path: Path) -> None:
    """Run the function that trains as a rank of our launcher, with the job in a file."""
    job = json.loads(path.read_text(encoding="utf-8"))
    end_with_parent(job["launcher"])
    end_after_sigterm()
    os.environ.setdefault(THREADS, str(threads_each(world_size())))  # before torch is loaded
    # Before torch is loaded. Its warnings in C++ are not for users: ddp has one for each pass that uses all weights.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    lasting_output()
    collect_garbage_rarely()
    try:
        config = parse(job["config"])
        with warnings_in_one_line(), path_in_errors(job["folder"]):
            _fit(config, Run(Path(job["folder"]), job["overrides"], config.resume), path.parent)
    except BaseException as error:
        leave(error, explain(error, "train"))


def function_that_trains(config: Config) -> Callable[[Config, Run], float]:
    """Import the function that `fit` names: (config, run) → best monitored value. It loads Lightning.

    Raises PluginError if there is none.
    """
    function: Callable[[Config, Run], float] = load_plugin("fit", config.fit, _FIT)
    collect_garbage_as_before()
    return function


def _ask_to_stop(job: Path, n_ranks: int) -> bool:
    """Ask all ranks to stop between two steps. False if some have not started; then killing them loses nothing."""
    pids = [int(path.read_text(encoding="utf-8")) for path in job.glob("*.pid")]
    if len(pids) < n_ranks:
        return False
    for pid in pids:  # not SIGTERM, which ends a rank within seconds
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    return True


def _fit(config: Config, run: Run, job: Path | None) -> float:
    with loading():
        function = function_that_trains(config)
    with stop_signals():
        if job:
            write_text(job / f"{rank()}.pid", str(os.getpid()))
        return function(config, run)


def _check_inputs(config: Config, run: Run) -> None:
    """Raise UserError once, here, for slices that would be missing in every rank. It loads no Lightning."""
    from qnmixer.data.sources import parts_of
    from qnmixer.data.splits import RunSplit
    from qnmixer.measurement.build import build_geometry
    from qnmixer.reconstruction.checkpoints import resumable

    split = None if run.resume is None else resumable(config, Path(run.resume)).split
    with warnings.catch_warnings(action="ignore"):  # rank 0 will show the warnings
        parts_of(config.data, RunSplit(split), build_geometry(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
