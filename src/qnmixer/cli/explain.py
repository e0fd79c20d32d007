"""Turn an error into one line: what is wrong, and how to fix it."""

import errno
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qnmixer.config.compose import OF_A_RUN, compose
from qnmixer.config.keys import flat_keys, unknown_key
from qnmixer.config.overrides import key_of, quoted
from qnmixer.config.search_path import CONF
from qnmixer.config.target import options, values_of_option
from qnmixer.errors import UserError, first_line, suggest


def explain(error: BaseException, config_name: str) -> str | None:
    """The line for an error that a user can fix; None for a bug."""
    if isinstance(error, UserError):  # torch puts a data worker's traceback before it
        return re.sub(r"(?s)Caught \w+ in DataLoader worker .*\n\S*Error: ", "", str(error)).rstrip()
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" writing {error.filename}" if error.filename else ""
        return f"the disk is full{where}: free some space, or choose another folder (hydra.run.dir=…, output=…)"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission for {error.filename}: choose a place that you may use (hydra.run.dir=…, output=…)"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"the name {str(error.filename)[:60]}… is too long: choose a shorter hydra.run.dir or hydra.sweep.subdir"
    if type(error).__name__ == "OutOfMemoryError":  # torch's class, compared by name: importing torch takes seconds
        smaller = "lower data.batch_size, model.n_iterations or model.channels, or set trainer.precision=16-mixed"
        return f"out of memory ({first_line(error)}): {smaller if config_name in OF_A_RUN else 'set accelerator=cpu'}"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{error.filename} is a file, but must be a folder: choose another (hydra.run.dir=…, output=…)"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be used ({error.strerror}): choose another place"
    if isinstance(error, FloatingPointError):
        return f"{error}: lower optimizer.lr, or look at train/grad_norm in metrics.csv"
    if type(error).__module__.startswith("wandb."):
        return f"W&B: {error}: run `wandb login` once, or leave logger.wandb.mode=offline"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("qnmixer"):
        return f"{first_line(error)}: install it, or do not use the option that needs it"
    if isinstance(error, RuntimeError) and 'Could not detect "srun"' in str(error):  # from submitit
        return "hydra/launcher=slurm needs SLURM, but this machine has no srun: use it on a cluster, or leave it out"
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):  # from Hydra
        return "a group has no option of that name: give it the name of one, as in data=dicom"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _explain_composition(error, config_name)
    return None


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print warnings of this package as `warning: …` while the block runs. Python adds its file and a line of code."""
    package, as_python_does = os.path.dirname(os.path.dirname(__file__)), warnings.formatwarning

    def of(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        ours = category is UserWarning and filename.startswith(package + os.sep)
        return f"warning: {message}\n" if ours else as_python_does(message, category, filename, lineno, line)

    warnings.formatwarning = of
    try:
        yield
    finally:
        warnings.formatwarning = as_python_does


def _explain_composition(error: Exception, config_name: str) -> str:
    if isinstance(error, OverrideParseException):
        word = str(error.override)
        if "missing EQUAL" in error.message or "/" in word.partition("=")[0]:
            return f"{word} is not KEY=VALUE: {_meant(word, config_name)}"
        key, _, value = word.partition("=")
        if key and value and not re.search(r"""[\[\]{},'"]""", value):  # no list, and no quotes of the user
            return f"{word} cannot be read: put quotes around the value: {shlex.quote(f'{key}={quoted(value)}')}"
        return f"{word} cannot be read: put quotes around a value with brackets, commas or quotes: 'key=\"a,b\"'"
    text = " ".join(str(error).split())
    if found := re.search(r"Could not load '(hydra/\w+)/(optuna|submitit|ray)", text):
        extra = {"optuna": "search", "submitit": "slurm", "ray": "ray"}[found[2]]
        return f'this {found[1]} is a plugin that is not installed here: pip install -e ".[{extra}]"'
    if isinstance(error, MissingConfigException) and (found := re.search(r"'(\w+)/((?:/|~|\.)[^']*)'", text)):
        group, path = found.groups()
        way = (
            f"for a folder of slices write data=dicom data.root={path}" if group == "data" else "choose one by its name"
        )
        return f"{group}={path} is no option: {way}"
    if isinstance(error, MissingConfigException) and (
        found := re.search(r"Could not (?:find|load) '([^']+)/([^'/]+)'", text)
    ):
        group, name = found.groups()
        found_options = [path.stem for path in sorted((CONF / group).glob("[!_]*.yaml"))]
        if found_options:
            return f"{group}={name} does not exist: {suggest(name, found_options, most=99)}"
    if isinstance(error, ConfigCompositionException) and (
        found := re.search(r"Could not (?:override|append[^']*|delete from config\.) '([^']+)'", text)
    ):
        if found_there := re.search(r"An item is already at '([^']+)'", text):
            return f"{found_there[1]} exists already: leave out the + before it"
        key = found.group(1).lstrip("+~").split("=")[0].split("@")[0]
        groups = [path.name for path in CONF.iterdir() if path.is_dir()]
        known, group = known_keys(config_name), key.split(".")[0]
        as_trained = (CONF / group / "as_trained.yaml").is_file() and group not in map(key_of, sys.argv)
        if config_name not in OF_A_RUN and group in groups and (group not in known or as_trained):
            way = ", or choose other slices with data=dicom" if group == "data" and group in known else ""
            return f"{key} comes from the run and cannot change in {config_name}: leave it out{way}"
        ready = dict(_keys_of_ready())
        if key in ready:
            return f"{key} works with {ready[key]} only: choose that, or leave {key} out"
        own = f"{key.split('.')[0]}=custom" in sys.argv  # then it may be an argument of the target
        line = str(unknown_key(key, [*groups, *known, *ready]))
        if not own:
            return line
        return f"{line}{'' if line.endswith('?') else '.'} An argument of your own takes a plus: +{key}=…"
    return text


def _meant(word: str, config_name: str) -> str:
    """What to write instead of a word without a key: an option, a folder, or a key with its value."""
    if groups := sorted(path.parent.name for path in CONF.glob(f"*/{word}.yaml") if word.isidentifier()):
        return f"write {groups[0]}={word}"
    if "/" in word or word in (".", ".."):
        key = {"reconstruct": "input=", "evaluate": "run=", "export": "run=", "compare": "sweep="}.get(config_name)
        return f"write {key or 'data=dicom data.root='}{word}"
    return f"write {word}=… without blanks around the =, and quotes around a value with blanks: 'key=\"a b\"'"


def known_keys(config_name: str) -> list[str]:
    """Dotted names of all keys of a command, groups included."""
    values = OmegaConf.to_container(compose(config_name, []), resolve=False)
    assert isinstance(values, dict)
    return list(flat_keys({str(key): value for key, value in values.items()}))


def _keys_of_ready() -> Iterator[tuple[str, str]]:
    """Dotted names of the keys of all callbacks, metrics and loggers in conf/, and the option that has each."""
    for group in ("callbacks", "metrics", "logger"):
        for option in reversed(options(group)):  # default comes last: the others include its keys
            prefix = f"logger.{option}." if group == "logger" else f"{group}."
            yield from ((key, f"{group}={option}") for key in flat_keys(values_of_option(group, option), prefix))
