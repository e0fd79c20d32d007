"""Run folders: which one `resume` goes on in, with which overrides, and that no two processes train in one.

No torch import: this is known before Hydra composes anything.
"""

import shlex
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from qnmixer.config.compose import CONF, compose
from qnmixer.config.overrides import LENGTH, key_of, quoted, values_of
from qnmixer.config.search_path import SEARCH_PATH, packages_of, search_path_in, with_search_path
from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.plugins import check_trusted, module_of, trust_words
from qnmixer.processes.ranks import rank
from qnmixer.tracking.results import read_results
from qnmixer.tracking.run_folder import RUNS, has_checkpoint, held, last_touched, overrides_of, run_of, runs_in
from qnmixer.weights import PRETRAINED

_REGULARIZER = "model.regularizer"
_LETS_HYDRA_RUN_CODE = ("callbacks", "job_logging", "hydra_logging")


def continued(overrides: list[str]) -> list[str]:
    """The overrides of a training command, with what `resume` stands for in place of it.

    `resume=latest` and `resume=DIR` become the overrides of that run, under those given now, and its folder. With
    another `hydra.run.dir=`, and for a checkpoint that is not the last one, it is a new run that begins there. A run
    that its own folder holds already goes on there: a command may be given twice, as SLURM does with what it requeues.

    A run may name code of the user's own. It is resumed if this command names the module too, or has `trust=MODULE`,
    which is no key of the config and goes no further.

    Raises CheckpointError where there is no such run, or it is done; ConfigError where another process trains in it,
    and where the folder of a new run holds another one; PluginError for code that this command does not allow.
    """
    if any(override.startswith("-") for override in overrides):
        return overrides
    trust, overrides = _modules_trusted(overrides), _without(overrides, "trust")
    given = values_of(overrides)
    asked = given.get("resume", "null")
    if not asked:
        raise ConfigError("resume= names no run: give resume=latest, or the folder that training printed")
    if asked == "null":
        return _unless_begun(overrides)
    path = latest() if asked == "latest" else Path(asked).expanduser()
    run = run_of(path)
    if run is None:
        if path.is_file():  # a checkpoint that lies by itself
            return _unless_begun(overrides)
        if asked == PRETRAINED:
            raise CheckpointError(f"resume={PRETRAINED}: no run, but weights: begin one with finetune={PRETRAINED}")
        raise CheckpointError(f"no run folder at {path}: give the folder that training printed, resume=runs/…")
    rest, folder = _without(overrides, "resume"), _folder_of(overrides)
    is_last = path.suffix != ".ckpt" or path.name == "last.ckpt"
    if goes_on(folder, str(path)) if folder else is_last:
        _check_open(run, given)
        merged = _going_on(run, path, rest)
        _check_trusted(run, merged, rest, trust)
        return merged
    branch = _merged(_without(overrides_of(run), "finetune", "resume"), rest)
    _check_trusted(run, branch, rest, trust)
    return _unless_begun([*branch, f"resume={quoted(path)}"])


def goes_on(folder: Path, resume: str | None) -> bool:
    """Whether a run in this folder, with this `resume`, goes on where it began: its logs and its best stay."""
    run = None if resume is None else run_of(Path(resume).expanduser())
    return run is not None and run.resolve() == folder.resolve()


def latest() -> Path:
    """The run folder under runs/ in which something happened last. Raises CheckpointError unless it can go on."""
    found = sorted(runs_in(RUNS), key=last_touched, reverse=True)
    if not found:
        raise CheckpointError(f"resume=latest: there is no run under {RUNS.absolute()}: give its folder, resume=DIR")
    return found[0]


