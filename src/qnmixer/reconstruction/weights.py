"""Where weights are: in this package, in the folder or file that `run=` and `finetune=` name, or on a hub.

No torch import. huggingface_hub, which an extra installs, is imported late.
"""

from functools import cache
from pathlib import Path

from qnmixer.errors import CheckpointError, first_line
from qnmixer.files import check_there, path_of
from qnmixer.installed import optional
from qnmixer.runs.artifacts import download_artifact, is_artifact
from qnmixer.runs.layout import checkpoint_in

PRETRAINED = "pretrained"  # their short name; a folder of this name needs a path: ./pretrained
SHIPPED = Path(__file__).parents[1] / "weights" / "qn_mixer_256_64views.safetensors"
CHECKPOINT_KEY, RUN_KEY = "qnmixer", "qnmixer_run"
"""Keys of a checkpoint: its format and config, and the state that resuming needs. Weights files have the first only."""
TRAINED_KEY, MEAN_KEY = "trained_weights", "mean_weights"
"""Keys of a checkpoint with callbacks=ema: the first is in the file, the second is set while it is read."""
SUFFIX = ".safetensors"  # the ending of a weights file of `qnmixer.export`; checkpoints have another one


def located(run: str | Path) -> Path:
    """The path that `run=` or `finetune=` names: the shipped weights for "pretrained", else the path; ~ is the home.

    hf://OWNER/NAME and ENTITY/PROJECT/NAME:ALIAS, an artifact of W&B, are downloaded first. The name must be a string.
    A Path, which may come from ./pretrained, is always a path.

    Raises CheckpointError if this installation has no shipped weights, or the hub has none.
    """
    if isinstance(run, str) and run.startswith(HUB):
        return download(run)
    if isinstance(run, str) and is_artifact(run):
        return download_artifact(run)
    if run != PRETRAINED:
        return path_of(run)
    if not SHIPPED.is_file():
        raise CheckpointError(
            f"{PRETRAINED} cannot be loaded, as this installation ships no weights ({SHIPPED.name} is missing): give a "
            f"run folder of qnmixer.train or a {SUFFIX} file"
        )
    return SHIPPED


def find_checkpoint(run: str | Path, checkpoint: str = "best") -> Path:
    """The checkpoint of a run folder: best.ckpt, or last.ckpt if there is no best. A file is returned unchanged.

    "pretrained" is the weights file that the package ships, as in `located`. Raises CheckpointError if there is no
    file.
    """
    run = located(run)
    if run.is_file():
        return run
    if not run.is_dir():
        raise CheckpointError(f"no run folder at {run}: give the folder that training printed, run=runs/…")
    for name in dict.fromkeys((checkpoint, "best", "last")):
        path = checkpoint_in(run, name)
        if path.is_file():
            return path
    raise CheckpointError(f"{run} has no checkpoints/best.ckpt or last.ckpt: is it a run folder of qnmixer.train?")


def check_weights(key: str, given: str) -> None:
    """Raise CheckpointError or DataError if the value of a key names no weights."""
    what = f"a run folder of qnmixer.train, a checkpoint, a {SUFFIX} file, {HUB}OWNER/NAME or the word {PRETRAINED}"
    check_there(key, str(located(given)) if given else "", what)


HUB, HUB_FILE = "hf://", "model.safetensors"
"""What names weights on a hub (Hugging Face's, or the one that HF_ENDPOINT names), and their file there."""


@cache  # a command asks several times
def download(run: str) -> Path:
    """The weights file of hf://OWNER/NAME in huggingface_hub's cache. Without a network the one that is there already.

    Raises CheckpointError if there is none, and NotInstalled without huggingface_hub.
    """
    hub = optional("huggingface_hub", "hub", "a hub")
    try:
        return Path(hub.hf_hub_download(run.removeprefix(HUB), HUB_FILE))
    except Exception as error:  # of the network, of the disk, of the server
        raise CheckpointError(
            f"{run} cannot be loaded ({type(error).__name__}: {first_line(error)}): give {HUB}OWNER/NAME, with a "
            f"{HUB_FILE} of qnmixer.export; a private one needs the token of `hf auth login`"
        ) from error
