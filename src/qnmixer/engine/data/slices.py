"""Decoded slices with the data to sort and split them, and skipped files."""

import importlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qnmixer.errors import DataError

FloatArray = npt.NDArray[np.float32]
NO_SPACING = "no pixel size in the file"
AIR = -1000.0
NO_AIR = -500.0
_BELOW_AIR = -1024.0
_DENSEST = 32767.0
"""HU, the largest value of metal that a scanner's 16 bits can store."""
_LEAST, _MOST = 8, 8192
"""Pixels of a side. A network's image has at least 8. A slice with more than 8192 would need gigabytes."""


class SkipFile(Exception):
    """A file or frame that cannot be used. The message is the reason in a few words."""


@contextmanager
def reading(problem: str) -> Iterator[None]:
    """Turn any error of the block into SkipFile with this problem: on damaged files libraries raise any type.

    MemoryError stays MemoryError. Warnings of libraries are hidden.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (SkipFile, MemoryError):
        raise
    except Exception as error:
        raise SkipFile(f"{problem} ({type(error).__name__})") from error


@contextmanager
def usable(path: Path, fix: str) -> Iterator[None]:
    """Raise DataError, which names the file and how to fix it, for a SkipFile of the block."""
    try:
        yield
    except SkipFile as reason:
        raise DataError(f"{path} cannot be used ({reason}): {fix}") from reason


def optional(module: str, extra: str) -> Any:
    """Import a library that only one kind of file needs. Raises DataError, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f'data={extra} is read by {module}, which is not installed: pip install "qnmixer[{extra}]"'
        ) from error


def require_size(rows: int, columns: int, least: int = _LEAST) -> None:
    """Raise SkipFile for a slice or sinogram that is too small or too large, before it is read."""
    if not least <= min(rows, columns) <= max(rows, columns) <= _MOST:
        raise SkipFile(f"{rows} × {columns} values, not {least} to {_MOST} a side")


@dataclass(frozen=True)
class SliceInfo:
    """The origin of a slice.

    Attributes:
        path: file, relative to the root, with forward slashes.
        frame: number of the frame or stack entry in the file.
        n_frames: frames in the file.
        patient: the patient's name or number.
        series: the scan of the patient.
        position: sorts the slices of a series. It is the position along the patient in mm, or a number, or 0.
        uids: StudyInstanceUID and SeriesInstanceUID with a space between, or empty. Each is of one patient only.
    """

    path: str
    frame: int
    n_frames: int
    patient: str
    series: str
    position: float
    uids: str = ""

    @property
    def name(self) -> str:
        """Name for tables: the path, and the frame if the file has several."""
        return f"{self.path}#{self.frame}" if self.n_frames > 1 else self.path

    @property
    def order(self) -> tuple[str, str, float, str, int]:
        """Sort key: patient, series, position."""
        return self.patient, self.series, self.position, self.path, self.frame


@dataclass(frozen=True)
class Slice:
    """One decoded slice, [H, W] in HU, and its origin.

    `spacing`: mm between its rows and between its columns; None if the file has none.
    """

    info: SliceInfo
    hu: FloatArray
    spacing: tuple[float, float] | None = None


class SliceSource(Protocol):
    """Slices in HU, by number.

    An `endless` source accepts any index; its `len` is the length of one epoch.
    """

    endless: bool

    def __len__(self) -> int: ...

    def load(self, index: int) -> FloatArray:
        """Slice [H, W] in HU, float32."""
        ...

    def name(self, index: int) -> str:
        """The name of the file or phantom, for tables."""
        ...


def clean_hu(hu: FloatArray) -> FloatArray:
    """Set padding (below −1024 HU) to air. Raises SkipFile for pixels that are NaN, infinite or not HU."""
    if not np.isfinite(hu).all():
        raise SkipFile("NaN or infinite pixels")
    if hu.max() > _DENSEST:
        raise SkipFile(f"values above {_DENSEST:g}, which are no HU")
    return np.where(hu < _BELOW_AIR, np.float32(AIR), hu).astype(np.float32, copy=False)


def require_content(hu: FloatArray) -> None:
    """Raise SkipFile for a slice of air only, or of one constant value."""
    if hu.max() < NO_AIR:
        raise SkipFile("nothing but air in the slice")
    if hu.max() == hu.min():
        raise SkipFile("all pixels have the same value")


def is_no_hu(low: float, high: float) -> bool:
    """Whether slices with this range are in another unit, such as attenuation or x in [0, 1]."""
    return low >= -1 and high <= 2


def doubt(root: str) -> str:
    """The warning about slices without a pixel below `NO_AIR`."""
    return f"{root}: no pixel is below −500 HU; is this really in HU (air −1000, water 0)?"


def summarise_skipped(root: str, skipped: Sequence[tuple[str, str]]) -> str:
    """One line: how many files were skipped, why, and the first names."""
    reasons = "; ".join(f"{count} {reason}" for reason, count in Counter(r for _, r in skipped).most_common())
    names = ", ".join(name for name, _ in skipped[:3]) + ", …" * (len(skipped) > 3)
    return f"{root}: skipped {len(skipped)} of its files or frames ({reasons}): {names}"
