"""Resume: the run that a command continues, its overrides, and whether it continues in the run's own folder.

No torch import: this is known before Hydra composes a config.
"""

import re
import shlex
from collections.abc import Collection, Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from qnmixer.engine.config.compose import (
    CONF,
    LENGTH,
    SEARCH_PATH,
    compose,
    key_of,
    looks_elsewhere,
    looks_up,
    of_hydra,
    places_of,
    quoted,
    search_path_in,
    values_of,
    with_search_path,
)
from qnmixer.engine.config.options import TARGET, flat_keys, options, values_of_option
from qnmixer.engine.plugins import check_trusted, module_of, trust_words
from qnmixer.engine.processes.ranks import rank
from qnmixer.engine.tracking.records import read_yaml
from qnmixer.engine.tracking.results import TIME, read_results
from qnmixer.engine.tracking.run import (
    BEGINNING,
    HYDRA,
    NEXT_HYDRA,
    RUNS,
    has_checkpoint,
    last_touched,
    overrides_of,
    resumes_in_place,
    run_lock,
    run_of,
    runs_in,
)
from qnmixer.engine.tracking.signature import is_signed
from qnmixer.errors import CheckpointError, ConfigError, DataError
from qnmixer.files import check_unused
from qnmixer.weights import PRETRAINED
from qnmixer.weights.hub import HUB

_REGULARIZER = "model.regularizer"
_NAMES_CODE = re.compile(r"_target_|\bregularizer\b")
_SENDS_OR_WRITES = re.compile("logger|callbacks|cache_dir|searchpath")
_LETS_HYDRA_RUN_CODE = ("callbacks", "job_logging", "hydra_logging", "job.env_set", "launcher", "sweeper")


def resume_overrides(overrides: list[str]) -> list[str]:
    """Replace `resume` of a training command by the overrides of the run that it names.

    `resume=latest` and `resume=DIR` resume a run in its folder, with its overrides; those of the command win. With
    another `hydra.run.dir=`, and from a checkpoint other than last.ckpt, a new run starts from that checkpoint. A
    command whose folder has its own unfinished run resumes that run, because SLURM requeues a job with the same
    command.

    A run may name the user's own code. It is resumed only if this command names the module too, or has `trust=MODULE`.
    `trust` is not a key of the config. A run that somebody else started has no word on loggers, callbacks and folders
    to write to, but the options that conf/ has.

    Raises:
        CheckpointError: there is no such run, or it is done.
        ConfigError: another process writes to the run, or the folder of a new run has another run; or somebody else's
            run names loggers, callbacks or folders.
        PluginError: the run names code that this command does not allow.
    """
    if any(override.startswith("-") for override in overrides):  # --help, or a sweep, whose jobs get here alone
        return overrides
    found = _resumed(overrides)
    folder = folder_of(found)
    if folder and folder.is_dir() and rank() == 0:  # the other ranks may get here when rank 0 has the lock already
        with run_lock(folder):  # before Hydra writes there
            pass
    return found


def _resumed(typed: list[str]) -> list[str]:
    overrides = _without(typed, "trust")
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
    _check_trusted(run, found, given, _modules_trusted(typed))
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
    return _in_place(run, run, [override for override in overrides if of_hydra(override)])


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
    found = sorted(runs_in(RUNS), key=_begun, reverse=True)
    if not found:
        raise CheckpointError(f"resume=latest finds no run under {RUNS.absolute()}: give the run's folder, resume=DIR")
    return found[0]


def _begun(run: Path) -> float:
    """When a run last began, in seconds since 1970, by its record: a copy of an old run has newer files."""
    record = read_results(run)
    try:
        at = record["resumed"][-1]["at"] if record.get("resumed") else record["started"]
        return datetime.strptime(at, TIME).timestamp()
    except (KeyError, TypeError, ValueError):  # of another version, or damaged
        return last_touched(run)


def resume_hint(folder: Path) -> str:
    """The line that tells the user how to resume a stopped run."""
    here = folder.resolve()
    short = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
    steps = read_results(folder).get("steps")
    at = f" after step {steps}" if steps else ""
    words = shlex.join([f"resume={quoted(short)}", *trust_words(_named(folder))])
    return f"interrupted{at}, to resume: python -m qnmixer.train {words}"


def _named(run: Path) -> list[str]:
    """Classes and functions that the config of a run names."""
    composed = run / HYDRA / "config.yaml"
    try:
        config = read_yaml(composed) if composed.is_file() else {}
    except DataError:  # of a run that is refused
        return []
    return [target for _, target in _targets_in(config)] if isinstance(config, dict) else []


