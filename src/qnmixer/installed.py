"""What is installed beside the base, by the extras of pyproject.toml. What is missing is one line, with the command.

It imports none of these packages.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qnmixer.errors import ConfigError

PACKAGES = {
    "train": (
        "lightning", "hydra", "omegaconf", "yaml", "pydantic", "torchmetrics", "wandb", "rich", "matplotlib",
    ),
    "dicom": ("pydicom", "gdcm", "PIL"),
    "maps": ("highdicom",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow",),
    "lodopab": ("h5py",),
    "two_detect": ("tifffile",),
    "helix2fan": ("tifffile",),
    "mat": ("scipy",),
    "hub": ("huggingface_hub",),
}  # fmt: skip
"""The packages that each extra brings, as Python imports them. An extra for one option of a group has its name."""

_OPTIONAL = ("qnmixer.extras", "qnmixer_studies")
"""Our own optional parts, which a copy may leave out."""


class NotInstalled(ConfigError, ImportError):
    """A package or a part of qnmixer that is not installed. The message has the command that installs it."""


def is_installed(extra: str) -> bool:
    """Whether all packages of an extra are there."""
    return all(map(find_spec, PACKAGES[extra]))


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


def optional(module: str, extra: str, user: str = "") -> Any:
    """Import a library that only one kind of input needs, by default data=EXTRA. Raises NotInstalled."""
    try:
        return import_module(module)
    except ImportError as error:
        raise not_installed(module.partition(".")[0], extra, user or f"data={extra}") from error


def without_extras(user: str, module: str) -> NotInstalled | None:
    """The error for a module of the optional parts in a copy that has left them out; None for any other module."""
    for part in _OPTIONAL:
        if f"{module}.".startswith(f"{part}."):
            return NotInstalled(f"{user} needs {part}, which this copy does not have: install qnmixer anew")
    return None


@contextmanager
def extras() -> Iterator[None]:
    """Imports of the optional parts, which a copy may have left out. Raises NotInstalled."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (left_out := without_extras("this", str(error.name))) is None:
            raise
        with one_line_of_a_command():
            raise left_out from None


@contextmanager
def one_line_of_a_command() -> Iterator[None]:
    """End a command of qnmixer by its line if the block raises NotInstalled. Other programs get the error.

    A command that cannot import its modules has nothing else yet that would print the line.
    """
    try:
        yield
    except NotInstalled as error:
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        if str(spec and spec.name).startswith("qnmixer.") or Path(sys.argv[0]).name.startswith("qnmixer-"):
            sys.exit(f"error: {error}")
        raise
