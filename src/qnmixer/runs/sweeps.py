"""A sweep (`qnmixer.train -m …`): its folder, the keys that vary, its jobs, and its final report. No torch import.

The folder records everything. results.json of each job says how that job ended, with every launcher and on every
machine. If the same sweep starts again, it finds there which jobs are done. Each job is a training run in its own
processes; this process only watches them.
"""

import hashlib
import math
import os
import shlex
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

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from qnmixer.errors import ConfigError, Stopped, SweepFailed, UserError, first_line, say, visible
from qnmixer.files import atomic_file, check_unused, path_of, write_text
from qnmixer.machine import THREADS, threads_each
from qnmixer.runs.optuna_private import distributions_of
from qnmixer.runs.processes.process import SIGNALS, die_with_parent, handle_signals
from qnmixer.runs.records import (
    SWEEP,
    Sweep,
    amend,
    as_number,
    best_of,
    duration,
    name_of_job,
    read_results,
    read_sweep,
    readable,
    sweep_of,
    write_sweep,
)
from qnmixer.runs.run import RUNS, run_lock
from qnmixer.runs.tables import Table, in_digits
from qnmixer.runs.terminal import Console
from qnmixer.runs.trained_settings import digest_of_training
from qnmixer.settings.compose import quoted
from qnmixer.settings.parts import Metrics, modes_of
from qnmixer.settings.plugins import digests_of_code
from qnmixer.settings.project import NO_PROJECT
from qnmixer.settings.run import Config, parse
from qnmixer.settings.validation import validated

_FOLDER_KEY = "hydra.sweep.dir"


@contextmanager
def sweep(overrides: list[str], config: DictConfig) -> Iterator[str]:
    """Prepare a sweep before its jobs run, and report after them: sweep.json, then table and failed jobs.

    Yields the override that makes Hydra use the folder. At the end it raises SweepFailed, which names each failed job.
    Raises ConfigError if a search would optimise in the wrong direction. `config`: from the overrides that do not vary,
    with Hydra's own part.
    """
    varying = _varying_keys(overrides, config)
    _check_sweep(overrides, config)
    has_folder = any(override.startswith(f"{_FOLDER_KEY}=") for override in overrides)
    folder = Path(config.hydra.sweep.dir) if has_folder else RUNS / "sweeps" / _name_of_sweep(overrides, varying)
    described: Sweep = {"overrides": overrides, "varying": varying, "jobs": None}
    with run_lock(folder):
        # Results of something else would be counted as jobs of this sweep.
        if not (folder / SWEEP).is_file():
            check_unused(_FOLDER_KEY, folder)
        write_sweep(folder, described)
        _say(f"sweep in {folder}")
        error: Exception | None = None
        try:
            yield f"{_FOLDER_KEY}={quoted(folder.absolute())}"  # absolute: a job may start in another working directory
        except Exception as raised:  # for example, optuna raises if no job has a result
            error = raised
        except KeyboardInterrupt as stop:
            line = "interrupted; the same command runs the jobs that are not done"
            raise Stopped(getattr(stop, "number", signal.SIGINT), line) from None
        finally:  # also after Ctrl-C: the table shows what is done so far
            rows = rows_of(folder)
            write_report(folder, rows)
        failed = [row.name for row in rows if row.status != "done"]
        if error is None and not rows:
            raise SweepFailed(f"no job has written anything into {folder}: can all machines see this folder?")
        if failed:
            raise SweepFailed(
                f"{len(failed)} of {len(rows)} jobs failed: {', '.join(failed)} (see {folder}/sweep.md). Fix the "
                "cause, then run the same command again: it runs only the jobs that are not done"
            ) from error
        if error is not None:
            raise error


def _check_sweep(overrides: list[str], config: DictConfig) -> None:
    if any(override.startswith("resume=") for override in overrides):
        raise ConfigError("resume= resumes one run, not a sweep: to resume a sweep, give its own command again")
    sweeper = config.hydra.sweeper
    modes = modes_of(validated(Metrics, OmegaConf.to_container(config.metrics), "metrics"))
    direction = f"{modes.get(config.monitor, 'max')}imize"
    if "direction" in sweeper and getattr(sweeper.direction, "name", sweeper.direction) != direction:
        raise ConfigError(f"monitor={config.monitor} must be {direction}d: set hydra.sweeper.direction={direction}")
    if "n_trials" in sweeper:
        if config.trainer.limit_val_batches == 0:
            raise ConfigError("a search needs validation: leave trainer.limit_val_batches=0 out")
        _check_search(overrides, sweeper)


