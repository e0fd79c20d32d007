"""The weights that the package ships, and what `run=` and `finetune=` may name. No torch import."""

from pathlib import Path

from qnmixer.errors import CheckpointError
from qnmixer.files import check_there

PRETRAINED = "pretrained"
"""Their short name; a folder called so is given by its path, ./pretrained."""

SHIPPED = Path(__file__).parent / "qn_mixer_256_64views.safetensors"

SUFFIX = ".safetensors"
"""What tells a weights file, which `qnmixer.export` makes, from a checkpoint."""


def located(run: str | Path) -> Path:
    """Where that lies which `run=` or `finetune=` names: the shipped weights for their name, else the path as it is.

    The name is a string: a Path, which may have been ./pretrained, is a path always.

    Raises CheckpointError where this installation has no shipped weights.
    """
    if run != PRETRAINED:
        return Path(run)
    if not SHIPPED.is_file():
        raise CheckpointError(
            f"{PRETRAINED}: this installation ships no weights ({SHIPPED.name} is missing): give a run folder of "
            f"qnmixer.train or a {SUFFIX} file"
        )
    return SHIPPED


def check_weights(key: str, given: str) -> None:
    """Raise CheckpointError or DataError where there are no weights at what a key names."""
    what = f"a run folder of qnmixer.train, a checkpoint, a {SUFFIX} file or the word {PRETRAINED}"
    check_there(key, str(located(given)) if given else "", what)
