"""Turn an error into one line: what is wrong, and how to fix it."""

import errno
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from qnmixer.engine.config.compose import CONF, OF_A_RUN, compose, key_of
from qnmixer.engine.config.options import TARGET, answer, flat_keys, owners, unknown_key
from qnmixer.engine.config.sections import PassedOn
from qnmixer.engine.config.values import has_no_value
from qnmixer.errors import UserError, first_line, in_a_line, suggest, visible
from qnmixer.files import name_error

_EXTRAS = {"optuna": "search", "submitit": "slurm", "ray": "ray"}
"""What to install for a plugin of Hydra."""
_OF_WORKER = re.compile(r"(?s)Caught \w+ in DataLoader worker .*\n\w+: \[Errno (\d+)\] ([^\n]*?)(?:: '([^\n]*)')?\s*$")


def explain(error: BaseException, config_name: str) -> str | None:
    """The line for an error that a user can fix; None for a bug."""
    line = _explain(error, config_name)
    return None if line is None else in_a_line(line)


def _explain(error: BaseException, config_name: str) -> str | None:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError | RuntimeError) and (line := _explain_system(error)):
        return line
    if type(error).__name__ == "OutOfMemoryError":  # torch's class, compared by name: importing torch takes seconds
        smaller = "lower data.batch_size, model.n_iterations or model.channels, or set trainer.precision=16-mixed"
        return f"out of memory ({first_line(error)}): {smaller if config_name in OF_A_RUN else 'set accelerator=cpu'}"
    if isinstance(error, FloatingPointError):
        return f"{error}: lower optimizer.lr, or look at train/grad_norm in metrics.csv"
    if type(error).__module__.startswith("wandb."):
        return f"W&B: {error}: run `wandb login` once, or leave logger.wandb.mode=offline"
    if type(error).__name__ == "MisconfigurationException":  # of Lightning, for callbacks that do not fit the run
        return f"Lightning refuses this run: {first_line(error)}"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("qnmixer"):
        return f"{first_line(error)}: install it, or do not use the option that needs it"
    if isinstance(error, RuntimeError) and 'Could not detect "srun"' in str(error):  # from submitit
        return "hydra/launcher=slurm needs SLURM, but this machine has no srun: use it on a cluster, or leave it out"
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):  # from Hydra
        return "a group has no option of that name: give it the name of one, as in data=dicom"
    if isinstance(error, OverrideParseException):
        return _explain_word(str(error.override))
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _explain_composition(error, config_name)
    return None


def _explain_system(error: OSError | RuntimeError) -> str | None:
    """The line for an error of the system: of disks, open files, and the memory that data workers share."""
    text = f"{error} {error.__cause__ or ''}"  # torch names the worker's exit code in the cause only
    if isinstance(error, OSError) and (of_worker := _OF_WORKER.search(text)):  # torch keeps its text only
        error = OSError(int(of_worker[1]), of_worker[2], of_worker[3] or "a file that a data worker uses")
    if re.search(r"\[Errno 24\]|Too many open files|ancdata|DataLoader worker .* exit code 24\b", text):
        return "too many open files: raise the limit of this shell (ulimit -n 4096), or lower data.num_workers"
    if re.search(r"</torch_\d|out of shared memory|Bus error", text):
        return (
            "the shared memory of the data workers (/dev/shm) is full: give the container more "
            "(docker run --shm-size=8g), or set data.num_workers=0"
        )
    if found := re.search(r"DataLoader worker \(pid.*\) (is killed by .*?|exited unexpectedly)(\.|$| with)", text):
        return f"a data worker {found[1]}: lower data.num_workers, or set it to 0 to see why"
    if isinstance(error, RuntimeError):
        return None
    name_error(error, _folder_of_hydra(error))
    if not error.filename:
        return None
    what = f"{error.filename} cannot be used ({error.strerror or first_line(error)})"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"the disk is full writing {error.filename}"
    return f"{what}: choose another place (hydra.run.dir=…, output=…)"


