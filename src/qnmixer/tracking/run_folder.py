"""Run folders: what tells one, what it was started with, and that no two processes train in one. No torch import."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import OmegaConf

from qnmixer.errors import ConfigError
from qnmixer.files import BEFORE_SUFFIX, TEMPORARY_SUFFIX, last_change
from qnmixer.tracking.results import read_results
from qnmixer.tracking.sweep_file import SWEEP

RUNS = Path("runs")
_LOCK = ".lock"
_OVERRIDES = Path(".hydra") / "overrides.yaml"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Where this process is the one that trains in a run folder; the system lets it go when the process is killed.

    Raises ConfigError while another one holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    # Not flock, as filelock has it: data workers would inherit the lock, and outlive a killed process by seconds.
    with path.open("a+") as stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            stream.seek(0)
            who = stream.read().strip() or "another process"
            raise ConfigError(
                f"{who} trains in {folder}: wait for its end, or stop it, or give another hydra.run.dir=FOLDER"
            ) from None
        except OSError:  # a file system without locks
            yield
            return
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        stream.flush()
        yield


def clean(folder: Path) -> None:
    """Remove what a process that was killed in the middle of writing has left in a run folder that is held."""
    for left in folder.rglob(f".*{TEMPORARY_SUFFIX}"):
        left.unlink(missing_ok=True)


def run_of(path: Path) -> Path | None:
    """The run folder that is meant by itself or by one of its checkpoints; None where there is none."""
    folder = path.parent.parent if path.suffix == ".ckpt" and path.parent.name == "checkpoints" else path
    return folder if is_run(folder) or (folder / "checkpoints").is_dir() else None


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / "results.json").is_file() or (folder / _OVERRIDES).is_file()


def runs_in(folder: Path) -> Iterator[Path]:
    """All run folders below, those of sweeps too."""
    for path, folders, _ in os.walk(folder):
        here = Path(path)
        if is_run(here) and not (here / SWEEP).is_file():
            folders.clear()
            yield here


def last_touched(run: Path) -> float:
    """When something last happened in a run folder, as the system counts seconds."""
    return last_change(run / "results.json", run / _OVERRIDES, run / "checkpoints" / "last.ckpt")


def has_checkpoint(run: Path) -> bool:
    """Whether there is anything to go on from."""
    names = [f"{name}.ckpt{suffix}" for name in ("last", "best") for suffix in ("", BEFORE_SUFFIX)]
    return any((run / "checkpoints" / name).exists() for name in names)


def overrides_of(run: Path) -> list[str]:
    """What a run was started with; nothing is known of one that somebody put together by hand."""
    if (found := read_results(run).get("overrides")) is not None:
        return [str(override) for override in found]
    if (run / _OVERRIDES).is_file():
        return [str(override) for override in OmegaConf.load(run / _OVERRIDES)]
    return []