def recorded(folder: Path, overrides: list[str]) -> list[str]:
    """Overrides as a run's record keeps them: those that make it what it is, wherever it has been gone on with."""
    if not goes_on(folder, values_of(overrides).get("resume")):
        return overrides
    begun_with = _by_key(overrides_of(folder))
    kept = [
        begun_with.get("finetune", override) if override == "finetune=null" else override
        for override in _without(overrides, "resume")
    ]
    began_elsewhere = not goes_on(folder, values_of([*begun_with.values()]).get("resume", str(folder)))
    return [*kept, begun_with["resume"]] if began_elsewhere else kept


def how_to_go_on(folder: Path) -> str:
    """The line for who has stopped a run."""
    here = folder.resolve()
    short = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
    steps = read_results(folder).get("steps")
    at = f" after step {steps}" if steps else ""
    words = shlex.join([f"resume={quoted(short)}", *trust_words(_named(folder))])
    return f"interrupted{at}, to go on: python -m qnmixer.train {words}"


def _named(run: Path) -> list[str]:
    """Classes and functions that a run names, in its overrides or in configs of the user's own."""
    overrides, composed = overrides_of(run), run / ".hydra" / "config.yaml"
    if search_path_in(overrides) and composed.is_file():
        return [target for _, target in _targets_in(OmegaConf.to_container(OmegaConf.load(composed)))]
    return [*_targets(overrides).values()]


def _targets(overrides: list[str], but: Collection[str] = ()) -> dict[str, str]:
    """Classes and functions that overrides name, by key, without those of `but`; also inside of a value."""
    named = values_of([it for it in overrides if it not in but and not it.startswith("~")])
    found = {key: value for key, value in named.items() if "_target_" in f"{key}={value}" or key == _REGULARIZER}
    return {key: value for key, value in found.items() if value != "null"}


