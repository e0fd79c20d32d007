"""How every command starts and how every error ends: one line, a non-zero exit, no traceback unless asked for."""

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import hydra
from hydra._internal.utils import get_args_parser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qnmixer.config import flat_keys, unknown_key
from qnmixer.config.compose import CONF, compose, compose_sweep
from qnmixer.config.option import suggest
from qnmixer.errors import ConfigError, Stopped, UserError
from qnmixer.ranks import is_rank, rank, world_size
from qnmixer.usage import usage

TRACEBACK = "HYDRA_FULL_ERROR"
_SWEEP = {"-m", "--multirun"}


def run(
    task: Callable[[DictConfig], object],
    check: Callable[[DictConfig], object],
    config_name: str,
    sweep: Callable[[list[str], DictConfig], AbstractContextManager[str]] | None = None,
    complete: Callable[[list[str]], list[str]] = list,
) -> None:
    """Run a command: compose its config, `check` it before any folder is made, then hand it to `task`.

    Args:
        task: the command.
        check: raises UserError for a config that the task would refuse.
        config_name: its file in `conf/`.
        sweep: what surrounds several runs of it (`-m`), given the overrides and the config that they begin with; yields
            one more override. None: they only follow each other.
        complete: the arguments to run with, from those that were given.
    """
    asked_for_traceback = os.environ.get(TRACEBACK) == "1"
    try:
        with _handing_on_exceptions():
            _run(task, check, config_name, sweep or (lambda *_: nullcontext("hydra.mode=MULTIRUN")), complete)
    except KeyboardInterrupt as stop:
        _fail(str(stop) or "interrupted", stop.code if isinstance(stop, Stopped) else 130)
    except Exception as error:
        if asked_for_traceback:
            raise
        line = explain(error, config_name)
        if line is None:
            raise
        for note in getattr(error, "__notes__", ()):  # where in a rank the error was
            print(note, file=sys.stderr)
        _fail(f"error: {line}", 1)


def _run(
    task: Callable[[DictConfig], object],
    check: Callable[[DictConfig], object],
    config_name: str,
    sweep: Callable[[list[str], DictConfig], AbstractContextManager[str]],
    complete: Callable[[list[str]], list[str]],
) -> None:
    sys.argv[1:] = complete(sys.argv[1:])
    if is_rank():
        sys.argv[1:] = _overrides_of_rank(sys.argv[1:])
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in _SWEEP)  # where Hydra wants them
    _check_flags(sys.argv[1:], config_name)
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    flags = {argument for argument in sys.argv[1:] if argument.startswith("-")}
    if flags & {"--help", "-h"}:
        print(usage(compose(config_name, overrides, with_hydra=True), CONF, config_name))
        return
    failures: list[Exception] = []
    command = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(_keeping(task, failures))
    if flags & _SWEEP or "hydra.mode=MULTIRUN" in overrides:
        if further := sorted(flags - _SWEEP):
            raise ConfigError(f"a sweep takes no further flag: leave out {' '.join(further)}")
        with sweep(overrides, compose_sweep(config_name, overrides)) as one_more:
            sys.argv.append(one_more)
            command()
    else:
        if not flags:
            check(compose(config_name, overrides))
        command()
    if failures:
        raise failures[0]


def _check_flags(arguments: list[str], config_name: str) -> None:
    """Raise ConfigError for a flag that Hydra does not have, such as `--lr 3`."""
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        _, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}: --hydra-help lists these flags") from error
    for word in unknown:
        key, equal, _ = word.lstrip("-").partition("=")
        known = [*_known_keys(config_name)]
        hint = f"write {word.lstrip('-')}{'' if equal else '=…'}" if key in known else str(unknown_key(key, known))
        raise ConfigError(f"{word} is not an option: {hint}")


