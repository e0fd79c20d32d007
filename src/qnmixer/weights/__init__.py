"""Where weights are: in this package, in the folder or file that `run=` and `finetune=` name, or on a hub.

No torch import. huggingface_hub, which an extra installs, is imported late.
"""

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from qnmixer.errors import CheckpointError, ConfigError, first_line
from qnmixer.files import check_there, path_of

# Where weights are

PRETRAINED = "pretrained"
"""Their short name. A folder of this name needs a path: ./pretrained."""
SHIPPED = Path(__file__).parent / "qn_mixer_256_64views.safetensors"
CHECKPOINT_KEY, RUN_KEY = "qnmixer", "qnmixer_run"
"""Keys of a checkpoint: its format and config, and the state that resuming needs. Weights files have the first only."""
TRAINED_KEY, MEAN_KEY = "trained_weights", "mean_weights"
"""Keys of a checkpoint with callbacks=ema: the first is in the file, the second is set while it is read."""
SUFFIX = ".safetensors"
"""The ending of a weights file of `qnmixer.export`; checkpoints have another one."""


def located(run: str | Path) -> Path:
    """The path that `run=` or `finetune=` names: the shipped weights for "pretrained", else the path; ~ is the home.

    hf://OWNER/NAME is downloaded first. The name must be a string. A Path, which may come from ./pretrained, is always
    a path.

    Raises CheckpointError if this installation has no shipped weights, or the hub has none.
    """
    if isinstance(run, str) and run.startswith(HUB):
        return download(run)
    if run != PRETRAINED:
        return path_of(run)
    if not SHIPPED.is_file():
        raise CheckpointError(
            f"{PRETRAINED} cannot be loaded, as this installation ships no weights ({SHIPPED.name} is missing): give a "
            f"run folder of qnmixer.train or a {SUFFIX} file"
        )
    return SHIPPED


def checkpoint_in(run: Path, name: str) -> Path:
    """The path of the checkpoint `best` or `last` of a run folder."""
    return run / "checkpoints" / f"{name}.ckpt"


def check_weights(key: str, given: str) -> None:
    """Raise CheckpointError or DataError if the value of a key names no weights."""
    what = f"a run folder of qnmixer.train, a checkpoint, a {SUFFIX} file, {HUB}OWNER/NAME or the word {PRETRAINED}"
    check_there(key, str(located(given)) if given else "", what)


# On a hub

HUB, HUB_FILE = "hf://", "model.safetensors"
"""What names weights on a hub (Hugging Face's, or the one that HF_ENDPOINT names), and their file there."""


def hub_library() -> Any:
    """The module huggingface_hub. Raises ConfigError, which says how to install it."""
    try:
        return import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError('a hub needs huggingface_hub, which is not installed: pip install "qnmixer[hub]"') from error


def check_repository(key: str, name: str) -> None:
    """Raise ConfigError if this is no name of a repository."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ConfigError(f"{key} names no repository of a hub: give OWNER/NAME")


@cache  # a command asks several times
def download(run: str) -> Path:
    """The weights file of hf://OWNER/NAME in huggingface_hub's cache. Without a network the one that is there already.

    Raises CheckpointError if there is none, and ConfigError if the name is wrong or huggingface_hub is not installed.
    """
    check_repository(run, name := run.removeprefix(HUB))
    api = hub_library().HfApi()
    try:
        return Path(api.hf_hub_download(name, HUB_FILE))
    except Exception as error:  # of the network, of the disk, of the server
        raise CheckpointError(
            f"{run} cannot be loaded ({_words(error)}): it needs a {HUB_FILE} of qnmixer.export; a private one needs "
            "the token of `hf auth login`"
        ) from error


def push(name: str, weights: bytes, card: str) -> None:
    """Send a weights file and its card in one commit: both arrive, or neither. A new repository is private.

    Raises ConfigError if the hub does not take them, or if huggingface_hub is not installed.
    """
    api, part = hub_library().HfApi(), hub_library().CommitOperationAdd
    files = [part(HUB_FILE, weights), part("README.md", card.encode(errors="replace"))]
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.create_commit(name, files, commit_message="Weights and model card of qnmixer.export")
    except Exception as error:
        raise ConfigError(
            f"push={name} failed ({_words(error)}), and no file was changed there: log in by `hf auth login` with a "
            "token that may write, and try again"
        ) from error


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
