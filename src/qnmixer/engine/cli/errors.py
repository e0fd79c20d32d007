"""Errors of libraries and of the system in one line. Hydra and pydantic say themselves what is wrong."""

import errno
import re
from functools import cache

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qnmixer.engine.config.compose import compose, key_of
from qnmixer.engine.config.files import flat_keys
from qnmixer.engine.config.sections import REFUSED
from qnmixer.errors import UserError, first_line, in_a_line, suggest

_BY_LIBRARY = {"sqlalchemy": "hydra.sweeper.storage", "wandb": "W&B"}
"""What an error of a library is about, by its package."""


def explain(error: BaseException, config_name: str, words: list[str] | None = None) -> str | None:
    """The line for an error that a user can fix; None for a bug. `words`: of the command line."""
    line = _explain(error, config_name)
    return None if line is None else in_a_line(line)


def _explain(error: BaseException, config_name: str) -> str | None:
    package = type(error).__module__.partition(".")[0]
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError | RuntimeError) and (line := _explain_system(error)):
        return line
    if type(error).__name__ == "OutOfMemoryError":  # torch's class, compared by name: importing torch takes seconds
        return f"out of memory ({first_line(error)}): lower data.batch_size, or set accelerator=cpu"
    if isinstance(error, FloatingPointError):
        return f"{error}: lower optimizer.lr, or look at train/grad_norm in metrics.csv"
    if package in _BY_LIBRARY:
        return f"{_BY_LIBRARY[package]}: {first_line(error)}"
    if type(error).__name__ == "MisconfigurationException":  # of Lightning, for callbacks that do not fit the run
        return f"Lightning refuses this run: {first_line(error)}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "qnmixer":
        return f"{first_line(error).rstrip('.: ')}: install it, or do not use the option that needs it"
    if isinstance(error, RuntimeError) and 'Could not detect "srun"' in str(error):  # from submitit
        return "hydra/launcher=slurm needs SLURM, but this machine has no srun: use it on a cluster, or leave it out"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _explain_composition(error, config_name)
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


def _explain_composition(error: Exception, config_name: str) -> str:
    """Hydra's own text in one line; for a key that does not exist, the nearest one too."""
    text = " ".join(str(error).split())
    if match := re.search(r"Could not override '([^']+)'", text):
        key = key_of(match[1])
        return (
            f"{key} {REFUSED[key]}"
            if key in REFUSED
            else f"unknown key {key}: {suggest(key, _known_keys(config_name))}"
        )
    text = text.partition(" Config search path")[0]
    return text or first_line(error.__cause__ or "")


@cache
def _known_keys(config_name: str) -> list[str]:
    """Dotted names of all keys of a command with its default options."""
    values = OmegaConf.to_container(compose(config_name, []), resolve=False)
    assert isinstance(values, dict)
    return [*flat_keys({str(key): value for key, value in values.items()})]