def _targets(overrides: list[str], but: Collection[str] = ()) -> dict[str, str]:
    """Classes and functions that overrides name, by key, also inside values. Those in `but` are left out."""
    named = values_of([it for it in overrides if it not in but and not it.startswith("~")])
    found = {key: value for key, value in named.items() if _NAMES_CODE.search(f"{key}={value}")}
    return {key: value for key, value in found.items() if value != "null"}


def _check_trusted(run: Path, merged: list[str], given: list[str], trust: Collection[str]) -> None:
    """Raise if a run names untrusted code or values, in its overrides or in the configs on its search path.

    Raises PluginError for code, ConfigError for other values from this machine, such as ${oc.env:NAME}.
    """
    if odd := next((it for it in merged if it not in given and (looks_elsewhere(it) or _imports(it))), None):
        raise ConfigError(
            f"{run} was started with {odd}, which reads other values of this machine: if you trust it, repeat it"
        )
    check_trusted(str(run), _targets(merged, but=given), trust)
    theirs = [it for it in merged if it not in given and _is_the_users(it)]
    if theirs and rank() == 0 and not is_signed(read_results(run)):
        raise ConfigError(
            f"{run} was not started by you here, and loggers, callbacks and folders are yours to name: repeat what you "
            f"trust of {shlex.join(theirs):.300}, or give others, such as logger=csv callbacks=default"
        )
    # The user has named the folder in this command, or there is none but conf/.
    if search_path_in(given) or not search_path_in(merged):
        return
    # Configs in the run's own folders may have changed since.
    config = compose("train", with_search_path(merged), with_hydra=True)
    ours = compose("train", [], with_hydra=True)
    for key in _LETS_HYDRA_RUN_CODE:  # as Hydra would see them: an interpolation can bring them from any other key
        if OmegaConf.select(config.hydra, key) != OmegaConf.select(ours.hydra, key):
            raise ConfigError(
                f"a config of {run} sets hydra.{key}, which runs code: if you trust it, repeat the folder by "
                "--config-dir=FOLDER"
            )
    values = OmegaConf.to_container(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
    usual = {text for _, text in _texts_in(OmegaConf.to_container(ours))}
    for key, text in _texts_in(values):
        if looks_up(text) and text not in usual:
            raise ConfigError(
                f"a config of {run} has {key}={text}, which reads other values of this machine: if you trust it, "
                "repeat the folder by --config-dir=FOLDER"
            )
    check_trusted(f"a config of {run}", dict(_targets_in(values)), trust)


def _is_the_users(override: str) -> bool:
    """Whether an override sends or writes data somewhere, by a logger, a callback, or a folder, as conf/ does not."""
    ((key, value),) = values_of([override]).items()
    text = override.replace("\\", "") if "{" in override else key
    if key == "finetune" and value.startswith(HUB):  # a download with the user's token
        return True
    if override.startswith("~") or value == "null" or not _SENDS_OR_WRITES.search(text):
        return False
    if key in ("logger", "callbacks"):
        return not {*filter(None, re.split(r"[\s,\[\]]+", value))} <= {*options(key)}
    ready = {it for option in options("callbacks") for it in flat_keys(values_of_option("callbacks", option))}
    is_plain = key.removeprefix("callbacks.") in ready and not key.endswith(TARGET)
    return not is_plain and override not in ("logger.wandb.mode=offline", "logger.wandb.mode=disabled")


def _imports(override: str) -> bool:
    """Whether it names a package with configs: Hydra imports it. Parsed, because Hydra's grammar has escapes."""
    return key_of(override) == SEARCH_PATH and any("pkg://" in place for place in places_of(override))


def _targets_in(values: Any) -> Iterator[tuple[str, str]]:
    """Classes and functions that a composed config names and conf/ does not, by key. Nothing is resolved."""
    for key, text in _texts_in(values):
        if (f".{key}".endswith(f".{TARGET}") or key == _REGULARIZER) and text not in _named_by_conf():
            yield key, text


def _texts_in(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """All values of a composed config by key, as texts."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(value, dict | list):
            yield from _texts_in(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value)


@cache
def _named_by_conf() -> set[str]:
    """Targets that the configs of this repository name, such as torch's optimizers."""
    return {
        it for path in CONF.rglob("*.yaml") for it in re.findall(r"_target_: (\S+)", path.read_text(encoding="utf-8"))
    }


def _modules_trusted(overrides: list[str]) -> list[str]:
    """Modules that a command line allows: by `trust`, or by naming one of their classes."""
    trust = values_of(overrides).get("trust", "").strip("[]").split(",")
    return [*filter(None, map(str.strip, trust)), *map(module_of, _targets(overrides).values())]


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
