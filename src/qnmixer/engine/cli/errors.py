"""Errors of libraries and of the system in one line: what is wrong, and how to fix it."""

import errno
import glob
import re
import shlex
from collections.abc import Collection
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from qnmixer.engine.cli.words import explain_key, explain_word
from qnmixer.engine.config.checking import answer
from qnmixer.engine.config.compose import folders_in, key_of, names_folder
from qnmixer.engine.config.files import OF_A_RUN, TARGET, option_files, option_of
from qnmixer.errors import UserError, first_line, in_a_line, suggest

_EXTRA_OF = {"optuna": "search", "submitit": "slurm", "ray": "ray"}
"""What to install for a plugin of Hydra."""


def explain(error: BaseException, config_name: str, words: list[str] | None = None) -> str | None:
    """The line for an error that a user can fix; None for a bug. `words`: of the command line."""
    line = _explain(error, config_name, words or [])
    return None if line is None else in_a_line(line)


def _explain(error: BaseException, config_name: str, words: list[str]) -> str | None:
    if isinstance(error, UserError):
        return _explain_untyped(str(error), words)
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
    if not stands or not typed or any(f"{word}.".startswith(f"{key}.") for word in typed):
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
        if option_names := sorted(option_files(group, config_name, folders_in(words))):
            way = f"{suggest(name, option_names, limit=99)}{_own_option(group, name, words)}"
            return answer(f"{group}={name}") or f"{group}={name} does not exist: {way}"
    if match := re.search(r"Could not delete '(\S+)=|The value of '(\S+)' is .* and not", text):
        key = match[1] or match[2]
        return f"~{key}=… names another value than that of the config: write ~{key}"
    if match := re.search(r"force-add of config groups is not supported: '\+\+(\S+)'", text):
        return f"++{match[1]} is for keys, not for groups: write {match[1]}"
    if match := re.search(r"Ambiguous value for argument '([^']*)'|Sweep parameters '(.*)' requires", text):
        word = (match[1] or match[2]).replace('"', "")
        key, _, value = word.partition("=")
        as_list = f", or write {key}=[{value}] for a list" * bool(match[1])
        return f"{word} has several values: add -m for a run of each{as_list}"
    again = r"Multiple values for (\S+)\. To|An item is already at '([^']+)'|(\S+) appears more than once in the final"
    if match := re.search(again, text):
        key = match[1] or match[2] or match[3]
        if not any(word.startswith(f"+{key}") for word in words):
            return f"{key} is chosen already: write override /{key} in the defaults of the config file"
        return f"{key} exists already: leave out the + before it, as in {key}=…"
    if (match := re.search(r"Interpolation key '(\w+)[^']*' not found", text)) and f"~{match[1]}" in words:
        return f"the config has no {match[1]}: choose one with {match[1]}=…"
    if match := re.search(r"Could not [a-z. ]+ '([^']+)'|Interpolation key '([^']+)' not found", text):
        return explain_key(key_of(match[1] or match[2]).split("@")[0], config_name, words)
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
