"""Resume: the run that a command continues, its overrides, and whether it continues in the run's own folder.

No torch import: this is known before Hydra composes a config.
"""

import re
import shlex
from datetime import datetime
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from qnmixer.engine.config.compose import CONF, LENGTH, SEARCH_PATH, compose, key_of, of_hydra, quoted, values_of
from qnmixer.engine.config.options import options
from qnmixer.engine.processes.ranks import rank
from qnmixer.engine.tracking.results import read_results
from qnmixer.engine.tracking.run import (
    BEGINNING,
    NEXT_HYDRA,
    RUNS,
    has_checkpoint,
    overrides_of,
    resumes_in_place,
    run_lock,
    run_of,
    runs_in,
)
from qnmixer.engine.tracking.signature import is_signed
from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.files import check_unused
from qnmixer.weights import PRETRAINED

_OURS = ("hydra.run.dir", "hydra.output_subdir")
"""Keys that are set here. No record gives them: see `overrides_of`."""
_ROOT_KEYS = ("seed", "monitor", "compile", "test_after_training", "tags")
_NAMES_CODE_OR_WRITES = re.compile("_target_|regularizer|cache_dir")
_LOOKS_ELSEWHERE = re.compile(r"[${}\\]|\.\.")
"""Interpolations, nested values, and files outside the config folders."""


def resume_overrides(overrides: list[str]) -> list[str]:
    """Replace `resume` of a training command by the overrides of the run that it names.

    `resume=latest` and `resume=DIR` resume a run in its folder, with its overrides; those of the command win. With
    another `hydra.run.dir=`, and from a checkpoint other than last.ckpt, a new run starts from that checkpoint. A
    command whose folder has its own unfinished run resumes that run, because SLURM requeues a job with the same
    command.

    A run that this user has started may do what it did. Of somebody else's run only plain values are taken, which name
    no code and no place to send or write data to. Others must be in the command itself.

    Raises:
        CheckpointError: there is no such run, or it is done.
        ConfigError: another process writes to the run; the folder of a new run has another run; or somebody else's run
            has more than plain values.
    """
    if any(override.startswith("-") for override in overrides):  # --help, or a sweep, whose jobs get here alone
        return overrides
    found = _resumed(_without(overrides, "trust"))  # other commands need `trust` for the user's own code
    folder = folder_of(found)
    if folder and folder.is_dir() and rank() == 0:  # the other ranks may get here when rank 0 has the lock already
        with run_lock(folder):  # before Hydra writes there
            pass
    return found


def _resumed(overrides: list[str]) -> list[str]:
    asked = values_of(overrides).get("resume", "null")
    path = None if asked == "null" else _asked_path(asked)
    run = None if path is None else run_of(path)
    if path is None or run is None:  # a new run; it may start from a checkpoint outside any run folder
        return _unless_begun(overrides)
    given, folder = _without(overrides, "resume"), folder_of(overrides)
    is_last = path.suffix != ".ckpt" or path.name == "last.ckpt"
    in_place = resumes_in_place(folder, str(path)) if folder else is_last
    if in_place:
        _check_open(run, values_of(given))
        found = _in_place(run, path, given)
    else:
        found = [*_merged(_without(overrides_of(run), *BEGINNING), given), f"resume={quoted(path)}"]
    _check_plain(run, found, [*given, f"resume={quoted(path)}"])
    return found if in_place else _unless_begun(found)


def _in_place(run: Path, path: Path, given: list[str]) -> list[str]:
    """The overrides that resume a run in its folder from `path`. Overrides given now replace those of the run."""
    before, where = overrides_of(run), [] if folder_of(given) else [f"hydra.run.dir={quoted(run)}"]
    if not has_checkpoint(run):  # killed before its first checkpoint: it starts from step 0
        return [*_merged(before, given), *where]
    # The checkpoint has the weights: those of finetune are not read again. A resume may still be refused, so Hydra
    # writes its files elsewhere.
    now = [f"resume={quoted(path)}", f"hydra.output_subdir={NEXT_HYDRA}"]
    return [*_merged(_without(before, *BEGINNING), given), *now, *where]


def _unless_begun(overrides: list[str]) -> list[str]:
    """The overrides of a new run. If its folder has the same run, unfinished: those that resume it in place.

    Each rank decides this by itself, maybe after rank 0 has started. This is safe: rank 0 then has written the same
    overrides and `running`, and it writes no checkpoint before all ranks have joined.

    Raises ConfigError if the folder has another run, or if the run is done.
    """
    run = folder_of(overrides)
    if run is None:
        return overrides
    record = read_results(run)
    is_done = record.get("status") == "done"
    if not is_done and not has_checkpoint(run):
        if "overrides" not in record and rank() == 0:  # else the same run without a checkpoint may start again
            check_unused("hydra.run.dir", run)
        return overrides
    before, now = _by_key(overrides_of(run)), _by_key(overrides)
    differing = next((key for key in before | now if before.get(key) != now.get(key)), None)
    if is_done or differing is not None:
        how = f"that is done ({record.get('steps')} steps)"
        if differing is not None:
            how = f"with {before.get(differing, f'no {differing}')}, not {now.get(differing, 'without')}"
        resume = shlex.quote(f"resume={quoted(run)}") + (" trainer.max_steps=…" if is_done else "")
        raise ConfigError(f"{run} has a run {how}: resume it with {resume}, or give another hydra.run.dir=FOLDER")
    return _in_place(run, run, _without(overrides, *BEGINNING))


