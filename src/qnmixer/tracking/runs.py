"""Run folders: which one `resume` goes on in, with which overrides, and that no two processes train in one.

No torch import: this is known before Hydra composes anything.
"""

import fcntl
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import OmegaConf

from qnmixer.config import CONF
from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.files import BEFORE_SUFFIX, TEMPORARY_SUFFIX
from qnmixer.ranks import rank
from qnmixer.tracking.results import read_results

RUNS = Path("runs")
SWEEP = "sweep.json"
"""What tells the folder of a sweep from that of a run."""

_LOCK = ".lock"
_OVERRIDES = Path(".hydra") / "overrides.yaml"
_LENGTH = ("trainer.max_steps", "trainer.max_epochs")


def continued(overrides: list[str]) -> list[str]:
    """The overrides of a training command, with what `resume` stands for in place of it.

    `resume=latest` and `resume=DIR` become the overrides of that run, under those given now, and its folder. With
    another `hydra.run.dir=`, and for a checkpoint that is not the last one, it is a new run that begins there.

    Raises CheckpointError where there is no such run, or it is done; ConfigError where another process trains in it.
    """
    given = {_key(override): override.partition("=")[2] for override in overrides}
    asked = given.get("resume", "null").strip("'\"")
    if asked == "null" or any(override.startswith("-") for override in overrides):
        return overrides
    path = latest() if asked == "latest" else Path(asked).expanduser()
    run = _run_of(path)
    if run is None:
        if path.is_file():  # a checkpoint that lies by itself
            return overrides
        raise CheckpointError(f"no run folder at {path}: give the folder that training printed, resume=runs/…")
    rest = [override for override in overrides if _key(override) != "resume"]
    before = _overrides_of(run)
    elsewhere = given.get("hydra.run.dir")
    if elsewhere is None and path.suffix == ".ckpt" and path.name != "last.ckpt":
        return [*_merged(_without(before, "finetune", "resume"), rest), f"resume={quoted(path)}"]
    if elsewhere is not None and Path(elsewhere.strip("'\"")).expanduser().resolve() != run.resolve():
        return [*_merged(_without(before, "finetune", "resume"), rest), f"resume={quoted(path)}"]
    _check_open(run, given)
    where = [] if elsewhere is not None else [f"hydra.run.dir={quoted(run)}"]
    if not _has_checkpoint(run):  # killed before its first: it begins again as it began
        return [*_merged(before, rest), *where]
    begun = ["finetune=null" if _key(override) == "finetune" else override for override in _without(before, "resume")]
    return [*_merged(begun, rest), f"resume={quoted(path)}", *where]


def latest() -> Path:
    """The run folder under runs/ in which something happened last. Raises CheckpointError unless it can go on."""
    found = sorted(_runs_in(RUNS), key=_last_touched, reverse=True)
    if not found:
        raise CheckpointError(f"resume=latest: there is no run under {RUNS.absolute()}: give its folder, resume=DIR")
    return found[0]


def recorded(folder: Path, overrides: list[str]) -> list[str]:
    """Overrides as a run's record keeps them: those that make it what it is, wherever it has been gone on with."""
    path = next((o.partition("=")[2].strip("'\"") for o in overrides if _key(o) == "resume"), None)
    if path is None or (run := _run_of(Path(path).expanduser())) is None or run.resolve() != folder.resolve():
        return overrides
    begun_with = {_key(override): override for override in _overrides_of(folder)}
    return [
        begun_with.get("finetune", override) if override == "finetune=null" else override
        for override in _without(overrides, "resume")
    ]


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
        for left in folder.rglob(f".*{TEMPORARY_SUFFIX}"):  # by one that was killed
            left.unlink(missing_ok=True)
        yield


def how_to_go_on(folder: Path) -> str:
    """The line for who has stopped a run."""
    here = folder.resolve()
    short = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
    steps = read_results(folder).get("steps")
    at = f" after step {steps}" if steps else ""
    return f"interrupted{at}, to go on: python -m qnmixer.train {shlex.quote(f'resume={quoted(short)}')}"


def quoted(path: Path) -> str:
    """A path as Hydra takes it on its command line, whatever is in it."""
    text = str(path)
    if all(c.isalnum() or c in "/-_.:" for c in text):
        return text
    return "'" + text.replace("'", "\\'") + "'"


def _check_open(run: Path, given: dict[str, str]) -> None:
    """Raise unless a run can go on in its folder."""
    if rank() == 0:
        with held(run):
            pass
    record = read_results(run)
    if record.get("status") != "done" or _is_longer(record, given):
        return
    others = [path for path in _runs_in(RUNS) if read_results(path).get("status") != "done"]
    earlier = max(others, key=_last_touched, default=None)
    more = "" if given.get("resume") != "latest" or earlier is None else f", or resume={earlier}, which is not done"
    raise CheckpointError(
        f"{run} is done ({record.get('steps')} steps): give a larger trainer.max_steps to go on{more}"
    )


def _is_longer(record: dict[str, object], given: dict[str, str]) -> bool:
    steps, asked = record.get("steps"), given.get("trainer.max_steps")
    if asked is not None and asked.isdigit() and isinstance(steps, int):
        return int(asked) > steps
    return any(key in given for key in _LENGTH)


def _run_of(path: Path) -> Path | None:
    """The run folder that is meant by itself or by one of its checkpoints; None where there is none."""
    folder = path.parent.parent if path.suffix == ".ckpt" and path.parent.name == "checkpoints" else path
    return folder if _is_run(folder) or (folder / "checkpoints").is_dir() else None


def _is_run(folder: Path) -> bool:
    return (folder / "results.json").is_file() or (folder / _OVERRIDES).is_file()


def _runs_in(folder: Path) -> Iterator[Path]:
    """All run folders below, those of sweeps too."""
    for path, folders, _ in os.walk(folder):
        here = Path(path)
        if _is_run(here) and not (here / SWEEP).is_file():
            folders.clear()
            yield here


def _last_touched(run: Path) -> float:
    paths = (run / "results.json", run / _OVERRIDES, run / "checkpoints" / "last.ckpt")
    return max(path.stat().st_mtime for path in paths if path.exists())


def _has_checkpoint(run: Path) -> bool:
    names = [f"{name}.ckpt{suffix}" for name in ("last", "best") for suffix in ("", BEFORE_SUFFIX)]
    return any((run / "checkpoints" / name).exists() for name in names)


def _overrides_of(run: Path) -> list[str]:
    """What a run was started with; nothing is known of one that somebody put together by hand."""
    if (found := read_results(run).get("overrides")) is not None:
        return [str(override) for override in found]
    if (run / _OVERRIDES).is_file():
        return [str(override) for override in OmegaConf.load(run / _OVERRIDES)]
    return []


def _merged(before: list[str], given: list[str]) -> list[str]:
    """Overrides of a run under those given now, each in its place; a new choice of a group takes its keys along."""
    now = {_key(override): override for override in given}
    groups = tuple(f"{key}." for key in now if (CONF / key).is_dir())
    kept = [
        now.get(_key(override), override)
        for override in before
        if _key(override) in now or not _key(override).startswith(groups)
    ]
    return [*kept, *(override for key, override in now.items() if key not in map(_key, before))]


def _without(overrides: list[str], *keys: str) -> list[str]:
    return [override for override in overrides if _key(override) not in keys]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
