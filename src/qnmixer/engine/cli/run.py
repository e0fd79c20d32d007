"""Start every command. An error ends in one line and a non-zero exit code; a traceback is printed only if asked for."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from qnmixer.engine.cli.explain import explain, warnings_in_one_line
from qnmixer.engine.cli.help import usage
from qnmixer.engine.config.compose import (
    CONF,
    OF_A_RUN,
    compose_as_given,
    compose_sweep,
    fitted,
    is_override,
    with_length,
    with_search_path,
)
from qnmixer.engine.processes.cores import wait_briefly
from qnmixer.engine.processes.output import lasting_output
from qnmixer.engine.processes.ranks import is_rank, rank, world_size
from qnmixer.errors import ConfigError, Stopped
from qnmixer.files import naming, private_files

TRACEBACK = "HYDRA_FULL_ERROR"
_SWEEP = {"-m", "--multirun"}
_SWEEP_MODE = "hydra.mode=MULTIRUN"
Task = Callable[[DictConfig], object]
Complete = Callable[[list[str]], list[str]]
Sweep = Callable[[list[str], DictConfig], AbstractContextManager[str]]


def run(task: Task, check: Task, config_name: str, sweep: Sweep | None = None, complete: Complete = list) -> None:
    """Run a command: compose its config, `check` it before any folder is made, then call `task`.

    Args:
        task: the command.
        check: raises UserError for a config that the task would refuse.
        config_name: the command's file in `conf/`.
        sweep: a context around the jobs of a sweep (`-m`). It gets the overrides and the first config, and yields one
            more override. None: nothing surrounds the jobs.
        complete: maps the given arguments to those that the command runs with.
    """
    wait_briefly()
    lasting_output()
    asked_for_traceback = os.environ.get(TRACEBACK) == "1"
    try:
        # Weights are made to be given away. Everything else may show patients.
        files = nullcontext() if config_name == "export" else private_files()
        with _raising_exceptions(), warnings_in_one_line(), files:
            _run(task, check, config_name, sweep or (lambda *_: nullcontext(_SWEEP_MODE)), complete)
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted", file=sys.stderr)
        sys.exit(stop.code if isinstance(stop, Stopped) else 130)
    except Exception as error:
        line = None if asked_for_traceback else explain(error, config_name)
        if line is None:
            raise
        for note in getattr(error, "__notes__", ()):  # for a bug in a rank: its traceback
            print(note, file=sys.stderr)
        print(f"error: {line}", file=sys.stderr)
        sys.exit(1)


def _run(task: Task, check: Task, config_name: str, sweep: Sweep, complete: Complete) -> None:
    if "--version" in sys.argv[1:]:
        print(f"qnmixer {version('qnmixer')}")
        return
    sys.argv[1:] = completed(sys.argv[1:], config_name, complete)
    is_sweep = _is_sweep(sys.argv[1:])
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    flags = {argument for argument in sys.argv[1:] if argument.startswith("-")}
    if flags & {"--help", "-h"}:
        print(usage(compose_as_given(config_name, overrides, with_hydra=True), config_name))
        return
    failures: list[Exception] = []
    decorate = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)
    command = decorate(_storing_errors(task, failures))
    if is_sweep:
        if further := sorted(flags - _SWEEP):
            raise ConfigError(f"a sweep takes no other flags: leave out {' '.join(further)}")
        with sweep(overrides, compose_sweep(config_name, overrides)) as one_more:
            sys.argv.append(one_more)
            command()
    else:
        # Checked before Hydra runs the task, because Hydra makes the run folder first.
        if not flags:
            check(compose_as_given(config_name, overrides))
        command()
    if failures:
        raise failures[0]


def completed(arguments: list[str], config_name: str, complete: Complete = list) -> list[str]:
    """The arguments for Hydra, from those that the user gave. `complete` and the errors are as in `run`."""
    arguments = with_search_path(_in_hydras_form(arguments))
    if config_name in OF_A_RUN:
        arguments = with_length(arguments)
        if not _is_sweep(arguments):  # in a sweep the launcher does this for each job
            arguments = fitted(config_name, arguments)
    arguments = with_search_path(complete(arguments))  # again: a resumed run may bring its own
    if is_rank():
        arguments = _overrides_of_rank(arguments)
    # Hydra wants these flags first, and takes no override after another flag.
    arguments = sorted(arguments, key=lambda word: (word not in _SWEEP, not is_override(word)))
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        _, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}: --hydra-help lists these flags") from error
    if unknown:
        raise ConfigError(f"{unknown[0]} is not an option: write {unknown[0].lstrip('-')}=…")
    return arguments


def _is_sweep(arguments: list[str]) -> bool:
    return not _SWEEP.isdisjoint(arguments) or _SWEEP_MODE in arguments


def _in_hydras_form(arguments: list[str]) -> list[str]:
    """Arguments as Hydra takes them.

    `wandb agent` passes --KEY=VALUE, and None instead of null. ~ is the user's home: Hydra would make a folder `~`.
    """
    flags, by_agent = get_args_parser()._option_string_actions, "WANDB_SWEEP_ID" in os.environ
    found = []
    for argument in arguments:
        key, equal, value = argument.partition("=")
        if equal and key not in flags and re.fullmatch(r"--[a-z][\w./@]*", key):
            key = key.removeprefix("--")
        if key in ("hydra.run.dir", "hydra.sweep.dir"):
            value = re.sub(r"""^(["']?)~(?=/)""", lambda it: it[1] + os.path.expanduser("~"), value)
        found.append(f"{key}=null" if by_agent and value == "None" else f"{key}{equal}{value}")
    return found


@contextmanager
def _raising_exceptions() -> Iterator[None]:
    """Make Hydra raise exceptions while the block runs, by Hydra's own variable. Else Hydra prints them and exits."""
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
    """The overrides for Hydra in one of several processes. Raises ConfigError if each would make its own folder."""
    if _SWEEP & {*overrides}:
        raise ConfigError("a sweep starts the processes of each job itself: run it without torchrun or srun")
    if not any(override.startswith("hydra.run.dir=") for override in overrides):
        raise ConfigError(
            f"this is process {rank()} of {world_size()}, and each would make its own run folder: "
            "give all of them the same hydra.run.dir=FOLDER"
        )
    # Without this every rank would write .hydra/ into the same folder.
    return overrides if rank() == 0 else [*overrides, "hydra.output_subdir=null"]


def _storing_errors(task: Task, failures: list[Exception]) -> Task:
    """Store the errors of jobs for `run`. Hydra would print its own lines, and end a sweep at the first failure."""

    def job(cfg: DictConfig) -> object:
        try:
            with naming(HydraConfig.get().runtime.output_dir):
                return task(cfg)
        except Exception as error:
            failures.append(error)
            return None

    # Hydra takes the name of the job, and so of folders, from this module.
    job.__module__ = task.__module__
    return job
