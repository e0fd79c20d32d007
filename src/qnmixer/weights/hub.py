"""Weights on a hub: Hugging Face's, or the one that HF_ENDPOINT names. huggingface_hub, an extra, is imported late."""

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from qnmixer.errors import CheckpointError, ConfigError, first_line

HUB = "hf://"
FILE = "model.safetensors"
"""The name of a weights file on a hub. The card beside it is README.md."""


def library() -> Any:
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
    api = library().HfApi()
    try:
        return Path(api.hf_hub_download(name, FILE))
    except Exception as error:  # of the network, of the disk, of the server
        raise CheckpointError(
            f"{run} cannot be loaded ({_words(error)}): it needs a {FILE} of qnmixer.export; a private one needs the "
            "token of `hf auth login`"
        ) from error


def push(name: str, weights: bytes, card: str) -> None:
    """Send a weights file and its card in one commit: both arrive, or neither. A new repository is private.

    Raises ConfigError if the hub does not take them, or if huggingface_hub is not installed.
    """
    api, part = library().HfApi(), library().CommitOperationAdd
    files = [part(FILE, weights), part("README.md", card.encode(errors="replace"))]
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
