"""Start every command. An error ends in one line: what is wrong, and how to fix it; and in a non-zero exit code.

A traceback is printed only if asked for. `--help` shows every group with what each option trades, and every key with
its meaning, from conf/; Hydra's own help lists names only, and takes twice as long. No torch import.
"""

import argparse
import errno
import glob
import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qnmixer.engine.config.checking import answer, as_typed
from qnmixer.engine.config.compose import (
    OF_A_RUN,
    compose,
    compose_sweep,
    fault_of_file,
    folders_in,
    is_override,
    key_of,
    names_folder,
    with_one_limit,
    with_search_path,
    without_null,
)
from qnmixer.engine.config.files import CONF, TARGET, files_of, option_of
from qnmixer.engine.config.project import in_project
from qnmixer.engine.config.texts import with_texts
from qnmixer.engine.config.words import check_flags, check_groups, explain_key, explain_word
from qnmixer.engine.processes.process import is_rank, rank, world_size
from qnmixer.errors import ConfigError, Stopped, UserError, first_line, in_a_line, say, suggest, visible
from qnmixer.files import path_in_errors, private_files
from qnmixer.machine import wait_briefly

# Commands

TRACEBACK = "HYDRA_FULL_ERROR"
_SWEEP_FLAGS = {"-m", "--multirun"}
_RUN_FLAGS = {"-r", "--run"}
_SHOW_FLAGS = {"-c", "--cfg", "-i", "--info", "-sc", "--shell-completion", "--hydra-help"}
_SWEEP_MODE = "hydra.mode=MULTIRUN"
Check = Callable[[DictConfig], Any]
Task = Callable[[Any], object]
Complete = Callable[[list[str]], list[str]]
Sweep = Callable[[list[str], DictConfig], AbstractContextManager[str]]


def run(
    task: Task,
    check: Check,
    config_name: str,
    sweep: Sweep | None = None,
    complete: Complete = list,
    job: Callable[[DictConfig], object] | None = None,
) -> None:
    """Run a command: compose its config, `check` it before any folder is made, then call `task` with what it returns.

    Args:
        task: the command.
        check: parses the config. It raises UserError for one that the task would refuse.
        config_name: the command's file in `conf/`.
        sweep: a context around the jobs of a sweep (`-m`). It gets the overrides and the first config, and yields one
            more override. None: nothing surrounds the jobs.
        complete: maps the given arguments to those that the command runs with.
        job: the task of each job of a sweep. None: as for one run.
    """
    wait_briefly()
    lasting_output()
    words = sys.argv[1:]
    try:
        # Weights are made to be given away. Everything else may show patients.
        files = nullcontext() if config_name == "export" else private_files()
        with warnings_in_one_line(), files:
            if "--version" in words:
                print(f"qnmixer {version('qnmixer')}")
                return
            words = completed(in_project(words, config_name), config_name, complete)
            overrides = [word for word in words if not word.startswith("-")]
            flags = {word.partition("=")[0] for word in words if word.startswith("-")} - _RUN_FLAGS
            if flags & {"--help", "-h"}:
                print(usage(compose(config_name, overrides, with_hydra=True), config_name))
            elif _is_sweep(words):
                if further := sorted(flags - _SWEEP_FLAGS):
                    raise ConfigError(f"a sweep takes no other flags: leave out {' '.join(further)}")
                _run_jobs(job or (lambda cfg: task(check(cfg))), config_name, overrides, sweep or _plain_sweep)
            elif flags & _SHOW_FLAGS:
                if flags & {"--cfg", "-c"}:
                    compose(config_name, [*filter(is_override, words)])  # for its line about what is wrong
                _show(config_name, words)
            elif flags:
                raise ConfigError(f"{min(flags)} has no use here: leave it out (--config-dir FOLDER adds your options)")
            else:
                run_once(task, check, config_name, overrides)
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


def run_once(task: Task, check: Check, config_name: str, overrides: list[str]) -> Any:
    """Run a command without a sweep. Returns what the task returns."""
    from qnmixer.engine.reports.terminal import Console

    # A check may load torch, for seconds. Only a terminal shows the word, and only until then.
    with Console(quiet=rank() > 0).status("reading the settings …"):
        config = check(compose(config_name, overrides))  # before Hydra makes the run folder
    failures: list[Exception] = []
    with _hydra(config_name) as app:
        job = _storing_errors(lambda _: task(config), failures)
        job_return: JobReturn = app.run(config_name, job, overrides, with_log_configuration=False)
    if failures:
        raise failures[0]
    return job_return.return_value