def _folder_of_hydra(error: BaseException) -> str:
    """The folder into which Hydra was writing its files. It names none in its errors."""
    found = (frame.f_locals.get("output_dir", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return str(max(found, key=lambda it: len(str(it)), default=""))


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print warnings as `warning: …` while the block runs. Python adds the file, and a line of code."""
    as_python_does = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {visible(str(message))}\n"
    try:
        yield
    finally:
        warnings.formatwarning = as_python_does


def _explain_word(word: str) -> str:
    """The line for a word that Hydra's grammar does not take."""
    if groups := sorted(path.parent.name for path in CONF.glob("*/*.yaml") if path.stem == word):
        return f"{word} is not KEY=VALUE: write {groups[0]}={word}"
    return (
        f"{word} is not KEY=VALUE: leave out blanks around the =, and put quotes around a value with blanks, brackets, "
        "commas or other letters than a to z: 'key=\"a b\"'"
    )


def _explain_composition(error: Exception, config_name: str) -> str:
    text = " ".join(str(error).split())
    if not text:  # of Hydra, for an option such as ${.}
        return f"an option cannot be read ({first_line(error.__cause__ or error)}): give its name, as in data=dicom"
    if found := re.search(r"Could not load '(hydra/\w+)/(optuna|submitit|ray)", text):
        return f'this {found[1]} is a plugin that is not installed here: pip install -e ".[{_EXTRAS[found[2]]}]"'
    if isinstance(error, MissingMandatoryValue):  # while an experiment is fitted to another option
        return str(has_no_value(str(error.full_key)))
    if found := re.search(r"Error merging override (([^= ]+)\.[^.= ]+=.*)", text):
        whole = key_of(found[2])
        return f"{found[1]} cannot be set: give {whole} as a whole, {whole}=…"
    if isinstance(error, MissingConfigException) and (
        found := re.search(r"Could not (?:find|load) '(\w+(?:/\w+)?)/([^']*)'", text)  # "In 'experiment/mine': Could …"
    ):
        group, name = found.groups()
        left_out = "as_trained" if config_name in OF_A_RUN else ""
        if known := [it.stem for it in sorted((CONF / group).glob("[!_]*.yaml")) if it.stem != left_out]:
            does_not_exist = f"{group}={name} does not exist: {suggest(name, known, most=99)}"
            return answer(f"{group}={name}") or does_not_exist
    if found := re.search(r"Multiple values for (\S+)\. To|config groups is not supported: '\+\+([^=@]+)", text):
        group = found[1] or found[2]
        return f"{group} has an option already: leave out the +, as in {group}=…"
    if found := re.search(r"An item is already at '([^']+)'", text):
        return f"{found[1]} exists already: leave out the + before it"
    if found := re.search(r"Could not [a-z. ]+ '([^']+)'", text):
        return _explain_key(found[1].lstrip("+~").split("=")[0].split("@")[0], config_name)
    return text


def _explain_key(key: str, config_name: str) -> str:
    """The line for a key that the command does not have."""
    group, known = key.partition(".")[0], known_keys(config_name)
    groups = [path.name for path in CONF.iterdir() if path.is_dir()]
    as_trained = (CONF / group / "as_trained.yaml").is_file() and group not in map(key_of, sys.argv)
    if config_name not in OF_A_RUN and group in groups and (group not in known or as_trained):
        way = ", or choose other slices with data=dicom" if group == "data" and group in known else ""
        return f"{key} comes from the run and cannot change in {config_name}: leave it out{way}"
    if key.startswith(("hydra.", "hydra/")):
        return f"unknown key {key}: --cfg hydra prints those of Hydra"
    line = str(unknown_key(key, [*groups, *known]))
    its = [it for it in owners() if it.startswith(f"{group}.")]
    takes_more = group in ("trainer", "sets") or any(it.endswith(f".{TARGET}") for it in its)
    if not line.startswith("unknown key") or not takes_more or group == key:
        return line
    if key.endswith(f".{TARGET}") or (group == "trainer" and key.partition(".")[2] in PassedOn.__annotations__):
        line = f"unknown key {key}"  # what it is like would lead astray
    elif line.endswith("?") and f"{group}=custom" not in sys.argv:
        return line
    return f"{line}{'' if line.endswith('?') else '.'} An argument that is not in conf/ takes a plus: +{key}=…"


def known_keys(config_name: str) -> list[str]:
    """Dotted names of all keys of a command, groups included."""
    values = OmegaConf.to_container(compose(config_name, []), resolve=False)
    assert isinstance(values, dict)
    return list(flat_keys({str(key): value for key, value in values.items()}))