def _check_search(overrides: list[str], sweeper: DictConfig) -> None:
    """Raise ConfigError for what Optuna would refuse after the sweep has begun, or never end."""
    for key in ("n_trials", "n_jobs"):
        if sweeper[key] < 1:
            raise ConfigError(f"hydra.sweeper.{key}={sweeper[key]} should be greater than or equal to 1")
    for override in [*(f"{key}={value}" for key, value in (sweeper.params or {}).items()), *overrides]:
        try:
            distributions = distributions_of(override).values()
            if not all(math.isfinite(getattr(one, "high", 0) - getattr(one, "low", 0)) for one in distributions):
                raise ValueError("its bounds must be finite")
        except (ValueError, AssertionError, OverflowError, NotImplementedError) as error:
            way = "give interval(LOW,HIGH) with LOW below HIGH (above 0 with log), or values as in KEY=A,B"
            raise ConfigError(f"{override} cannot be searched ({first_line(error)}): {way}") from error


def _varying_keys(overrides: list[str], config: DictConfig) -> list[str]:
    vary = {str(key): True for key in OmegaConf.select(config, "hydra.sweeper.params") or {}}
    for override in OverridesParser.create().parse_overrides(overrides):
        vary[override.get_key_element().lstrip("+")] = override.is_sweep_override()  # the last one counts, as in Hydra
    return [key for key, varies in vary.items() if varies]


def _name_of_sweep(overrides: list[str], varying: list[str]) -> str:
    """Name of the sweep's folder: the same for the same sweep on any machine, and for a search with more trials."""
    # These do not change the results of a job.
    no_matter = ("hydra.launcher", "hydra/launcher", "hydra.sweeper.n_trials")
    deciding_overrides = [override for override in overrides if not override.startswith(no_matter)]
    mark = hashlib.sha256("\n".join(deciding_overrides).encode()).hexdigest()[:6]
    return "-".join([*(key.replace("/", ".").rpartition(".")[2] for key in varying), mark])


def place_jobs(folder: Path, jobs: list[list[str]]) -> list[Path]:
    """Choose the folder of each job by its overrides, and record it in sweep.json.

    A job gets the folder in which a job with the same overrides ran before, else the next free number. So a search that
    repeats failed jobs, and then draws other jobs than before, takes no folder of another job.
    """
    described = read_sweep(folder)
    overrides_by_name = {
        path.parent.name: read_results(path.parent).get("overrides", []) for path in folder.glob("*/results.json")
    }
    placed, places = dict(described["jobs"] or {}), []
    for overrides in jobs:
        # Each folder once: a sweep may have the same job twice. In any order: a resumed run puts finetune= first.
        free_names = sorted(overrides_by_name.keys() - placed.keys(), key=lambda name: (len(name), name))
        equal_names = [name for name in free_names if sorted(overrides_by_name[name]) == sorted(overrides)]
        taken = overrides_by_name.keys() | placed.keys()
        name = equal_names[0] if equal_names else next(str(n) for n in range(len(taken) + 1) if str(n) not in taken)
        placed[name] = overrides
        places.append(folder / name)
    write_sweep(folder, described | {"jobs": placed})
    return places


def find_sweep(text: str) -> Path:
    """The folder of a sweep. "latest": the sweep under runs/ whose job ended last. Raises ConfigError without one."""
    if text == "latest":
        sweeps = [path.parent for path in RUNS.glob(f"**/{SWEEP}")]
        if not sweeps:
            raise ConfigError(
                f"sweep=latest finds no sweep under {RUNS.absolute()}: give its folder, sweep=DIR, or run one with "
                "python -m qnmixer.train -m experiment=demo seed=1,2,3"
            )
        records = {sweep: [sweep / SWEEP, *sweep.glob("*/results.json")] for sweep in sweeps}
        return max(sweeps, key=lambda sweep: max(path.stat().st_mtime for path in records[sweep]))
    folder = path_of(text)
    if not (folder / SWEEP).is_file():
        problem = "is no sweep (it has no sweep.json)" if folder.exists() else "does not exist"
        raise ConfigError(f"sweep={text} {problem}: give the folder that qnmixer.train -m printed")
    return folder