def _asked_path(asked: str) -> Path:
    """The run folder or checkpoint that `resume=` names. Raises ConfigError or CheckpointError if there is none."""
    if not asked:
        raise ConfigError("resume= names no run: give resume=latest, or the folder that training printed")
    path = latest() if asked == "latest" else Path(asked).expanduser()
    if run_of(path) is None and not path.is_file():
        if asked == PRETRAINED:
            raise CheckpointError(f"resume={PRETRAINED} names weights, not a run: use finetune={PRETRAINED}")
        raise CheckpointError(f"no run folder at {path}: give the folder that training printed, resume=runs/…")
    return path


def latest() -> Path:
    """The run folder under runs/ that began or resumed last. Raises CheckpointError if there is none."""
    run = max(runs_in(RUNS), key=_begun, default=None)
    if run is None:
        raise CheckpointError(f"resume=latest finds no run under {RUNS.absolute()}: give the run's folder, resume=DIR")
    return run


def _begun(run: Path) -> float:
    """When a run last began, in seconds since 1970, by its record: a copy of an old run has newer files."""
    record = read_results(run)
    times = [record.get("started"), *(it.get("at") for it in record.get("resumed", []))]
    try:
        return datetime.fromisoformat(times[-1] or "").timestamp()
    except (TypeError, ValueError):
        return 0.0


def resume_hint(folder: Path) -> str:
    """The line that tells the user how to resume a stopped run."""
    here = folder.resolve()
    short = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
    steps = read_results(folder).get("steps")
    at = f" after step {steps}" if steps else ""
    return f"interrupted{at}, to resume: python -m qnmixer.train {shlex.quote(f'resume={quoted(short)}')}"


def _check_plain(run: Path, found: list[str], given: list[str]) -> None:
    """Raise ConfigError if somebody else started the run, and it has more than plain values that are not given now."""
    theirs = [it for it in found if it not in given and key_of(it) not in _OURS and not _is_plain(it)]
    if theirs and not is_signed(read_results(run)):
        raise ConfigError(
            f"{run} was not started by you here, and code, loggers, callbacks and folders are yours to name: repeat "
            f"what you trust of {shlex.join(theirs):.300}, or give others, such as logger=csv callbacks=default"
        )


def _is_plain(override: str) -> bool:
    """Whether an override sets a value of the network, its data or its training, or chooses an option of conf/."""
    key, value = key_of(override), override.partition("=")[2]
    group = re.split(r"[./]", key)[0]
    if group in ("logger", "callbacks"):
        words = {*filter(None, re.split(r"[\s,\[\]]+", value))}
        return override == f"~{key}" or (key == group and words <= {*options(group)})
    if not re.fullmatch(r"[\w./]+", key) or _NAMES_CODE_OR_WRITES.search(key) or _LOOKS_ELSEWHERE.search(value):
        return False
    return group in _ROOT_KEYS or (group not in ("hydra", "local") and (CONF / group).is_dir())


def _by_key(overrides: list[str]) -> dict[str, str]:
    """The overrides that define a run, by key. resume=null is left out, and so are Hydra's keys but the search path."""
    of_run = [it for it in overrides if not of_hydra(it) or key_of(it) == SEARCH_PATH]
    return {key_of(it): it for it in of_run if it != "resume=null"}


def folder_of(overrides: list[str], command: str = "train") -> Path | None:
    """The folder that `hydra.run.dir=` of a command names; None without it."""
    text = values_of(overrides).get("hydra.run.dir")
    if text is not None and "${" in text:
        config = compose(command, overrides, with_hydra=True)
        HydraConfig.instance().set_config(config)  # for ${hydra:…}
        text = str(config.hydra.run.dir)
    return None if text is None else Path(text)


def _check_open(run: Path, given: dict[str, str]) -> None:
    """Raise CheckpointError if the run is done, and the command does not make it longer."""
    record, asked = read_results(run), given.get("trainer.max_steps", "")
    if record.get("status") != "done":
        return
    steps = record.get("steps", 0)
    longer = int(asked) > steps if asked.isdigit() else any(key in given for key in (*LENGTH, "trainer.max_time"))
    if not longer:
        raise CheckpointError(f"{run} is done ({steps} steps): to train longer, raise trainer.max_steps")


def _merged(before: list[str], given: list[str]) -> list[str]:
    """The overrides of a run with those given now in their place.

    A new choice for a group removes the old keys of that group. A new length removes the old length.
    """
    now = {*map(key_of, given)}
    gone = tuple(f"{key}." for key in now if (CONF / key).is_dir()) + LENGTH * any(key in now for key in LENGTH)
    return [*(it for it in before if key_of(it) not in now and not key_of(it).startswith(gone)), *given]


def _without(overrides: list[str], *keys: str) -> list[str]:
    return [override for override in overrides if key_of(override) not in keys]
