"""Run a command: compose its config, check it, run its task. An error ends in one line, and in a non-zero exit code.

A traceback is printed only if asked for. No torch import, so that help and a typo are answered at once.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from qnmixer.commands.hydra_private import flag_parser, hydra_object, run_composed
from qnmixer.errors import ConfigError, Stopped, first_line, say
from qnmixer.files import TYPED_IN, make_free_folder, path_in_errors, private_files
from qnmixer.machine import collect_garbage_rarely, wait_briefly
from qnmixer.runs.processes.output import lasting_output, warnings_in_one_line
from qnmixer.runs.processes.process import rank, world_size
from qnmixer.settings.compose import (
    SWEEP_MODE,
    compose,
    compose_sweep,
    hydra_of,
    is_override,
    is_sweep,
    key_of,
    quoted,
    values_of,
    version_base,
    with_one_limit,
    with_search_path,
)
from qnmixer.settings.error_lines import explain
from qnmixer.settings.help import usage
from qnmixer.settings.options import CONF, OF_A_RUN, options
from qnmixer.settings.project import Project, project_here
from qnmixer.settings.typed_text import with_texts
from qnmixer.settings.validation import NAMED, Section

TRACEBACK = "HYDRA_FULL_ERROR"
_FLAGS_WITH_VALUE = ("--cfg", "--info", "--package", "--help")
Check = Callable[[DictConfig], Any]
Task = Callable[[Any], object]
Complete = Callable[[list[str]], list[str]]
Sweep = Callable[[list[str], DictConfig], AbstractContextManager[str]]


def run(
    task: Task,
    check: Check,
    schema: type[Section],
    sweep: Sweep | None = None,
    complete: Complete = list,
    job: Callable[[DictConfig], object] | None = None,
    find_project: Callable[[], Project] = project_here,
) -> None:
    """Run a command: compose its config, `check` it, then call `task` with what that returns.

    A run is checked before its folder is made. In a sweep `sweep` may check the jobs before; else each checks itself.

    Args:
        check: parses the config. It raises UserError for one that the task would refuse.
        sweep: a context around the jobs of a sweep, from the overrides and the first config to one more override.
        complete: maps the given arguments to those that the command runs with.
        job: the task of each job of a sweep. None: as for one run.
        find_project: gives the options and the experiment that the command line need not name.
    """
    wait_briefly()
    collect_garbage_rarely()
    lasting_output()
    words = sys.argv[1:]
    # Weights are made to be given away. Everything else may show patients.
    files = nullcontext() if schema.command == "export" else private_files()
    with _errors_in_one_line(schema.command, words), warnings_in_one_line(), files:
        # In place, so that a message knows the config folders of the project and of a resumed run too.
        words[:] = completed(words, schema, complete, find_project)
        if not _answer(words, schema.command):
            overrides = [word for word in words if not word.startswith("-")]
            if is_sweep(words):
                job = job or (lambda cfg: task(check(cfg)))
                _run_jobs(job, schema.command, overrides, sweep or _plain_sweep)
            else:
                run_once(task, check, schema.command, overrides)


@contextmanager
def _errors_in_one_line(config_name: str, words: list[str]) -> Iterator[None]:
    """End the process with one line for an error that the user can fix. A bug keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt as stop:
        say(str(stop) or "interrupted", sys.stderr)
        sys.exit(stop.code if isinstance(stop, Stopped) else 130)
    except Exception as error:
        line = None if os.environ.get(TRACEBACK) == "1" else explain(error, config_name, words)
        if line is None:
            raise
        for note in getattr(error, "__notes__", ()):  # for a bug in a rank: its traceback
            say(note, sys.stderr)
        say(f"error: {line}", sys.stderr)
        sys.exit(1)


def _answer(words: list[str], config_name: str) -> bool:
    """Print what a flag asks for. False without such a flag: then the command runs."""
    flags = _further_flags(words)
    if "--version" in flags:
        print(f"qnmixer {version('qnmixer')}")
    elif {*words} & {"--help", "-h", "--help=all"}:
        config = compose(config_name, [*filter(is_override, words)], with_hydra=True)
        print(usage(config, config_name, every_key="--help=all" in words))
    elif flags and is_sweep(words):
        raise ConfigError(f"a sweep takes no other flags: leave out {' '.join(sorted(flags))}")
    elif flags:
        _show(config_name, words)
    return bool(flags)