# Its jobs

_OUTPUT = "output.log"

# After a stop signal a job finishes its step and writes a checkpoint first.
_SECONDS_TO_STOP_JOBS = 60


@dataclass
class Job:
    """One job: the place of its run folder, its overrides, and Hydra's config for it."""

    folder: Path
    overrides: list[str]
    config: DictConfig

    @property
    def name(self) -> str:
        """The number of the job, and its overrides that differ from other jobs."""
        sweep_entry = sweep_of(self.folder)
        difference = name_of_job(sweep_entry[1], self.overrides) if sweep_entry else ""
        return f"job {self.folder.name} ({difference})" if difference else f"job {self.folder.name}"


@dataclass
class _JobProcess:
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
        at_once: the most jobs at a time, as `jobs_at_once` of the launcher.

    Raises ConfigError if a folder has another job, or one with other settings; KeyboardInterrupt or SystemExit after
    all jobs have ended.
    """
    waiting = [(job, config) for job in jobs if not _is_done(job) and (config := _checked(job, check))]
    gpus = _gpus() if any(config.trainer.accelerator != "cpu" for _, config in waiting) else []
    limit = at_once or len(gpus) or 1
    running: list[_JobProcess] = []
    with _stopping(running):
        while waiting or running:
            for job_process in [*running]:
                code = job_process.process.poll()
                if limit == 1:
                    job_process.echo()
                if code is not None:
                    running.remove(job_process)
                    _conclude(job_process.job, code)
            use = Counter(gpu for job_process in running for gpu in job_process.gpus)
            may_share = limit > len(gpus)  # so many jobs at once were asked for
            free_gpus = [gpu for gpu in sorted(gpus, key=use.__getitem__) if may_share or not use[gpu]]
            if waiting and len(running) < limit:
                job, config = waiting[0]
                n_needed = _n_gpus(config, len(gpus))
                # Jobs start in order: a large job would wait forever if small ones could overtake it. With nothing
                # running it starts in any case, and asking for too many GPUs is its own error.
                if n_needed <= len(free_gpus) or not running:
                    n_threads = _threads(config, limit, len(gpus)) if limit > 1 else None
                    running.append(_start(job, free_gpus[:n_needed], n_threads))
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
    score = "done" if best is None else f"{monitor} {best:.4g}"
    return f"{score} in {duration(results.get('seconds', 0.0))}"


def _is_done(job: Job) -> bool:
    """Whether a job is done, with the settings of now: a config file may have been edited since.

    Raises ConfigError for a folder with another job.
    """
    record = read_results(job.folder)
    overrides = record.get("overrides", [])
    if record and sorted(overrides) != sorted(job.overrides):  # a resumed run puts finetune= first
        raise ConfigError(f"{job.folder} has another job ({' '.join(overrides)}): give another hydra.sweep.dir=FOLDER")
    if record.get("status") != "done":
        return False
    if "settings" in record and record["settings"] != digest_of_training(parse(job.config)):
        raise ConfigError(
            f"{job.folder} was trained with other settings, so a config file has changed since: choose another "
            "hydra.sweep.dir=FOLDER, or remove that folder"
        )
    # Also with another version of the code: a sweep of days must survive a changed comment.
    code = record.get("code", {})
    is_changed = code != digests_of_code(code)
    _say(f"{job.name}: already done{', before your code has changed' if is_changed else ''}, {outcome(record)}")
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
    return config.trainer.per_node or n_gpus if config.strategy.is_parallel else 1


def _threads(config: Config, limit: int, n_gpus: int) -> int:
    """Threads for each process of a job. Jobs that run side by side share the cores, so no job waits for another."""
    n_processes = _n_gpus(config, n_gpus) or config.trainer.per_node or 1
    return threads_each(max(n_gpus, limit * n_processes if limit > n_gpus else 0))


def _start(job: Job, gpus: list[str], n_threads: int | None) -> _JobProcess:
    job.folder.mkdir(parents=True, exist_ok=True)
    if read_results(job.folder):  # a resumed job must not show the end of its first part
        amend(job.folder, job.overrides, status="running", error=None)
    environment = os.environ | {NO_PROJECT: "1"}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if n_threads is not None:
        environment.setdefault(THREADS, str(n_threads))
    # A new process tree for each job. Hydra's own launcher is silently wrong with ddp: child ranks run the whole sweep
    # again, and a change of trainer.devices trains on a part of the data or hangs.
    launcher_pid, path = os.getpid(), job.folder / _OUTPUT
    _say(f"{job.name} → {path}")
    with path.open("ab") as output:
        terminal_copy = path.open("rb")
        terminal_copy.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            [sys.executable, "-m", "qnmixer.train", *job.overrides, f"hydra.run.dir={quoted(job.folder)}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which then stops its jobs
            preexec_fn=lambda: die_with_parent(launcher_pid),
        )
    return _JobProcess(job, process, gpus, terminal_copy)


def _conclude(job: Job, code: int) -> None:
    """Print how a job ended, and write it to results.json if the job itself could not."""
    results = read_results(job.folder)
    if results.get("status") not in ("done", "failed", "interrupted") or (code and results.get("status") == "done"):
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        amend(job.folder, job.overrides, status="failed", error=f"the job {ending}: see {_OUTPUT}")
    _say(f"{job.name}: {outcome(read_results(job.folder))}")


@contextmanager
def _stopping(running: list[_JobProcess]) -> Iterator[None]:
    """Stop the running jobs on every stop signal of this process. Each job first writes a checkpoint."""

    def leave(number: int, _: object) -> None:
        raise Stopped(number)

    # Keep submitit's own handlers: they put the job back into the queue.
    default_handlers = (signal.SIG_DFL, signal.default_int_handler)
    by_default = [number for number in SIGNALS if signal.getsignal(number) in default_handlers]
    with handle_signals(by_default, leave) as handled:
        try:
            yield
        except BaseException as error:
            for number in handled:  # the jobs get their time to stop; a second Ctrl-C ends them at once
                if number != signal.SIGINT:
                    signal.signal(number, signal.SIG_IGN)
            _stop(running, getattr(error, "number", None) or signal.SIGTERM)
            raise


def _stop(running: list[_JobProcess], number: int) -> None:
    """Send a signal to the jobs, and kill those that do not end in time."""
    for job_process in running:
        job_process.process.send_signal(number)
    deadline = time.monotonic() + _SECONDS_TO_STOP_JOBS
    for job_process in running:
        with suppress(subprocess.TimeoutExpired):
            job_process.process.wait(max(0, deadline - time.monotonic()))
        job_process.process.kill()  # its ranks and data workers end with it, see `die_with_parent`
        job_process.process.wait()
        if read_results(job_process.job.folder).get("status") in (None, "running"):
            amend(job_process.job.folder, job_process.job.overrides, status="interrupted", error=None)
        _say(f"{job_process.job.name}: {outcome(read_results(job_process.job.folder))}")


def _say(line: str) -> None:
    say(visible(line))


# Its report


@dataclass
class JobRow:
    """One job, from its results.json."""

    name: str  # its folder in that of the sweep
    values: dict[str, str]  # of its overrides that vary
    results: dict[str, Any]
    status: str  # how it ended
    best: float | None  # value of the monitored metric
    error: str  # the first line; empty without an error

    @property
    def numbers(self) -> list[float | None]:
        """The best value of the monitored metric, seconds, and the MiB of a step; None for what is not known."""
        memory = self.results.get("memory", {})
        return [self.best, self.results.get("seconds"), memory.get("measured_step")]


def jobs_of(sweep: Path) -> dict[Path, list[str]]:
    """The folders of a sweep's jobs with their overrides, in their order. Raises DataError for a damaged sweep.json.

    A launcher that records no jobs leaves their folders: all that have a results.json.
    """
    if (jobs := read_sweep(sweep)["jobs"]) is not None:
        return {sweep / name: overrides for name, overrides in jobs.items()}
    paths = [path.parent for path in sweep.glob("**/results.json")]
    paths.sort(key=lambda path: (len(str(path)), str(path)))  # job 10 after job 9
    return {path: read_results(path).get("overrides", []) for path in paths}


def rows_of(sweep: Path) -> list[JobRow]:
    """The jobs of a sweep in their order."""
    varying, rows = read_sweep(sweep)["varying"], []
    for path, overrides in jobs_of(sweep).items():
        values_by_key = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
        values = {key: values_by_key.get(key, "") for key in varying}
        results = read_results(path)
        ending = results.get("status", "not begun"), best_of(results)[1], first_line(results.get("error", ""))
        rows.append(JobRow(str(path.relative_to(sweep)), values, results, *ending))
    return rows


def write_report(folder: Path, rows: list[JobRow]) -> None:
    """Print the table of a sweep, and write it into the folder as sweep.csv and sweep.md, with the errors of jobs.

    Also sweep.png, if an override is a number.
    """
    if not rows:
        return
    monitor = next((best_of(row.results)[0] for row in rows if row.results.get("best")), "best")
    headings = ["job", *rows[0].values, "status", monitor, "seconds", "peak MiB"]
    lines = [[row.name, *row.values.values(), row.status, *row.numbers, row.error] for row in rows]
    write_text(folder / "sweep.csv", Table([*headings, "error"], lines).csv())
    cells = [[row.name, *map(readable, row.values.values()), row.status, *map(in_digits, row.numbers)] for row in rows]
    table = Table(headings, cells)
    errors = [f"job {row.name}: {row.error}" for row in rows if row.error]
    error_list = "\n".join(f"- {error}" for error in errors)
    write_text(folder / "sweep.md", f"{table.markdown()}\n\n{error_list}".rstrip() + "\n")

    console = Console()
    console.print(table.terminal(words=len(headings) - 3))
    has_picture = _draw(folder / "sweep.png", [row for row in rows if row.best is not None], monitor)
    files = ["sweep.csv", "sweep.md", "sweep.png"] if has_picture else ["sweep.csv", "sweep.md"]
    ends = [*errors, f"sweep folder: {folder} ({', '.join(files)})"]
    if "seed" in rows[0].values:
        ends.append(f"means over seeds: python -m qnmixer.compare {shlex.quote(f'sweep={quoted(folder)}')}")
    console.lines(*ends)


_MOST_NAMES = 10  # in the legend of a picture


def _draw(path: Path, rows: list[JobRow], monitor: str) -> bool:
    """Draw the best value over each numeric override. Returns False, and draws nothing, if none takes two values."""
    keys = rows[0].values if rows else {}
    numeric: dict[str, dict[str, list[tuple[float, float]]]] = {}  # the points over a key, by the values of the others
    for key in keys:
        for row in rows:
            if (x := as_number(row.values[key])) is not None and row.best is not None:
                name = ", ".join(readable(row.values[other]) for other in keys if other != key)
                numeric.setdefault(key, {}).setdefault(name, []).append((x, row.best))
    numeric = {
        key: names for key, names in numeric.items() if len({x for points in names.values() for x, _ in points}) > 1
    }
    if not numeric:
        return False
    from matplotlib.figure import Figure  # imported here, because it takes half a second

    figure = Figure(figsize=(5 * len(numeric), 4), layout="constrained")
    for axes, (key, names) in zip(figure.subplots(1, len(numeric), squeeze=False)[0], numeric.items(), strict=True):
        for name, points in names.items():
            axes.plot(*zip(*points, strict=True), "o", label=name)
        if 1 < len(names) <= _MOST_NAMES:
            axes.legend(fontsize=8)
        xs = [x for points in names.values() for x, _ in points]
        axes.set(xlabel=key, ylabel=monitor, xscale="log" if 0 < 10 * min(xs) <= max(xs) else "linear")
        axes.grid(alpha=0.3)
    with atomic_file(path) as stream:
        figure.savefig(stream, format="png", dpi=150)
    return True
