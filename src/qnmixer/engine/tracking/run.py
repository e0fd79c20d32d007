"""Run folders: how to find one, what it says of its run, who may write to it; and `Run`, the one that is written now.

No torch import.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qnmixer.engine.config.compose import SEARCH_PATH, key_of, of_hydra
from qnmixer.engine.processes.ranks import rank
from qnmixer.engine.reports.tables import Console
from qnmixer.engine.tracking.results import amend, now, read_results, results, was_refused, write_results
from qnmixer.engine.tracking.signature import is_signed, signed
from qnmixer.engine.tracking.sweep_file import SWEEP, sweep_of
from qnmixer.errors import ConfigError
from qnmixer.files import check_no_links, is_temporary, newest_complete, remove, replace
from qnmixer.weights import checkpoint_in

RUNS = Path("runs")
HYDRA = ".hydra"
NEXT_HYDRA = ".hydra.next"
"""Where Hydra writes its files if a run resumes: they take the place of the others when the resume is accepted."""
BEGINNING = ("finetune", "resume")
"""Keys that say where a run began. Its record keeps them when it resumes in its folder."""


def run_of(path: Path) -> Path | None:
    """The run folder of a path: the path itself, or the folder of this checkpoint. None if there is none."""
    folder = path.parent.parent if path.suffix == ".ckpt" and path.parent.name == "checkpoints" else path
    return folder if is_run(folder) or (folder / "checkpoints").is_dir() else None


def name_of_run(run: Path) -> str:
    """The name of a run folder or weights file, without its parent folders: date and time, or sweep and job."""
    run = (run_of(run) or run).absolute()
    if run.is_file():
        return run.stem
    if (found := sweep_of(run)) is not None:
        return f"{found[0].name}/{run.name}"
    return f"{run.parent.name}/{run.name}" if re.fullmatch(r"\d{4}-\d\d-\d\d", run.parent.name) else run.name


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder."""
    return (folder / "results.json").is_file()


def runs_in(folder: Path) -> Iterator[Path]:
    """All run folders below a folder, also those of sweeps."""
    for path, folders, _ in os.walk(folder):
        here = Path(path)
        if is_run(here) and not (here / SWEEP).is_file():
            folders.clear()
            if "run" not in map(key_of, overrides_of(here)):  # of `qnmixer.evaluate`, which writes the same files
                yield here


def has_checkpoint(run: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    return any(newest_complete(checkpoint_in(run, name)).exists() for name in ("last", "best"))


def overrides_of(run: Path) -> list[str]:
    """The overrides of a run; empty for a folder that was put together by hand.

    Hydra's own are left out, because they could make Hydra run code. Only its search path stays.
    """
    found: list[str] = read_results(run).get("overrides", [])
    return [it for it in found if not of_hydra(it) or key_of(it) == SEARCH_PATH]


def resumes_in_place(folder: Path, resume: str | None) -> bool:
    """Whether `resume` names the run of this folder: then the run continues its logs and its best value."""
    run = None if resume is None else run_of(Path(resume).expanduser())
    return run is not None and run.resolve() == folder.resolve()


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder while the block runs. The system releases it if the process dies.

    Raises ConfigError if another process holds it, or if a link in the folder leads out of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_no_links(folder)
    lock = folder / ".lock"
    if lock.is_symlink() or (lock.exists() and not lock.is_file()):
        raise ConfigError(f"{lock} is no file: remove it")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    # Not flock, which filelock uses: data workers inherit it, and live some seconds longer than a killed process.
    with open(descriptor, "r+", encoding="utf-8", errors="replace") as stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            stream.seek(0)
            who = stream.read(200).strip() or "another process"
            raise ConfigError(
                f"{who} writes to {folder}: wait until it ends, or stop it, or give another hydra.run.dir=FOLDER"
            ) from None
        except OSError:  # a file system without locks
            yield
            return
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        stream.flush()
        yield


class Run:
    """One training run. Each of its processes has one; only rank 0 takes the lock, prints and writes the record.

    Args:
        folder: the run folder. All files of the run go into it.
        overrides: of the command line, or of a job in a sweep.
        resume: `resume` of the config: a run folder, a checkpoint, or None.

    Attributes:
        resumes_in_place: whether the run continues its own logs and best value. One that starts from another run does
            not.
        overrides: those that define the run, for results.json.
        console: prints lines for the user.
        record: results.json, for metrics and paths; written at the end of `recording`.
        resumed_at: optimizer steps of the checkpoint, if the run resumes in its folder.
    """

    def __init__(self, folder: Path, overrides: Sequence[str] = (), resume: str | None = None) -> None:
        self.folder, self.resume, self.overrides = folder, resume, [*overrides]
        self.console = Console(quiet=rank() != 0)
        self.record: dict[str, Any] = {}
        self.resumed_at: int | None = None
        self.resumes_in_place = resumes_in_place(folder, resume)
        self._before: dict[str, Any] = {}
        self._is_mine = True
        if self.resumes_in_place:
            self._before = read_results(folder)
            began = [it for it in overrides_of(folder) if key_of(it) in BEGINNING]
            self._is_mine = not began or is_signed(self._before)  # the user has not seen where a stranger's began
            self.overrides = [*began, *(it for it in overrides if key_of(it) not in BEGINNING)]

    @property
    def threads(self) -> int | None:
        """The CPU threads of the single process that this run continues; None for a new run, and after several."""
        # Each of several processes had its share of the cores: one alone would keep the others idle.
        threads = self._before.get("threads") if self._before.get("processes") == 1 else None
        return threads if isinstance(threads, int) and threads > 0 else None

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
            for left in filter(is_temporary, self.folder.rglob(".*")):
                left.unlink(missing_ok=True)
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
    def recording(self) -> Iterator[None]:
        """Write results.json while the block runs: running, then done, failed or interrupted."""
        if rank() != 0:
            yield
            return
        with results(self.folder, self.overrides, self._before) as self.record:
            yield

    def record_resume(self, step: int) -> None:
        """Record that the run resumes in its folder from a checkpoint of this optimizer step, with its overrides."""
        self.resumed_at = step
        resumed = [*self.record.get("resumed", []), {"step": step, "at": now()}]
        overrides = signed(self.overrides) if self._is_mine else {"overrides": self.overrides, "signature": None}
        self.record |= overrides | {"resumed": resumed}
        if rank() == 0:
            write_results(self.folder, self.record)  # at once, because the run may be killed
            if (accepted := self.folder / NEXT_HYDRA).is_dir():
                replace(accepted, self.folder / HYDRA)

    def record_end(self, status: str, error: BaseException | None = None) -> None:
        """Set the end of the run in results.json, if `recording` could not. A refused resume leaves a done run done."""
        if was_refused(self._before, read_results(self.folder)):
            return
        line = None if error is None else f"{type(error).__name__}: {error}"
        amend(self.folder, self.overrides, status=status, error=line)