def run_once(task: Task, check: Check, config_name: str, overrides: list[str]) -> Any:
    """Run a command without a sweep. Returns what the task returns."""
    from qnmixer.runs.terminal import Console

    # A check may load torch, for seconds. Only a terminal shows the word, and only until then.
    with Console(quiet=rank() > 0).status("reading the settings …"):
        composed = compose(config_name, overrides, with_hydra=True)
        config = check(OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]))
    if folder := _free_folder(composed, "run", overrides):
        OmegaConf.set_readonly(composed.hydra, False)  # HydraConfig, asked for the name of the folder, has locked it
        composed.hydra.run.dir = folder
        composed.hydra.overrides.hydra.append(f"hydra.run.dir={quoted(folder)}")
    failures: list[Exception] = []
    with hydra_of(config_name):
        job = _storing_errors(lambda _: task(config), failures)
        job_return = run_composed(composed, config_name, job)
    if failures:
        raise failures[0]
    return job_return.return_value


def _run_jobs(job: Task, config_name: str, overrides: list[str], sweep: Sweep) -> None:
    """Run the jobs of a sweep. Raises the error of the first that failed, after the last."""
    failures: list[Exception] = []
    first_config = compose_sweep(config_name, overrides)
    with sweep(overrides, first_config) as one_more, hydra_of(config_name):
        words = [*dict.fromkeys([*overrides, SWEEP_MODE, one_more])]
        hydra_object().multirun(config_name, _storing_errors(job, failures), words, with_log_configuration=False)
    if failures:
        raise failures[0]


def _storing_errors(job: Callable[[DictConfig], object], failures: list[Exception]) -> Callable[[DictConfig], object]:
    """Store the errors of jobs. Hydra would print its own lines, and end a sweep at the first failure."""

    def storing(cfg: DictConfig) -> object:
        of_hydra = HydraConfig.get()
        if of_hydra.job.chdir:
            os.environ[TYPED_IN] = of_hydra.runtime.cwd
        try:
            with path_in_errors(of_hydra.runtime.output_dir):
                return job(cfg)
        except Exception as error:
            failures.append(error)
            return None
        finally:
            os.environ.pop(TYPED_IN, None)

    return storing


def _show(config_name: str, words: list[str]) -> None:
    """Let Hydra do what its flags ask for, such as --cfg job. Raises ConfigError for flags that do not fit."""
    parser = flag_parser()
    parser.exit_on_error = parser.allow_abbrev = False  # it would print several lines; --multi would run
    value_before = os.environ.get(TRACEBACK)
    os.environ[TRACEBACK] = "1"  # else Hydra prints exceptions and exits
    try:
        given, further = parser.parse_known_args(words)
        shows = given.cfg or given.info or given.hydra_help or given.shell_completion
        if given.config_name or given.config_path or given.experimental_rerun:
            raise ConfigError(
                f"{_flags_of(words)} of Hydra would leave out {config_name}.yaml: choose a file of your own with "
                "--config-dir FOLDER experiment=NAME, and repeat a run with its overrides"
            )
        if further or not shows:
            asked = " ".join(further) or _flags_of(words)
            raise ConfigError(f"{asked} is not known: write KEY=VALUE, or a flag that --hydra-help lists, as --cfg job")
        if not given.shell_completion:
            compose(config_name, [*filter(is_override, words)])  # for its line about what is wrong
        sys.argv[1:] = words
        hydra.main(config_path=str(CONF), config_name=config_name, **version_base())(lambda cfg: None)()
    except (argparse.ArgumentError, KeyError, RuntimeError, TypeError, ValueError, YAMLError) as error:
        raise ConfigError(f"{_flags_of(words)} does not work ({first_line(error)})") from error
    finally:
        os.environ.pop(TRACEBACK) if value_before is None else os.environ.update({TRACEBACK: value_before})


def _flags_of(words: list[str]) -> str:
    """The flags of a command line with their values, for messages."""
    return " ".join(word for word in words if not is_override(word))


def completed(
    arguments: list[str],
    schema: type[Section],
    complete: Complete = list,
    find_project: Callable[[], Project] = project_here,
) -> list[str]:
    """The arguments for Hydra, from those that the user gave. The others, and the errors, are as in `run`."""
    arguments = _in_hydras_form(arguments)
    flags = _further_flags(arguments)
    if not flags:
        check_ignored(arguments, schema.command)
    project = find_project()
    arguments = with_search_path(project.with_experiment(arguments, schema.command), project.conf)
    if schema.command in OF_A_RUN:
        arguments = with_one_limit(arguments)
    arguments = with_search_path(complete(arguments), project.conf)  # again: a resumed run may bring its own
    arguments = with_texts(arguments, schema)
    if world_size() > 1 and not flags:
        arguments = _of_rank(arguments, schema.command)
    # Hydra wants these flags first, and takes no override after another flag.
    return sorted(arguments, key=lambda word: (not is_sweep([word]), not is_override(word)))