def _check_trusted(run: Path, merged: list[str], given: list[str], trust: Collection[str]) -> None:
    """Raise PluginError for code that a run names, in its overrides or in the configs that its search path leads to."""
    named = _targets(merged, but=given)
    check_trusted(str(run), named, trust)
    if search_path_in(given) or not search_path_in(merged):
        return
    for package in packages_of(merged):
        check_trusted(str(run), {SEARCH_PATH: f"{package}.configs"}, trust)
    config = compose("train", with_search_path(merged), with_hydra=True)
    ours = compose("train", [], with_hydra=True)
    for key in _LETS_HYDRA_RUN_CODE:
        if config.hydra[key] != ours.hydra[key]:
            raise ConfigError(
                f"{run} was started with configs that set hydra.{key}: if you trust them, name their folder again, "
                "with --config-dir"
            )
    values = OmegaConf.to_container(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
    check_trusted(f"a config of {run}", dict(_targets_in(values)), trust)


def _targets_in(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Classes and functions that a composed config names, by key, nothing resolved."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        name = f"{prefix}{key}"
        if isinstance(value, dict | list):
            yield from _targets_in(value, f"{name}.")
        elif isinstance(value, str) and (key == "_target_" or name == _REGULARIZER):
            yield name, value


def _modules_trusted(overrides: list[str]) -> list[str]:
    """Modules that a command line allows, by `trust` or as it names a class of them itself."""
    trust = values_of(overrides).get("trust", "").strip("[]").split(",")
    return [*filter(None, map(str.strip, trust)), *map(module_of, _targets(overrides).values())]


def _going_on(run: Path, path: Path, given: list[str]) -> list[str]:
    """The overrides by which a run goes on in its folder from a path in it, under those given now."""
    before, where = overrides_of(run), [] if _folder_of(given) else [f"hydra.run.dir={quoted(run)}"]
    if not has_checkpoint(run):  # killed before its first: it begins again as it began
        return [*_merged(before, given), *where]
    begun = ["finetune=null" if key_of(override) == "finetune" else override for override in _without(before, "resume")]
    return [*_merged(begun, given), f"resume={quoted(path)}", *where]


def _unless_begun(overrides: list[str]) -> list[str]:
    """The overrides of a run that is to begin, or by which it goes on where its folder holds it already.

    Each of several ranks finds that out for itself, maybe when rank 0 has gone ahead: that one writes down the same
    overrides and `running`, and no checkpoint before all are there.

    Raises ConfigError where its folder holds another run, or it is done.
    """
    run = _folder_of(overrides)
    if run is None:
        return overrides
    record = read_results(run)
    is_done = record.get("status") == "done"
    if not is_done and not has_checkpoint(run):  # nothing is lost
        if record:
            _check_free(run)
        return overrides
    before, now = _by_key(overrides_of(run)), _by_key(overrides)
    differing = next((key for key in before | now if before.get(key) != now.get(key)), None)
    if is_done or differing is not None:
        if differing is None:
            how = f"that is done ({record.get('steps')} steps)"
        elif differing in before:
            how = f"with {before[differing]}, not {now.get(differing, 'without')}"
        else:
            how = f"without {now[differing]}"
        longer = " trainer.max_steps=…" if is_done else ""
        raise ConfigError(
            f"{run} holds a run {how}: resume={quoted(run)}{longer} goes on with it, or give another "
            "hydra.run.dir=FOLDER"
        )
    _check_free(run)
    return _going_on(run, run, [override for override in overrides if _of_hydra(override)])


def _by_key(overrides: list[str]) -> dict[str, str]:
    """What makes a run what it is, by key: of Hydra's the search path alone; not that it goes on with nothing."""
    of_run = [it for it in overrides if not _of_hydra(it) or key_of(it) == SEARCH_PATH]
    return {key_of(it): it for it in of_run if it != "resume=null"}


def _folder_of(overrides: list[str]) -> Path | None:
    """The folder that a run is to have; None where nobody says."""
    text = values_of(overrides).get("hydra.run.dir")
    if text is not None and "${" in text:
        config = compose("train", overrides, with_hydra=True)
        HydraConfig.instance().set_config(config)  # for ${hydra:…}
        text = str(config.hydra.run.dir)
    return None if text is None else Path(text)


def _check_open(run: Path, given: dict[str, str]) -> None:
    """Raise unless a run can go on in its folder."""
    _check_free(run)
    record = read_results(run)
    if record.get("status") != "done" or _is_longer(record, given):
        return
    others = [path for path in runs_in(RUNS) if read_results(path).get("status") != "done"]
    earlier = max(others, key=last_touched, default=None)
    more = "" if given.get("resume") != "latest" or earlier is None else f", or resume={earlier}, which is not done"
    raise CheckpointError(
        f"{run} is done ({record.get('steps')} steps): give a larger trainer.max_steps to go on{more}"
    )


def _check_free(run: Path) -> None:
    """Raise ConfigError while another process trains in a folder."""
    if rank() == 0:  # the other ranks may come when it trains there itself
        with held(run):
            pass


def _is_longer(record: dict[str, object], given: dict[str, str]) -> bool:
    steps, asked = record.get("steps"), given.get("trainer.max_steps")
    if asked is not None and asked.isdigit() and isinstance(steps, int):
        return int(asked) > steps
    return any(key in given for key in (*LENGTH, "trainer.max_time"))


def _merged(before: list[str], given: list[str]) -> list[str]:
    """Overrides of a run under those given now, each in its place.

    A new choice of a group takes its keys along, a new length the old one.
    """
    now = {key_of(override): override for override in given}
    gone = tuple(f"{key}." for key in now if (CONF / key).is_dir())
    if any(key in now for key in LENGTH):
        gone += LENGTH
    kept = [
        now.get(key_of(override), override)
        for override in before
        if key_of(override) in now or not key_of(override).startswith(gone)
    ]
    return [*kept, *(override for key, override in now.items() if key not in map(key_of, before))]


def _without(overrides: list[str], *keys: str) -> list[str]:
    return [override for override in overrides if key_of(override) not in keys]


def _of_hydra(override: str) -> bool:
    return key_of(override).startswith(("hydra.", "hydra/"))