def _run_jobs(job: Task, config_name: str, overrides: list[str], sweep: Sweep) -> None:
    """Run the jobs of a sweep. Raises the error of the first that failed, after the last."""
    failures: list[Exception] = []
    first_config = compose_sweep(config_name, overrides)
    with sweep(overrides, first_config) as one_more, _hydra(config_name) as app:
        words = dict.fromkeys([*overrides, _SWEEP_MODE, one_more])
        app.multirun(config_name, _storing_errors(job, failures), [*words], with_log_configuration=False)
    if failures:
        raise failures[0]


def _storing_errors(job: Callable[[DictConfig], object], failures: list[Exception]) -> Callable[[DictConfig], object]:
    """Store the errors of jobs. Hydra would print its own lines, and end a sweep at the first failure."""

    def storing(cfg: DictConfig) -> object:
        try:
            with path_in_errors(HydraConfig.get().runtime.output_dir):
                return job(cfg)
        except Exception as error:
            failures.append(error)
            return None

    return storing


@contextmanager
def _hydra(config_name: str) -> Iterator[Any]:
    """Hydra with conf/. It names jobs, and so folders, after the command."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3", job_name=config_name):
        yield GlobalHydra.instance().hydra


def _show(config_name: str, words: list[str]) -> None:
    """Let Hydra do what its flags ask for, such as --cfg job."""
    sys.argv[1:] = words
    value_before = os.environ.get(TRACEBACK)
    os.environ[TRACEBACK] = "1"  # else Hydra prints exceptions and exits
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(lambda cfg: None)()
    finally:
        os.environ.pop(TRACEBACK) if value_before is None else os.environ.update({TRACEBACK: value_before})


def completed(arguments: list[str], config_name: str, complete: Complete = list) -> list[str]:
    """The arguments for Hydra, from those that the user gave. `complete` and the errors are as in `run`."""
    arguments = _in_hydras_form(arguments)
    actions = get_args_parser()._option_string_actions
    check_flags(arguments, {flag: action.nargs != 0 for flag, action in actions.items()}, config_name)
    check_groups([*filter(is_override, arguments)])
    arguments = with_search_path(arguments)
    if config_name in OF_A_RUN and not _is_sweep(arguments):  # in a sweep the launcher does this for each job
        arguments = with_one_limit(arguments)
    arguments = with_search_path(complete(arguments))  # again: a resumed run may bring its own
    arguments = with_texts(without_null(arguments), config_name)
    if is_rank():
        arguments = _overrides_of_rank(arguments)
    # Hydra wants these flags first, and takes no override after another flag.
    arguments = sorted(arguments, key=lambda word: (word not in _SWEEP_FLAGS, not is_override(word)))
    parser = get_args_parser()
    parser.exit_on_error = parser.allow_abbrev = False  # an ambiguous abbreviation would print lines, and exit
    try:
        flags, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}: --hydra-help lists these flags") from error
    _check_flags(flags)
    return arguments


def _check_flags(flags: argparse.Namespace) -> None:
    """Raise ConfigError for flags of Hydra that Hydra itself answers with a traceback."""
    flag_values = {
        "--run": flags.run,
        "--cfg": flags.cfg,
        "--info": flags.info,
        "--shell-completion": flags.shell_completion,
    }
    if len(together := [flag for flag, value in flag_values.items() if value]) > 1:
        raise ConfigError(f"{' and '.join(together)} do not go together: give one of them")
    if flags.resolve and not (flags.cfg or flags.help):
        raise ConfigError("--resolve works with --cfg only: add --cfg job")
    if flags.shell_completion:
        asked = [word for word in flags.overrides if re.fullmatch(r"(un)?install=\w+|query=\w+", word)]
        if len(asked) != 1 or asked[0].partition("=")[2] not in ("bash", "fish", "zsh"):
            raise ConfigError('--shell-completion needs one of install=bash, fish or zsh: eval "$(… -sc install=bash)"')
        if asked[0].startswith("query=") and "COMP_LINE" not in os.environ:
            raise ConfigError(f'{asked[0]} is asked by the shell only: type eval "$(… -sc install=bash)" once')


def _plain_sweep(_: list[str], config: DictConfig) -> AbstractContextManager[str]:
    """The sweep of a command that returns no score. Raises ConfigError for a search, which needs one."""
    if "n_trials" in config.hydra.sweeper:
        raise ConfigError("a search needs the score of a training: leave out hydra/sweeper=, or search with train")
    return nullcontext(_SWEEP_MODE)


def _is_sweep(arguments: list[str]) -> bool:
    return not _SWEEP_FLAGS.isdisjoint(arguments) or _SWEEP_MODE in arguments


def _in_hydras_form(arguments: list[str]) -> list[str]:
    """Arguments as Hydra takes them.

    `wandb agent` passes --KEY=VALUE, and None instead of null. ~ is the user's home: Hydra would make a folder `~`.
    """
    flags, by_agent = get_args_parser()._option_string_actions, "WANDB_SWEEP_ID" in os.environ
    words = []
    for argument in arguments:
        key, equal, value = argument.partition("=")
        if equal and key not in flags and re.fullmatch(r"--[a-z][\w./@]*", key):
            key = key.removeprefix("--")
        if key in ("hydra.run.dir", "hydra.sweep.dir"):
            value = re.sub(r"""^(["']?)~(?=/)""", lambda match: match[1] + os.path.expanduser("~"), value)
        words.append(f"{key}=null" if by_agent and value == "None" else f"{key}{equal}{value}")
    return words


def _overrides_of_rank(overrides: list[str]) -> list[str]:
    """The overrides for Hydra in one of several processes. Raises ConfigError if each would make its own folder."""
    if _SWEEP_FLAGS & {*overrides}:
        raise ConfigError("a sweep starts the processes of each job itself: run it without torchrun or srun")
    if not any(override.startswith("hydra.run.dir=") for override in overrides):
        raise ConfigError(
            f"this is process {rank()} of {world_size()}, and each would make its own run folder: "
            "give all of them the same hydra.run.dir=FOLDER"
        )
    # Without this every rank would write .hydra/ into the same folder.
    return overrides if rank() == 0 else [*overrides, "hydra.output_subdir=null"]


# Errors in one line

_EXTRA_OF = {"optuna": "search", "submitit": "slurm", "ray": "ray"}
"""What to install for a plugin of Hydra."""


def explain(error: BaseException, config_name: str, words: list[str] | None = None) -> str | None:
    """The line for an error that a user can fix; None for a bug. `words`: of the command line."""
    line = _explain(error, config_name, words or [])
    return None if line is None else in_a_line(line)


def _explain(error: BaseException, config_name: str, words: list[str]) -> str | None:
    if isinstance(error, UserError):
        return _explain_untyped(str(error), words)
    if fault := fault_of_file(error):  # as --info shows a config that nothing has composed before
        return fault
    if isinstance(error, OSError | RuntimeError) and (line := _explain_system(error)):
        return line
    if type(error).__name__ == "OutOfMemoryError":  # torch's class, compared by name: importing torch takes seconds
        smaller = "lower data.batch_size, model.n_iterations or model.channels, or set trainer.precision=16-mixed"
        return f"out of memory ({first_line(error)}): {smaller if config_name in OF_A_RUN else 'set accelerator=cpu'}"
    if isinstance(error, FloatingPointError):
        return f"{error}: lower optimizer.lr, or look at train/grad_norm in metrics.csv"
    if type(error).__module__.startswith("sqlalchemy."):  # of Optuna, which keeps its trials in a database
        return f"hydra.sweeper.storage is no database ({first_line(error)}): give one, as sqlite:///search.db"
    if type(error).__module__.startswith("wandb."):
        login = "run `wandb login` once, or " * bool(re.search(r"(?i)api.?key|log.?in|40[13]|permission", str(error)))
        return f"W&B: {first_line(error)}: {login}leave logger.wandb.mode=offline"
    if type(error).__name__ == "MisconfigurationException":  # of Lightning, for callbacks that do not fit the run
        line = first_line(error)
        if "manual optimization" in line and (argument := re.search(r"Trainer\((\w+)=", line)):
            off = {"gradient_clip_val": "null", "accumulate_grad_batches": "1"}.get(argument[1], "null")
            return f"this module optimizes by itself (automatic_optimization=False): set trainer.{argument[1]}={off}"
        return f"Lightning refuses this run: {line}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("qnmixer.extras"):
        return "this copy has no qnmixer.extras, which this command needs: take that folder from the whole qnmixer"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("qnmixer"):
        return f"{first_line(error).rstrip('.: ')}: install it, or do not use the option that needs it"
    if isinstance(error, RuntimeError) and 'Could not detect "srun"' in str(error):  # from submitit
        return "hydra/launcher=slurm needs SLURM, but this machine has no srun: use it on a cluster, or leave it out"
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):  # from Hydra
        return "a group has no option of that name: give it the name of one, as in data=dicom"
    if isinstance(error, OverrideParseException):
        return explain_word(str(error.override), config_name, words)
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _explain_composition(error, config_name, words)
    return None