def check_ignored(words: list[str], command: str) -> None:
    """Raise ConfigError for a word that Hydra would take, and then ignore, merge or leave to another command."""
    loggers = values_of(filter(is_override, words)).get("logger")
    for word in filter(is_override, words):
        key, value = key_of(word), word.partition("=")[2]
        if not is_sweep(words) and re.match(r"hydra[./](launcher|sweeper|sweep)\b", key):
            raise ConfigError(f"{word} is for a sweep: add -m, or leave {word} out")
        if is_sweep(words) and key == "hydra.run.dir":
            raise ConfigError(f"{word} is for one run: write hydra.sweep.dir={value}")
        if value in options(key, "evaluate") and value not in (names := options(key, command)):
            raise ConfigError(f"{word} is for evaluate, not for {command}: choose {', '.join(names)}")
        one = key not in (*NAMED, "experiment") and (value == "null" or re.match(r"\[.*,", value))
        if one and (names := options(key, command)):
            raise ConfigError(f"{word}: {key} takes one option: {', '.join(names)}")
        logger = key.removeprefix("logger.").partition(".")[0]
        if loggers and logger not in loggers and logger in options("logger"):
            raise ConfigError(f"{word}: logger={loggers} does not have it")


def _plain_sweep(overrides: list[str], config: DictConfig) -> AbstractContextManager[str]:
    """The sweep of a command that returns no score. Raises ConfigError for a search, which needs one."""
    if "n_trials" in config.hydra.sweeper:
        raise ConfigError("a search needs the score of a training: leave out hydra/sweeper=, or search with train")
    folder = _free_folder(config, "sweep", overrides)
    return nullcontext(f"hydra.sweep.dir={quoted(folder)}" if folder else SWEEP_MODE)


def _free_folder(config: DictConfig, kind: str, overrides: list[str]) -> str | None:
    """Make the folder that the time names. If another command has it, as of the same second, the next free one.

    None if the user has chosen the folder, or if the command has none.
    """
    named = dict(config.hydra[kind].items_ex(resolve=False))["dir"]
    if "${now" not in str(named) or f"hydra.{kind}.dir" in map(key_of, overrides):
        return None
    HydraConfig.instance().set_config(config)  # for ${hydra:…}
    return str(make_free_folder(Path(config.hydra[kind].dir)))


def _further_flags(arguments: list[str]) -> set[str]:
    """The flags that ask for something else than to run or to sweep."""
    flags = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    return flags - {"-m", "--multirun", "--run", "-r"}


def _in_hydras_form(arguments: list[str]) -> list[str]:
    """Arguments as Hydra takes them.

    `wandb agent` passes --KEY=VALUE, and None instead of null, as people do too. ~ is the user's home: Hydra would make
    a folder `~`.
    """
    words = []
    for argument in arguments:
        key, equal, value = argument.partition("=")
        if equal and key not in _FLAGS_WITH_VALUE and re.fullmatch(r"--[a-z][\w./@]*", key):
            key = key.removeprefix("--")
        if key_of(key) in ("hydra.run.dir", "hydra.sweep.dir"):
            value = re.sub(r"""^(["']?)~(?=/)""", lambda match: match[1] + os.path.expanduser("~"), value)
        words.append(f"{key}=null" if value == "None" else f"{key}{equal}{value}")
    return words


def _of_rank(overrides: list[str], command: str) -> list[str]:
    """The overrides for Hydra in one of several processes. Raises ConfigError if each would do the same."""
    if command not in OF_A_RUN:
        raise ConfigError(f"{command} works in one process: start it without torchrun or srun")
    if command != "train":
        return overrides
    if is_sweep(overrides):
        raise ConfigError("a sweep starts the processes of each job itself: run it without torchrun or srun")
    if "hydra.run.dir" not in map(key_of, overrides):
        raise ConfigError(
            f"{world_size()} processes would make a run folder each: give them one, as hydra.run.dir=FOLDER"
        )
    # Without this every rank would write .hydra/ into the same folder.
    return overrides if rank() == 0 else [*overrides, "hydra.output_subdir=null"]
