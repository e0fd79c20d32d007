"""Errors of libraries and of the system in one line. Hydra and pydantic say themselves what is wrong."""

import errno
import re

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qnmixer.errors import ConfigError, UserError, first_line, in_a_line, suggest
from qnmixer.installed import not_installed
from qnmixer.settings.compose import SEARCH_PATH, compose, folders_in, key_of, with_search_path
from qnmixer.settings.options import OF_A_RUN, TARGET, flat, is_group, option_files
from qnmixer.settings.sections import REFUSED
from qnmixer.settings.validation import unknown_key


def explain(error: BaseException, config_name: str, words: list[str] | None = None) -> str | None:
    """The line for an error that a user can fix; None for a bug. `words`: of the command line."""
    line = _explain(error, config_name, words or [])
    return None if line is None else in_a_line(line)


def _explain(error: BaseException, config_name: str, words: list[str]) -> str | None:
    package = type(error).__module__.partition(".")[0]
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError | RuntimeError) and (line := _explain_system(error)):
        return line
    if type(error).__name__ == "OutOfMemoryError":  # torch's class, compared by name: importing torch takes seconds
        of_a_run = "lower data.batch_size, or set memory=recompute or trainer.precision=16-mixed"
        smaller = of_a_run if config_name in OF_A_RUN else "set accelerator=cpu"
        return f"out of memory ({first_line(error)}): {smaller}"
    if isinstance(error, FloatingPointError):
        return f"{error}: lower optimizer.lr, or look at train/grad_norm in metrics.csv"
    if package in ("sqlalchemy", "wandb"):
        return f"{package}: {first_line(error)}"
    if type(error).__name__ == "MisconfigurationException":  # of Lightning, for callbacks that do not fit the run
        return f"Lightning refuses this run: {first_line(error)}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "qnmixer":
        return f"{first_line(error).rstrip('.: ')}: install it, or do not use the option that needs it"
    if isinstance(error, RuntimeError) and 'Could not detect "srun"' in str(error):  # from submitit
        return "hydra/launcher=slurm needs SLURM, but this machine has no srun: use it on a cluster, or leave it out"
    if isinstance(error, OverrideParseException):
        twice = (
            r"^(Error when parsing index: .*?\]\. )?(Error parsing override '.*?' (?=.))?| ?See https:.*"  # the words
        )
        why = re.sub(twice, "", " ".join(str(error).split()))
        return f"{error.override} cannot be read as KEY=VALUE ({why})"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _explain_composition(error, config_name, words)
    return None


def _explain_system(error: OSError | RuntimeError) -> str | None:
    """The line for an error of the system: of disks, open files, and the memory that data workers share."""
    text = f"{error} {error.__cause__ or ''}"  # torch names the worker's exit code in the cause only
    if re.search(r"\[Errno 24\]|Too many open files|ancdata|DataLoader worker .* exit code 24\b", text):
        return "too many open files: raise the limit of this shell (ulimit -n 4096), or lower data.num_workers"
    if re.search(r"</torch_\d|out of shared memory|Bus error", text):
        return "the shared memory of the data workers (/dev/shm) is full: raise it, or set data.num_workers=0"
    if match := re.search(r"DataLoader worker \(pid.*\) (is killed by .*?|exited unexpectedly)(\.|$| with)", text):
        return f"a data worker {match[1]}: lower data.num_workers, or set it to 0 to see why"
    if isinstance(error, RuntimeError):
        return None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full writing {error.filename or 'a file'}: choose another place"
    if error.filename:
        return f"{error.filename} cannot be used ({error.strerror or first_line(error)}): choose another place"
    return str(UserError(error)) if "DataLoader worker" in text else None


def _explain_composition(error: Exception, config_name: str, words: list[str]) -> str:
    """Hydra's own text in one line; for a key or an option that does not exist, the nearest one too."""
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and (match := re.search(r"Could not \w+ '(\w+)/([^']*)'", text)):
        group, name = match.groups()
        if names := sorted(option_files(group, config_name, folders_in(words))):
            return f"{group}={name} does not exist: {suggest(name, names, limit=99)}"
    if match := re.search(r"In '(hydra/\w+)/((search|slurm|ray)\w*)': Could not load", text):
        return str(not_installed("its plugin of Hydra", match[3], f"{match[1]}={match[2]}"))
    if match := re.search(r"Could not override '([^']+)'", text):
        if (key := key_of(match[1])) in REFUSED:
            return f"{key} {REFUSED[key]}"
        missing = getattr(error.__cause__, "full_key", None) or ""
        return _unknown_key(max(key_of(match[1]), str(missing), key=len), config_name, words)
    return text.partition(" Config search path")[0] or first_line(error.__cause__ or "")


def _unknown_key(key: str, config_name: str, words: list[str]) -> str:
    """The line for a key that the config of the chosen options does not have."""
    chosen = [word for word in with_search_path(words) if is_group(key_of(word)) or key_of(word) == SEARCH_PATH]
    try:
        config = compose(config_name, chosen, with_hydra=True)
    except (ConfigError, HydraException, OmegaConfBaseException):  # another word is wrong too
        config = compose(config_name, [], with_hydra=True)
    group, choices, values = key.partition(".")[0], config.hydra.runtime.choices, OmegaConf.to_container(config)
    assert isinstance(values, dict)
    keys = [name for name, _ in flat(values) if name.startswith("hydra.") == (group == "hydra")]
    line = str(unknown_key(key, keys, f"{group}={choices[group]}" if group in choices else config_name))
    section = values.get(group)
    has_class = isinstance(section, dict) and section.get(TARGET) is not None  # data=as_trained has none of its own
    more = has_class and "did you mean" not in line
    return f"{line}; +{key}=… names another argument of its class" if more else line
