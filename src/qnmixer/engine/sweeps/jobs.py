"""The jobs of a sweep. Each is a training run in its own processes. No torch import: this process only watches."""

import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from omegaconf import DictConfig

from qnmixer.engine.config import Config
from qnmixer.engine.config.compose import quoted
from qnmixer.engine.processes.cores import THREADS, threads_each
from qnmixer.engine.processes.ranks import die_with_parent
from qnmixer.engine.processes.signals import SIGNALS, handle_signals
from qnmixer.engine.tracking.results import amend, best_of, duration, git_commit, read_results
from qnmixer.engine.tracking.sweep_file import name_of_job, sweep_of
from qnmixer.errors import ConfigError, UserError, first_line, visible

# After a stop signal a job finishes its step and writes a checkpoint first.
_SECONDS_TO_LEAVE = 60

OUTPUT = "output.log"


@dataclass
class Job:
    """One job: the place of its run folder, its overrides, and Hydra's config for it."""

    folder: Path
    overrides: list[str]
    config: DictConfig

    @property
    def name(self) -> str:
        """The number of the job, and its overrides that differ from other jobs."""
        found = sweep_of(self.folder)
        differs = name_of_job(found[1], self.overrides) if found else ""
        return f"job {self.folder.name}" + f" ({differs})" * bool(differs)


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    gpus: list[str]
    output: IO[bytes]  # its position: the text before it is on the terminal already

    def echo(self) -> None:
        """Show the new output of the job."""
        sys.stdout.write(self.output.read().decode(errors="replace"))
        sys.stdout.flush()


def run_jobs(jobs: list[Job], check: Callable[[DictConfig], Config], at_once: int | None = None) -> list[float | None]:
    """Run the jobs that are not done yet. Returns the best monitored values; None for a failed job.

    Args:
        jobs: in the order in which they start.
        check: builds the config of a job. It raises UserError for a bad config, and then no process is started.
        at_once: the most jobs at a time. None: as many as there are GPUs for; without a GPU one at a time. More than
            there are GPUs: jobs share them.

    Raises ConfigError if a folder has another job; KeyboardInterrupt or SystemExit after all jobs have ended.
    """
    waiting = [(job, config) for job in jobs if not _is_done(job) and (config := _checked(job, check))]
    gpus = _gpus() if any(config.trainer.accelerator != "cpu" for _, config in waiting) else []
    limit = at_once or len(gpus) or 1
    running: list[_Running] = []
    with _stopping(running):
        while waiting or running:
            for it in [*running]:
                code = it.process.poll()
                if limit == 1:
                    it.echo()
                if code is not None:
                    running.remove(it)
                    _conclude(it.job, code)
            use = Counter(gpu for it in running for gpu in it.gpus)
            shared = limit > len(gpus)  # so many jobs at once were asked for
            free = [gpu for gpu in sorted(gpus, key=use.__getitem__) if shared or not use[gpu]]
            if waiting and len(running) < limit:
                job, config = waiting[0]
                needed = _n_gpus(config, len(gpus))
                # Jobs start in order: a large job would wait forever if small ones could overtake it. With nothing
                # running it starts in any case, and asking for too many GPUs is its own error.
                if needed <= len(free) or not running:
                    n_threads = _threads(config, limit, len(gpus)) if limit > 1 else None
                    running.append(_start(job, free[:needed], n_threads))
                    waiting.pop(0)
                    continue
            time.sleep(0.1)
    return [objective(job.folder) for job in jobs]


def objective(folder: Path) -> float | None:
    """The best monitored value of a finished run; None for any other."""
    results = read_results(folder)
    return best_of(results)[1] if results.get("status") == "done" else None


def outcome(results: dict[str, Any]) -> str:
    """How a run ended, in a few words."""
    if (status := results.get("status", "not begun")) != "done":
        return ": ".join(filter(None, (status, first_line(results.get("error", "")))))
    monitor, best = best_of(results)
    return f"{monitor} {math.nan if best is None else best:.4g} in {duration(results.get('seconds', 0.0))}"


def _is_done(job: Job) -> bool:
    before = read_results(job.folder)
    its = before.get("overrides", [])
    if before and sorted(its) != sorted(job.overrides):  # a resumed run puts finetune= first
        raise ConfigError(f"{job.folder} has another job ({' '.join(its)}): choose another hydra.sweep.dir=FOLDER")
    if before.get("status") != "done":
        return False
    # Results of another version count as done: a sweep of days must survive a changed comment.
    changed = before.get("git_commit") != git_commit()
    _say(f"{job.name}: already done{' with another version of the code' * changed}, {outcome(before)}")
    return True