def _explain_system(error: OSError | RuntimeError) -> str | None:
    """The line for an error of the system: of disks, open files, and the memory that data workers share."""
    text = f"{error} {error.__cause__ or ''}"  # torch names the worker's exit code in the cause only
    if re.search(r"\[Errno 24\]|Too many open files|ancdata|DataLoader worker .* exit code 24\b", text):
        return "too many open files: raise the limit of this shell (ulimit -n 4096), or lower data.num_workers"
    if re.search(r"</torch_\d|out of shared memory|Bus error", text):
        return (
            "the shared memory of the data workers (/dev/shm) is full: give the container more "
            "(docker run --shm-size=8g), or set data.num_workers=0"
        )
    if match := re.search(r"DataLoader worker \(pid.*\) (is killed by .*?|exited unexpectedly)(\.|$| with)", text):
        return f"a data worker {match[1]}: lower data.num_workers, or set it to 0 to see why"
    if isinstance(error, RuntimeError):
        return None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fault = f"the disk is full writing {error.filename or 'a file'}"
    elif error.filename:
        fault = f"{error.filename} cannot be used ({error.strerror or first_line(error)})"
    elif "DataLoader worker" in text:  # torch keeps its text only
        fault = str(UserError(error))
    else:
        return None
    if error.errno == errno.ENOENT or "[Errno 2]" in text:
        return (
            f"{fault}: if it was removed meanwhile start again, else choose another place (hydra.run.dir=…, output=…)"
        )
    return f"{fault}: choose another place (hydra.run.dir=…, output=…)"


