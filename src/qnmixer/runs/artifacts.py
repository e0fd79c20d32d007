"""Checkpoints of runs in Weights & Biases, as `logger.wandb.log_model` writes them, by the names of their artifacts.

No torch import. wandb is imported late.
"""

import os
import re
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from qnmixer.errors import CheckpointError, first_line
from qnmixer.files import default_cache_dir, make_own_folder, write_text
from qnmixer.runs.layout import checkpoint_in

MODEL = "model.ckpt"  # the checkpoint in an artifact, as Lightning's logger calls it
BESIDE_MODEL = "results.json", "metrics.csv"  # what a run needs beside it to resume
_NAME = re.compile(r"(?:[\w.-]+/){0,2}[\w.-]+:[\w.-]+")


def is_artifact(text: str) -> bool:
    """Whether a text is the name of an artifact, ENTITY/PROJECT/model-ID:ALIAS, and no path. W&B knows the defaults."""
    return _NAME.fullmatch(text) is not None and not os.path.exists(text)


@cache  # a command asks several times
def download_artifact(name: str) -> Path:
    """A folder like that of a run, with the checkpoint and the files of an artifact, in the cache of this user.

    Raises CheckpointError if W&B does not give it.
    """
    try:
        artifact: Any = import_module("wandb").Api().artifact(name, type="model")
        folder = default_cache_dir() / "artifacts" / artifact.digest
        if folder.is_dir():
            return folder
        make_own_folder(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            run = Path(temporary, "run")
            for file in {MODEL, *BESIDE_MODEL} & artifact.manifest.entries.keys():  # no other one, whatever its path
                artifact.get_entry(file).download(str(run))
            checkpoint = checkpoint_in(run, "last")
            checkpoint.parent.mkdir()
            (run / MODEL).rename(checkpoint)
            write_text(run / "wandb" / "run_id", artifact.name.partition(":")[0].removeprefix("model-"))
            run.rename(folder)
    except Exception as error:  # of the network, of the disk, of the server
        raise CheckpointError(
            f"{name} cannot be loaded from W&B ({type(error).__name__}: {first_line(error)}): give "
            "ENTITY/PROJECT/model-ID:latest of a run with logger.wandb.log_model=true, after wandb login"
        ) from error
    return folder