def _checked(job: Job, check: Callable[[DictConfig], Config]) -> Config | None:
    """The config of a job. Returns None for a bad config, and records the job as failed without starting it."""
    try:
        return check(job.config)
    except UserError as error:
        job.folder.mkdir(parents=True, exist_ok=True)
        amend(job.folder, job.overrides, status="failed", error=f"{type(error).__name__}: {error}")
        _say(f"{job.name}: failed: {error}")
        return None


def _gpus() -> list[str]:
    """The GPUs that this process may use, as names for CUDA_VISIBLE_DEVICES."""
    if (listed := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in listed.split(",") if name.strip()]
    import torch  # imported here, because it takes seconds

    return [str(number) for number in range(torch.cuda.device_count())]


def _n_gpus(config: Config, n_gpus: int) -> int:
    if config.trainer.accelerator == "cpu" or not n_gpus:
        return 0
    return 1 if config.strategy.name == "single" else config.trainer.devices or n_gpus


def _threads(config: Config, limit: int, n_gpus: int) -> int:
    """Threads for each process of a job. Jobs that run side by side share the cores, so no job waits for another."""
    each = _n_gpus(config, n_gpus) or config.trainer.devices or 1
    return threads_each(max(n_gpus, limit * each if limit > n_gpus else 0))


def _start(job: Job, gpus: list[str], n_threads: int | None) -> _Running:
    job.folder.mkdir(parents=True, exist_ok=True)
    if read_results(job.folder):  # a resumed job must not show the end of its first part
        amend(job.folder, job.overrides, status="running", error=None)
    environment = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}  # set by cli
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if n_threads is not None:
        environment.setdefault(THREADS, str(n_threads))
    # A new process tree for each job. Hydra's own launcher is silently wrong with ddp: child ranks run the whole sweep
    # again, and a change of trainer.devices trains on a part of the data or hangs.
    me, path = os.getpid(), job.folder / OUTPUT
    _say(f"{job.name} → {path}")
    with path.open("ab") as output:
        shown = path.open("rb")
        shown.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            [sys.executable, "-m", "qnmixer.train", *job.overrides, f"hydra.run.dir={quoted(job.folder)}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which then stops its jobs
            preexec_fn=lambda: die_with_parent(me),
        )
    return _Running(job, process, gpus, shown)


def _conclude(job: Job, code: int) -> None:
    """Print how a job ended, and write it to results.json if the job itself could not."""
    results = read_results(job.folder)
    if results.get("status") not in ("done", "failed", "interrupted") or (code and results.get("status") == "done"):
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        amend(job.folder, job.overrides, status="failed", error=f"the job {how}: see {OUTPUT}")
    _say(f"{job.name}: {outcome(read_results(job.folder))}")


@contextmanager
def _stopping(running: list[_Running]) -> Iterator[None]:
    """Stop the running jobs on every stop signal of this process. Each job first writes a checkpoint."""
    received = 0

    def leave(number: int, _: object) -> None:
        nonlocal received
        received = number
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    # Keep submitit's own handlers: they put the job back into the queue.
    by_default = [it for it in SIGNALS if signal.getsignal(it) in (signal.SIG_DFL, signal.default_int_handler)]
    with handle_signals(by_default, leave) as handled:
        try:
            yield
        except BaseException:
            for number in handled:  # the jobs get their time to stop; a second Ctrl-C ends them at once
                if number != signal.SIGINT:
                    signal.signal(number, signal.SIG_IGN)
            _stop(running, received or signal.SIGTERM)
            raise


def _stop(running: list[_Running], number: int) -> None:
    """Send a signal to the jobs, and kill those that do not end in time."""
    for it in running:
        it.process.send_signal(number)
    deadline = time.monotonic() + _SECONDS_TO_LEAVE
    for it in running:
        with suppress(subprocess.TimeoutExpired):
            it.process.wait(max(0, deadline - time.monotonic()))
        it.process.kill()  # its ranks and data workers end with it, see `die_with_parent`
        it.process.wait()
        if read_results(it.job.folder).get("status") in (None, "running"):
            amend(it.job.folder, it.job.overrides, status="interrupted", error=None)
        _say(f"{it.job.name}: {outcome(read_results(it.job.folder))}")


def _say(line: str) -> None:
    print(visible(line), flush=True)