def _explain_untyped(line: str, words: list[str]) -> str:
    """The line for a key that another option has, if a file set it and not the command line."""
    key, stands, owning = line.partition(" works with ")
    typed = {key_of(word): word.partition("=")[2] for word in words}
    if not stands or key in typed or not typed:
        return line
    group = key.partition(".")[0]
    if target := typed.get(f"{group}.{TARGET}"):
        option = option_of(group, target)
        choice = f"{group}=custom {group}.{TARGET}={target}" if option == target else f"{group}={option}"
        return f"{key} belongs to the option of {group} before {group}.{TARGET}={target}: write {choice}"
    return f"{key}, which a config file sets, works with {owning.partition(' only')[0]} only: ~{key} leaves it out"


def _explain_composition(error: Exception, config_name: str, words: list[str]) -> str:
    """The line for what Hydra cannot compose; Hydra's own text if no user meets it often."""
    text = " ".join(str(error).split())
    if match := re.search(r"Could not load '(hydra/\w+)/(optuna|submitit|ray)", text):
        return f'this {match[1]} is a plugin that is not installed here: pip install -e ".[{_EXTRA_OF[match[2]]}]"'
    if isinstance(error, MissingConfigException) and (
        match := re.search(r"Could not (?:find|load) '(\w+(?:/\w+)?)/([^']*)'", text)  # "In 'experiment/mine': Could …"
    ):
        group, name = match.groups()
        left_out = "as_trained" if config_name in OF_A_RUN else ""
        files = [path for folder in (CONF, *folders_in(words)) for path in sorted((folder / group).glob("[!_]*.yaml"))]
        if option_names := sorted({path.stem for path in files} - {left_out}):
            does_not_exist = f"{group}={name} does not exist: {suggest(name, option_names, limit=99)}"
            return answer(f"{group}={name}") or f"{does_not_exist}{_own_option(group, name, words)}"
    if match := re.search(r"Could not delete '(\S+)=|The value of '(\S+)' is .* and not", text):
        key = match[1] or match[2]
        return f"~{key}=… names another value than that of the config: write ~{key}"
    if match := re.search(r"force-add of config groups is not supported: '\+\+(\S+)'", text):
        return f"++{match[1]} is for keys, not for groups: write {match[1]}"
    if match := re.search(r"Multiple values for (\S+)\. To|An item is already at '([^']+)'", text):
        key = match[1] or match[2]
        return f"{key} exists already: leave out the + before it, as in {key}=…"
    if match := re.search(r"Could not [a-z. ]+ '([^']+)'", text):
        return explain_key(key_of(match[1]).split("@")[0], config_name, words)
    text, why = text or "an option cannot be read", first_line(error.__cause__ or "")
    return text if why in text else f"{text} ({why})"


