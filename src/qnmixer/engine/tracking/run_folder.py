"""Run folders: how to find them, their overrides, and the run lock. No torch import."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import OmegaConf

from qnmixer.engine.config.overrides import key_of, of_hydra
from qnmixer.engine.config.search_path import SEARCH_PATH
from qnmixer.engine.tracking.results import read_results
from qnmixer.engine.tracking.sweep_file import SWEEP
from qnmixer.errors import ConfigError
from qnmixer.files import BEFORE_SUFFIX, is_temporary, last_change

RUNS = Path("runs")
_LOCK = ".lock"
HYDRA = ".hydra"
NEXT_HYDRA = ".hydra.next"
"""Where Hydra writes its files if a run resumes: they take the place of the others when the resume is accepted."""
_OVERRIDES = Path(HYDRA) / "overrides.yaml"


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder while the block runs. The system releases it if the process dies.

    Raises ConfigError if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    # Not flock, which filelock uses: data workers inherit it, and live some seconds longer than a killed process.
    with path.open("a+") as stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            stream.seek(0)
            who = stream.read().strip() or "another process"
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


def clean(folder: Path) -> None:
    """Remove half-written files of a killed process from a run folder. The caller holds the run lock."""
    for left in filter(is_temporary, folder.rglob(".*")):
        left.unlink(missing_ok=True)


def run_of(path: Path) -> Path | None:
    """The run folder of a path: the path itself, or the folder of this checkpoint. None if there is none."""
    folder = path.parent.parent if path.suffix == ".ckpt" and path.parent.name == "checkpoints" else path
    return folder if is_run(folder) or (folder / "checkpoints").is_dir() else None


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder."""
    return (folder / "results.json").is_file() or (folder / _OVERRIDES).is_file()


def runs_in(folder: Path) -> Iterator[Path]:
    """All run folders below a folder, also those of sweeps."""
    for path, folders, _ in os.walk(folder):
        here = Path(path)
        if is_run(here) and not (here / SWEEP).is_file():
            folders.clear()
            if not _is_evaluation(here):
                yield here


def _is_evaluation(folder: Path) -> bool:
    """Whether a folder is of `qnmixer.evaluate`, which also writes results.json and .hydra/."""
    overrides = folder / _OVERRIDES
    return overrides.is_file() and re.search("^- '?run=", overrides.read_text(), re.MULTILINE) is not None


def last_touched(run: Path) -> float:
    """Time of the last change in a run folder, in seconds since 1970."""
    return last_change(run / "results.json", run / _OVERRIDES, run / "checkpoints" / "last.ckpt")


def has_checkpoint(run: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    names = [f"{name}.ckpt{suffix}" for name in ("last", "best") for suffix in ("", BEFORE_SUFFIX)]
    return any((run / "checkpoints" / name).exists() for name in names)


def overrides_of(run: Path) -> list[str]:
    """The overrides of a run; empty for a folder that was put together by hand."""
    if (found := read_results(run).get("overrides")) is not None:
        return _of_the_run([str(override) for override in found])
    if (run / _OVERRIDES).is_file():
        return _of_the_run([str(override) for override in OmegaConf.load(run / _OVERRIDES)])
    return []


def _of_the_run(overrides: list[str]) -> list[str]:
    """Overrides without Hydra's own, which could make Hydra run code. Only its search path stays."""
    return [it for it in overrides if not of_hydra(it) or key_of(it) == SEARCH_PATH]
