"""Run folders: how to find one, what it says of its run, who may write to it, and how `resume=` goes on with it.

`Run` is the folder that is written now. No torch import.
"""

import fcntl
import os
import re
import shlex
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.files import check_no_links, check_unused, is_temporary, path_of, remove, replace
from qnmixer.runs.artifacts import download_artifact, is_artifact
from qnmixer.runs.layout import checkpoint_in
from qnmixer.runs.processes.folders import remove_left_folders
from qnmixer.runs.processes.process import rank
from qnmixer.runs.records import (
    SWEEP,
    amend,
    git_commit,
    git_diff,
    is_signed,
    read_results,
    signed,
    signed_modules,
    sweep_of,
    timestamp,
    versions,
    write_results,
)
from qnmixer.runs.terminal import Console
from qnmixer.settings.compose import (
    SEARCH_PATH,
    compose,
    key_of,
    of_hydra,
    quoted,
    search_path_in,
    still_there,
    values_of,
    with_search_path,
)
from qnmixer.settings.options import CONF

# Finding a run

RUNS = Path("runs")


def name_of_run(run: Path) -> str:
    """The name of a run folder or weights file, without its parent folders: date and time, or sweep and job."""
    run = run.absolute()
    if run.parent.name == "checkpoints":
        run = run.parent.parent
    if run.is_file():
        return run.stem
    if (sweep_entry := sweep_of(run)) is not None:
        return f"{sweep_entry[0].name}/{run.name}"
    return f"{run.parent.name}/{run.name}" if re.fullmatch(r"\d{4}-\d\d-\d\d", run.parent.name) else run.name


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder."""
    return (folder / "results.json").is_file()


def runs_in(folder: Path) -> Iterator[Path]:
    """All run folders below a folder, also those of sweeps."""
    for path, folders, _ in os.walk(folder):
        run = Path(path)
        if is_run(run) and not (run / SWEEP).is_file():
            folders.clear()
            if "run" not in map(key_of, overrides_of(run)):  # of `qnmixer.evaluate`, which writes the same files
                yield run


def latest() -> Path:
    """The run folder under runs/ that began, resumed or ended last. Raises CheckpointError if there is none."""
    run = max(runs_in(RUNS), key=lambda folder: (folder / "results.json").stat().st_mtime, default=None)
    if run is None:
        raise CheckpointError(f"resume=latest finds no run under {RUNS.absolute()}: give the run's folder, resume=DIR")
    return run


def has_checkpoint(run: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    return any(checkpoint_in(run, name).is_file() for name in ("last", "best"))


def overrides_of(run: Path) -> list[str]:
    """The overrides of a run; empty for a folder that was put together by hand.

    Hydra's own are left out, because they could make Hydra run code. Only its search path stays.
    """
    return [override for override in read_results(run).get("overrides", []) if _defines_run(override)]


def _defines_run(override: str) -> bool:
    return not of_hydra(override) or key_of(override) == SEARCH_PATH


# Writing one

HYDRA = ".hydra"
NEXT_HYDRA = ".hydra.next"
"""Where Hydra writes its files if a run resumes: they take the place of the others when the resume is accepted."""


class Run:
    """One training run. Each of its processes has one; only rank 0 takes the lock, prints and writes the record.

    Args:
        folder: the run folder. All files of the run go into it.
        overrides: of the command line, or of a job in a sweep.
        resume: `resume` of the config: this folder, or None for a new run.
    """

    def __init__(self, folder: Path, overrides: Sequence[str] = (), resume: str | None = None) -> None:
        self.folder, self.resume = folder, resume
        self.overrides = [*overrides]  # those that define the run, for results.json
        self.console = Console(quiet=rank() != 0)
        self.record: dict[str, Any] = {}  # results.json, for metrics and paths; written at the end of `recording`
        self.resumed_at: int | None = None  # optimizer steps of the checkpoint, if the run resumes
        self._earlier_record = {} if resume is None else read_results(folder)
        if resume is not None:
            # Its record still says where it began, but not for a stranger's run: the user has not seen that.
            recorded_overrides = overrides_of(folder) if is_signed(self._earlier_record) else []
            finetune = [override for override in recorded_overrides if key_of(override) == "finetune"]
            self.overrides = [*finetune, *_without_keys(self.overrides, "finetune", "resume")]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run lock while the block runs, and remove half-written files of a killed process first.

        A new run is recorded at once: `resume=latest` finds it, even if it is killed before PyTorch is loaded.

        Raises ConfigError if another process writes to the folder.
        """
        if rank() != 0:
            yield
            return
        with run_lock(self.folder):
            remove_left_folders()
            for path in filter(is_temporary, self.folder.rglob(".*")):
                path.unlink(missing_ok=True)
            if not is_run(self.folder):
                amend(self.folder, self.overrides, status="running", error=None)
            try:
                yield
            except Exception as error:
                if read_results(self.folder).get("status") == "running":  # the user's fit.py cannot be imported, say
                    self.record_end("failed", error)
                raise
            finally:
                remove(self.folder / NEXT_HYDRA)

    @contextmanager
    def recording(self, modules: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """Write results.json while the block runs: running, then done, failed or interrupted.

        Yields `record`, for metrics and paths. It is written at the end, also if the block fails. Its `seconds` include
        earlier parts of the run. That of a run that resumes stays as it is until `record_resume`: a resume that is
        refused must not change what the run is.

        modules: the user's own that the run imports.
        """
        self.code_diff = git_diff()  # at the beginning: files may change while it trains
        commit = git_commit(self.code_diff)
        entries = {"status": "running", "git_commit": commit, "versions": versions()} | signed_modules(modules)
        # Twice: the first time for the order of the file, the second time because they replace the earlier ones.
        self.record = entries | signed(self.overrides) | {"started": timestamp()} | self._earlier_record | entries
        self.record.pop("error", None)  # of the part before the resume
        start = time.monotonic()
        if not self._earlier_record:
            self._write()
        try:
            yield self.record
            self.record["status"] = "done"
        except KeyboardInterrupt:
            self.record["status"] = "interrupted"
            raise
        except BaseException as error:
            self.record |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            self.record["seconds"] = round(self.record.get("seconds", 0.0) + time.monotonic() - start, 1)
            if self.record["status"] != "done" and (failure := read_results(self.folder)).get("status") == "failed":
                self.record |= {key: failure[key] for key in ("status", "error") if key in failure}  # of another rank
            if not self._earlier_record or self.record.get("resumed") != self._earlier_record.get("resumed"):
                self._write()

    def _write(self) -> None:
        if rank() == 0:
            write_results(self.folder, self.record)

    def record_resume(self, step: int) -> None:
        """Record that the run resumes from a checkpoint of this optimizer step, with its overrides."""
        self.resumed_at = step
        resumed = [*self.record.get("resumed", []), {"step": step, "at": timestamp()}]
        self.record |= signed(self.overrides) | {"resumed": resumed}
        self._write()  # at once, because the run may be killed
        if rank() == 0 and (hydra_files := self.folder / NEXT_HYDRA).is_dir():
            replace(hydra_files, self.folder / HYDRA)

    def record_end(self, status: str, error: BaseException | None = None) -> None:
        """Set the end of the run in results.json, if `recording` could not. A refused resume changes nothing."""
        if self._earlier_record and read_results(self.folder).get("resumed") == self._earlier_record.get("resumed"):
            return
        line = None if error is None else f"{type(error).__name__}: {error}"
        amend(self.folder, self.overrides, status=status, error=line)


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder while the block runs. The system releases it if the process dies.

    Raises ConfigError if another process holds it, or if a link in the folder leads out of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_no_links(folder)
    lock = folder / ".lock"
    if lock.is_symlink() or (lock.exists() and not lock.is_file()):
        raise ConfigError(f"{lock} is no file: give another hydra.run.dir=FOLDER")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    # Not flock, which filelock uses: data workers inherit it, and live some seconds longer than a killed process.
    with open(descriptor, "r+", encoding="utf-8", errors="replace") as stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            stream.seek(0)
            holder = stream.read(200).strip() or "another process"
            raise ConfigError(
                f"{holder} writes to {folder}: wait until it ends, or stop it, or give another hydra.run.dir=FOLDER"
            ) from None
        except OSError:  # a file system without locks
            yield
            return
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        stream.flush()
        yield


# Resuming: the overrides of a command with resume=


def _without_ckpt_path(overrides: list[str], key: str) -> list[str]:
    """Lightning's `ckpt_path=` as `resume=` or `run=`. Raises ConfigError if it does not say what to resume."""
    values, other_overrides = values_of(overrides), _without_keys(overrides, "ckpt_path")
    checkpoint = values.get("ckpt_path", "null")
    if checkpoint == "null":
        return other_overrides
    if key in values:
        raise ConfigError(f"ckpt_path={checkpoint} and {key}={values[key]} say the same: give one of them")
    if key == "resume" and checkpoint != "last":
        path = path_of(checkpoint)
        if path.suffix == ".ckpt" and (path.name != "last.ckpt" or path.parent.name != "checkpoints"):
            raise ConfigError(f"ckpt_path={checkpoint} is no checkpoints/last.ckpt of a run, from which a run resumes")
        checkpoint = str(path.parent.parent if path.suffix == ".ckpt" else path)
    return [*other_overrides, f"{key}={'latest' if key == 'resume' and checkpoint == 'last' else quoted(checkpoint)}"]


def resume_overrides(overrides: list[str]) -> list[str]:
    """Replace `resume` of a training command by the overrides of the run that it names.

    `resume=latest` and `resume=DIR` resume a run in its folder, with its overrides; those of the command win. A command
    whose folder has its own unfinished run resumes that run, because SLURM requeues a job with the same command.

    A run that this user has started may do what it did. Overrides of somebody else's run may run code, and send or
    write data anywhere, so they must be in the command itself.

    Raises:
        CheckpointError: there is no such run, or it is done.
        ConfigError: another process writes to the run; the folder of a new run has another run; or the command does not
            repeat the overrides of somebody else's run.
    """
    overrides = _without_ckpt_path(overrides, "resume")
    if any(override.startswith("-") for override in overrides):  # --help, or a sweep, whose jobs get here alone
        return overrides
    resume, folder = values_of(overrides).get("resume", "null"), folder_of(overrides)
    # Not `trust`: other commands need it for the user's own code.
    run_overrides = command_overrides = _without_keys(overrides, "resume", "trust")
    if resume != "null":
        run = _run_to_resume(resume, folder)
        run_overrides = _in_place(run, command_overrides)
        _check_mine(run, run_overrides, command_overrides)
    elif folder is not None and _has_begun(folder, command_overrides):
        run_overrides = _in_place(folder, _without_keys(command_overrides, "finetune"))
    folder = folder_of(run_overrides)
    if folder and folder.is_dir() and rank() == 0:  # the other ranks may get here when rank 0 has the lock already
        check_no_links(folder)  # before Hydra writes there
        if (folder / ".lock").exists():  # a refused command writes nothing, also no lock
            with run_lock(folder):
                pass
    return run_overrides


def _run_to_resume(resume: str, folder: Path | None) -> Path:
    """The run folder that `resume=` names; `folder`: that of the command, if it has one. Raises UserError."""
    if is_artifact(resume):
        return _from_artifact(resume, folder)
    run = latest() if resume == "latest" else path_of(resume)
    if not is_run(run) and not (run / "checkpoints").is_dir():
        raise CheckpointError(
            f"no run folder at {run}: give the folder that training printed, resume=runs/…; a checkpoint alone starts "
            "a new run by finetune="
        )
    if folder is not None and folder.resolve() != run.resolve():
        raise ConfigError(f"resume={resume} continues that run in its folder: leave out hydra.run.dir={folder}")
    return run


def _from_artifact(resume: str, folder: Path | None) -> Path:
    """The folder in which the run of an artifact of W&B resumes. If there is one, the run goes on from there."""
    source = download_artifact(resume)
    run = folder or RUNS / "wandb" / f"{resume.rpartition('/')[2].partition(':')[0]}-{source.name[:6]}"
    if not is_run(run):
        if folder is not None:
            check_unused("hydra.run.dir", folder)
        shutil.copytree(source, run, dirs_exist_ok=True)
    return run


def _in_place(run: Path, command_overrides: list[str]) -> list[str]:
    """The overrides that resume a run in its folder. Overrides given now replace those of the run."""
    record, values = read_results(run), values_of(command_overrides)
    if record.get("status") == "done" and not any(key in values for key in (*_LENGTH, "trainer.max_time")):
        steps = record.get("steps", 0)
        raise CheckpointError(
            f"{run} is done ({steps} steps): to train longer, raise trainer.max_steps; the learning rate then follows "
            "the schedule of the new length"
        )
    run_overrides = _without_keys(overrides_of(run), "resume")
    where = [] if "hydra.run.dir" in values else [f"hydra.run.dir={quoted(run)}"]
    if not has_checkpoint(run):  # killed before its first checkpoint: it starts from step 0
        return [*_merged(run_overrides, command_overrides), *where]
    # The checkpoint has the weights: those of finetune are not read again. A resume may still be refused, so Hydra
    # writes its files elsewhere.
    additions = [f"resume={quoted(run)}", f"hydra.output_subdir={NEXT_HYDRA}"]
    return [*_merged(_without_keys(run_overrides, "finetune"), command_overrides), *additions, *where]


def _has_begun(run: Path, overrides: list[str]) -> bool:
    """Whether the folder of a new run has the same run, unfinished, with a checkpoint.

    Each rank decides this by itself, maybe after rank 0 has started. This is safe: rank 0 then has written the same
    overrides and `running`, and it writes no checkpoint before all ranks have joined.

    Raises ConfigError if the folder has another run, or if the run is done.
    """
    record = read_results(run)
    is_done = record.get("status") == "done"
    if not is_done and not has_checkpoint(run):
        if "overrides" not in record and rank() == 0:  # else the same run without a checkpoint may start again
            check_unused("hydra.run.dir", run)
        return False
    recorded_values, command_values = _by_key(overrides_of(run)), _by_key(overrides)
    keys = recorded_values | command_values
    key = next((key for key in keys if recorded_values.get(key) != command_values.get(key)), None)
    if is_done or key is not None:
        state = "that is done"
        if key is not None:
            state = f"with {recorded_values.get(key, f'no {key}')}, not {command_values.get(key, 'without')}"
        resume = shlex.quote(f"resume={quoted(run)}")
        raise ConfigError(f"{run} has a run {state}: resume it with {resume}, or give another hydra.run.dir=FOLDER")
    return True


_LENGTH = ("trainer.max_steps", "trainer.max_epochs")  # the keys that set the length of a run
_SET_HERE = ("resume", "hydra.run.dir", "hydra.output_subdir")


def _check_mine(run: Path, run_overrides: list[str], command_overrides: list[str]) -> None:
    """Raise ConfigError if somebody else started the run, and it has overrides that are not given now."""
    recorded_overrides = _without_keys(run_overrides, *_SET_HERE)
    foreign_overrides = [override for override in recorded_overrides if override not in command_overrides]
    if foreign_overrides and not is_signed(read_results(run)):
        raise ConfigError(
            f"{run} was not started by you here, and its settings may run code or send data: repeat those that you "
            f"trust, or give others: {shlex.join(foreign_overrides):.2000}"
        )


def _by_key(overrides: list[str]) -> dict[str, str]:
    """The overrides that define a run, by key, without Hydra's keys but the search path."""
    return {key_of(override): override for override in overrides if _defines_run(override)}


def _merged(run_overrides: list[str], command_overrides: list[str]) -> list[str]:
    """The overrides of a run with those given now in their place.

    A new choice for a group removes the old keys of that group. A new length removes the old length. Config folders are
    added to those of the run.
    """
    new_keys = {*map(key_of, command_overrides)} - {SEARCH_PATH}
    dropped_prefixes = tuple(f"{key}." for key in new_keys if (CONF / key).is_dir())
    if not new_keys.isdisjoint(_LENGTH):
        dropped_prefixes += _LENGTH
    kept_overrides = _without_keys(run_overrides, *new_keys)
    kept_overrides = [override for override in kept_overrides if not key_of(override).startswith(dropped_prefixes)]
    if search_path := search_path_in(command_overrides):
        recorded = [still_there(path) for path in search_path_in(kept_overrides)]
        (joined,) = with_search_path([*search_path, *recorded])
        kept_overrides = _without_keys(kept_overrides, SEARCH_PATH)
        command_overrides = [joined if override in search_path else override for override in command_overrides]
    return [*kept_overrides, *command_overrides]


def _without_keys(overrides: list[str], *keys: str) -> list[str]:
    return [override for override in overrides if key_of(override) not in keys]


def folder_of(overrides: list[str], command: str = "train") -> Path | None:
    """The folder that `hydra.run.dir=` of a command names; None without it."""
    text = values_of(overrides).get("hydra.run.dir")
    if text is not None and "${" in text:
        config = compose(command, overrides, with_hydra=True)
        HydraConfig.instance().set_config(config)  # for ${hydra:…}
        text = str(config.hydra.run.dir)
    return None if text is None else Path(text)


def into_new_folder(command: str, overrides: list[str]) -> list[str]:
    """The overrides, with `run=` for `ckpt_path=`. Raises ConfigError if `hydra.run.dir=` names a folder with files."""
    overrides = _without_ckpt_path(overrides, "run")
    if not any(override.startswith("-") for override in overrides):
        folder = folder_of(overrides, command)
        if folder is not None:
            check_unused("hydra.run.dir", folder)
    return overrides


@contextmanager
def new_folder() -> Iterator[tuple[Path, list[str]]]:
    """The locked output folder of the command that Hydra runs, and the command's overrides.

    Raises ConfigError if the folder contains files.
    """
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    with run_lock(folder):
        check_unused("hydra.run.dir", folder)
        yield folder, list(hydra_config.overrides.task)


def resume_hint(folder: Path) -> str:
    """The line that tells the user how to resume a stopped run."""
    path = folder.resolve()
    short_path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    steps = read_results(folder).get("steps")
    at = f" after step {steps}" if steps else ""
    return f"interrupted{at}, to resume: python -m qnmixer.train {shlex.quote(f'resume={quoted(short_path)}')}"