def _own_option(group: str, name: str, words: Collection[str]) -> str:
    """What to add for an option of the user's own, whose folder was not given."""
    if names_folder(words):
        return ""
    file = f"{group}/{glob.escape(name)}.yaml"
    folders = sorted(path.parents[1] for level in ("*", "*/*") for path in Path().glob(f"{level}/{file}"))
    if not folders and group != "experiment":
        return ""
    place = shlex.quote(str(folders[0])) if folders else f"FOLDER, for FOLDER/{group}/{name}.yaml"
    return f"; or add --config-dir {place}"


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print warnings as `warning: …` while the block runs. Python adds the file, and a line of code."""
    as_python_does = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {visible(str(message))}\n"
    try:
        yield
    finally:
        warnings.formatwarning = as_python_does


# --help

_HIDDEN_OPTIONS = ("_", "as_trained")  # parts of other files; an option of evaluate only, which is its default
_SENTENCE_END = re.compile(r"\.(?:\s+[A-Z]|$)")
_COMMENTED = re.compile(r"^ *(\w+):.*?\s# (.*)$", re.MULTILINE)


def usage(cfg: DictConfig, config_name: str) -> str:
    """Help for a command from its composed config, Hydra's own part included."""
    choices = {group: str(option) for group, option in cfg.hydra.runtime.choices.items() if "/" not in group}
    values = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(values, dict)
    comments = _comments([CONF / "train.yaml", CONF / f"{config_name}.yaml"])
    lines = [
        cfg.hydra.help.header.strip(),
        "",
        "Every setting is KEY=VALUE or GROUP=OPTION, in any order; a later one overrides an earlier one.",
        "",
        "GROUPS (* is the current choice)",
        *_group_lines(choices),
        "",
        "KEYS of the chosen options (for another option: --help data=dicom)",
        *_key_lines({str(key): value for key, value in values.items() if key != "hydra"}, comments, choices),
        "",
        "-m KEY=A,B runs every combination · --cfg job prints the config only · --hydra-help lists Hydra's own flags",
    ]
    return "\n".join(lines)


def _group_lines(choices: dict[str, str]) -> Iterator[str]:
    """A line for each option, with the first sentence of its file."""
    for group, chosen in sorted(choices.items()):
        for path in sorted((CONF / group).glob("*.yaml")):
            if not path.stem.startswith(_HIDDEN_OPTIONS) or path.stem == chosen:
                comment = next(line for line in path.read_text(encoding="utf-8").splitlines() if "@package" not in line)
                name = f"  {group}={path.stem}{' *' * (path.stem == chosen)}"
                yield f"{name:<34} {_SENTENCE_END.split(comment.lstrip('# '))[0]}"


def _key_lines(
    values: dict[str, Any], comments: dict[str, str], choices: dict[str, str], at: str = ""
) -> Iterator[str]:
    """A line for each key. What is chosen is shown with the group."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            names = [choices[key], *value] if key in choices else []  # a logger's keys are in the file of its name
            files = [file for name in names for file, _ in files_of(key, name)]
            yield from _key_lines(value, _comments(files) if files else comments, {}, f"{at}{key}.")
        elif key not in ("name", "_target_") or value == "???":
            yield f"  {f'{at}{key}={as_typed(value)}':<44} {comments.get(key, '')}".rstrip()


def _comments(paths: list[Path]) -> dict[str, str]:
    """The comment of each key; the last file overrides the others."""
    return {key: comment for path in paths for key, comment in _COMMENTED.findall(path.read_text(encoding="utf-8"))}


# Standard output

_READER_GONE = (errno.EPIPE, errno.EIO)  # the other end of a pipe, as in `| head -1`; a terminal that was closed


class _Lasting(io.FileIO):
    """Writes to a terminal, pipe or file as long as somebody reads it. Then it goes on, and writes to nobody."""

    def write(self, data: Any, /) -> int:
        """Write. Raises OSError, with a name, if a file is full."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _READER_GONE:
                error.filename = "standard output"
                raise
            nobody = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nobody, self.fileno())  # for libraries in C too
            os.close(nobody)
            return len(data)


def lasting_output() -> None:
    """Let a run outlive `| head -1`, and print ? for what the encoding of the terminal does not have.

    A stream that is not the process's own stays: that of a notebook or of a test.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        raw = _Lasting(stream.fileno(), "w", closefd=False)
        buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)  # the first by python -u
        lasting = io.TextIOWrapper(
            buffer,
            encoding=stream.encoding,
            errors="replace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lasting)
