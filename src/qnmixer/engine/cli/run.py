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

from qnmixer.engine.cli.explain import explain, known_keys, warnings_in_one_line
from qnmixer.engine.cli.help import usage
from qnmixer.engine.config.compose import OF_A_RUN, compose_as_given, compose_sweep, fitted
from qnmixer.engine.config.keys import habit, unknown_key
from qnmixer.engine.config.overrides import depth_of, is_override, with_home, with_length
from qnmixer.engine.config.search_path import CONF, with_search_path
from qnmixer.engine.processes.cores import wait_briefly
from qnmixer.engine.processes.output import lasting_output
from qnmixer.engine.processes.ranks import is_rank, rank, world_size
from qnmixer.errors import ConfigError, Stopped
from qnmixer.files import naming, private_files

TRACEBACK = "HYDRA_FULL_ERROR"
_SWEEP = {"-m", "--multirun"}
_SWEEP_MODE = "hydra.mode=MULTIRUN"
_DEEPEST = 50
"""Brackets of a value inside each other. Python gives up where Hydra and OmegaConf read about 100 of them."""


def run(
    task: Callable[[DictConfig], object],
    check: Callable[[DictConfig], object],
    config_name: str,
    sweep: Callable[[list[str], DictConfig], AbstractContextManager[str]] | None = None,
    complete: Callable[[list[str]], list[str]] = list,
) -> None:
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
        _fail(str(stop) or "interrupted", stop.code if isinstance(stop, Stopped) else 130)
    except Exception as error:
        if asked_for_traceback:
            raise
        line = explain(error, config_name)
        if line is None:
            raise
        for note in getattr(error, "__notes__", ()):  # for a bug in a rank: its traceback
            print(note, file=sys.stderr)
        _fail(f"error: {line}", 1)


def _run(
    task: Callable[[DictConfig], object],
    check: Callable[[DictConfig], object],
    config_name: str,
    sweep: Callable[[list[str], DictConfig], AbstractContextManager[str]],
    complete: Callable[[list[str]], list[str]],
) -> None:
    if "--version" in sys.argv[1:]:
        print(f"qnmixer {version('qnmixer')}")
        return
    sys.argv[1:] = completed(sys.argv[1:], config_name, complete)
    is_sweep = _is_sweep(sys.argv[1:])
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    flags = {argument for argument in sys.argv[1:] if argument.startswith("-")}
    if flags & {"--help", "-h"}:
        print(usage(compose_as_given(config_name, overrides, with_hydra=True), CONF, config_name))
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


def completed(arguments: list[str], config_name: str, complete: Callable[[list[str]], list[str]] = list) -> list[str]:
    """The arguments for Hydra, from those that the user gave. `complete` and the errors are as in `run`."""
    arguments = with_home(accepted(arguments))
    if deep := next((it for it in arguments if depth_of(it) > _DEEPEST), None):
        raise ConfigError(f"{deep} has more than {_DEEPEST} brackets inside each other: give a simpler value")
    if config_name in OF_A_RUN and (way := habit(arguments)):
        raise ConfigError(way)
    arguments = with_search_path(arguments)
    if config_name in OF_A_RUN:
        arguments = with_length(arguments)
        if not _is_sweep(arguments):  # in a sweep the launcher does this for each job
            arguments = fitted(config_name, arguments)
    arguments = with_search_path(complete(arguments))  # again: a resumed run may bring its own
    if is_rank():
        arguments = _overrides_of_rank(arguments)
    # Hydra wants these flags first, and takes no override after another flag.
    arguments = sorted(arguments, key=lambda word: (word not in _SWEEP, not is_override(word)))
    _check_flags(arguments, config_name)
    return arguments


def _is_sweep(arguments: list[str]) -> bool:
    return not _SWEEP.isdisjoint(arguments) or _SWEEP_MODE in arguments


def accepted(arguments: list[str]) -> list[str]:
    """Arguments in Hydra's form. `wandb agent` passes --KEY=VALUE, and None instead of null."""
    flags = get_args_parser()._option_string_actions
    by_agent = "WANDB_SWEEP_ID" in os.environ
    found = []
    for argument in arguments:
        key, equal, value = argument.partition("=")
        if equal and key not in flags and re.fullmatch(r"--[a-z][\w./@]*", key):
            key = key.removeprefix("--")
        found.append(f"{key}=null" if by_agent and value == "None" else f"{key}{equal}{value}")
    return found


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
        known = [*known_keys(config_name)]
        hint = f"write {word.lstrip('-')}{'' if equal else '=…'}" if key in known else str(unknown_key(key, known))
        raise ConfigError(f"{word} is not an option: {hint}")


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


def _storing_errors(task: Callable[[DictConfig], object], failures: list[Exception]) -> Callable[[DictConfig], object]:
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


def _fail(line: str, code: int) -> None:
    print(line, file=sys.stderr)
    sys.exit(code)
