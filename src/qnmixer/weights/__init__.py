"""Where weights are: those that the package ships, those that `run=` and `finetune=` name. No torch import."""

from os.path import expanduser
from pathlib import Path

from qnmixer.errors import CheckpointError
from qnmixer.files import check_there
from qnmixer.weights.hub import HUB, download

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
        return Path(expanduser(run))  # pathlib's raises an error for a user that does not exist
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
