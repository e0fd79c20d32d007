"""What is installed beside the base, by the extras of pyproject.toml. What is missing is one line, with the command.

It imports none of these packages.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import TracebackType

from qnmixer.errors import ConfigError

PACKAGES = {
    "train": (
        "lightning", "hydra", "omegaconf", "yaml", "pydantic", "torchmetrics", "wandb", "rich", "matplotlib",
    ),
    "dicom": ("pydicom", "gdcm", "PIL"),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow",),
    "lodopab": ("h5py",),
    "two_detect": ("tifffile",),
    "helix2fan": ("tifffile",),
    "mat": ("scipy",),
    "hub": ("huggingface_hub",),
}  # fmt: skip
"""The packages that each extra brings, as Python imports them. An extra for one option of a group has its name."""


class NotInstalled(ConfigError, ImportError):
    """A package or a part of qnmixer that is not installed. The message has the command that installs it."""


def require(extra: str, user: str) -> None:
    """Raise NotInstalled if a package of an extra is missing. `user`: what needs it, for the message."""
    for package in PACKAGES[extra]:
        if find_spec(package) is None:
            raise not_installed(package, extra, user)


def require_for(option: str, user: str) -> None:
    """As `require`, for an option of a group. Most options need no extra."""
    if option in PACKAGES:
        require(option, user)


def not_installed(package: str, extra: str, user: str) -> NotInstalled:
    """The error for a package that an extra brings."""
    return NotInstalled(f'{user} needs {package}, which is not installed: pip install "qnmixer[{extra}]"')


def without_extras(user: str) -> NotInstalled:
    """The error for a part of `qnmixer.extras` in a copy that has left them out."""
    return NotInstalled(f"{user} needs qnmixer.extras, which this copy does not have: install qnmixer anew")


@contextmanager
def extras() -> Iterator[None]:
    """Imports of `qnmixer.extras`, which a copy may have left out. Raises NotInstalled."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("qnmixer.extras"):
            raise
        raise without_extras("this") from None


_hook = sys.excepthook


def _one_line(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print one that nobody catches without a traceback, also while a command is still importing its modules."""
    if isinstance(error, NotInstalled):
        print(f"error: {error}", file=sys.stderr)
    else:
        _hook(kind, error, traceback)


sys.excepthook = _one_line