@contextmanager
def _handing_on_exceptions() -> Iterator[None]:
    """Where Hydra hands exceptions on instead of printing them, which this variable of its own makes it do."""
    before = os.environ.get(TRACEBACK)
    os.environ[TRACEBACK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[TRACEBACK]
        else:
            os.environ[TRACEBACK] = before


def _overrides_of_rank(overrides: list[str]) -> list[str]:
    """What Hydra is to get in one of several processes; ConfigError where each would make a folder of its own."""
    if _SWEEP & {*overrides}:
        raise ConfigError("a sweep starts processes of its own for each job: run it without torchrun or srun")
    if not any(override.startswith("hydra.run.dir=") for override in overrides):
        raise ConfigError(
            f"this is process {rank()} of {world_size()}, and each would make a run folder of its own: "
            "give all of them the same hydra.run.dir=FOLDER"
        )
    return overrides if rank() == 0 else [*overrides, "hydra.output_subdir=null"]


def _keeping(task: Callable[[DictConfig], object], failures: list[Exception]) -> Callable[[DictConfig], object]:
    """Keep what a job raises for `run`: Hydra would add lines of its own, and end a sweep at its first failure."""

    def job(cfg: DictConfig) -> object:
        try:
            return task(cfg)
        except Exception as error:
            failures.append(error)
            return None

    job.__module__ = task.__module__
    return job


def explain(error: BaseException, config_name: str) -> str | None:
    """The one line for an error that a user can mend; None for one that is a bug of ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" writing {error.filename}" if error.filename else ""
        return f"the disk is full{where}: free some space, or choose another folder (hydra.run.dir=…, output=…)"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS):
        return f"no permission for {error.filename}: choose a place that you may use (hydra.run.dir=…, output=…)"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{str(error.filename)[:60]}… is too long a name: choose a shorter hydra.run.dir or hydra.sweep.subdir"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for this
        return (
            f"out of memory ({str(error).splitlines()[0]}): lower data.batch_size, model.n_iterations or "
            "model.channels, or set trainer.precision=16-mixed"
        )
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{error.filename} is a file where a folder must be: choose another (hydra.run.dir=…, output=…)"
    if isinstance(error, FloatingPointError):
        return f"{error}: lower optimizer.lr, or look at train/grad_norm in metrics.csv"
    if type(error).__module__.startswith("wandb."):
        return f"W&B: {error}: run `wandb login` once, or leave logger.mode=offline"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _explain_composition(error, config_name)
    return None


def _explain_composition(error: Exception, config_name: str) -> str:
    if isinstance(error, OverrideParseException):
        if "missing EQUAL" in error.message:
            return f"{error.override} is not KEY=VALUE: write {error.override}=… without blanks around the ="
        return (
            f"{error.override} cannot be read: put quotes around a value with brackets, commas or quotes: 'key=\"a,b\"'"
        )
    text = " ".join(str(error).split())
    if found := re.search(r"Could not load '(hydra/\w+)/(optuna|submitit|ray)", text):
        extra = {"optuna": "search", "submitit": "slurm", "ray": "ray"}[found[2]]
        return f'this {found[1]} is a plugin that is not installed here: pip install -e ".[{extra}]"'
    if isinstance(error, MissingConfigException) and (found := re.search(r"Could not find '([^']+)/([^'/]+)'", text)):
        group, name = found.groups()
        options = [path.stem for path in sorted((CONF / group).glob("*.yaml"))]
        if options:
            return f"{group}={name} does not exist: {suggest(name, options)}"
    if isinstance(error, ConfigCompositionException) and (
        found := re.search(r"Could not (?:override|append[^']*|delete from config\.) '([^']+)'", text)
    ):
        key = found.group(1).lstrip("+~").split("=")[0].split("@")[0]
        groups = [path.name for path in CONF.iterdir() if path.is_dir()]
        if config_name not in ("train", "plan", "doctor") and key.split(".")[0] in groups:
            return f"{key} is fixed by the run, which {config_name} takes it from: leave it out"
        return str(unknown_key(key, [*groups, *_known_keys(config_name)]))
    return text


def _known_keys(config_name: str) -> list[str]:
    values = OmegaConf.to_container(compose(config_name, []), resolve=False)
    assert isinstance(values, dict)
    return list(flat_keys({str(key): value for key, value in values.items()}))


def _fail(line: str, code: int) -> None:
    print(line, file=sys.stderr)
    sys.exit(code)
