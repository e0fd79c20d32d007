"""Decoded slices with the data to sort and split them, and skipped files."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from qnmixer.errors import DataError
from qnmixer.physics.units import AIR, FloatArray
from qnmixer.runs.processes.process import rank

NO_SPACING = "no pixel size in the file"
DERIVED = "a derived image"
COPY = "a copy of another file"
_BELOW_AIR = -1024.0
NO_AIR = -500.0  # HU, between air and tissue; lungs may be on either side
_BONE = 500.0
DENSEST = 32767.0  # HU, the largest value of metal that a scanner's 16 bits can store
LEAST_SIDE, _MOST_SIDE = 8, 8192
"""Pixels of a side. A network's image has at least 8. A slice with more than 8192 would need gigabytes."""


class SkipFile(Exception):
    """A file or frame that cannot be used. The message is the reason in a few words."""

    def __init__(self, reason: str, frames: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(reason)
        self.frames = frames  # (name, reason) of each, if only some frames of a file cannot be used


def warn_once(line: str) -> None:
    """Warn once per run, not in every process."""
    if rank() == 0:
        warnings.warn(line, stacklevel=3)


@contextmanager
def reading(problem: str) -> Iterator[None]:
    """Turn any error of the block into SkipFile with this problem: on damaged files libraries raise any type.

    MemoryError stays MemoryError. Warnings of libraries are hidden.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except (SkipFile, MemoryError):
        raise
    except Exception as error:
        raise SkipFile(f"{problem} ({type(error).__name__})") from error


@contextmanager
def usable(place: Path | str, fix: str = "") -> Iterator[None]:
    """Raise DataError, which names the file or slice and how to fix it, for a SkipFile of the block."""
    try:
        yield
    except SkipFile as reason:
        raise DataError(f"{place} cannot be used ({reason})" + (fix and f": {fix}")) from reason


def require_size(rows: int, columns: int, least: int = LEAST_SIDE) -> None:
    """Raise SkipFile for a slice or sinogram that is too small or too large, before it is read."""
    if not least <= min(rows, columns) <= max(rows, columns) <= _MOST_SIDE:
        raise SkipFile(f"{rows} × {columns} values, not {least} to {_MOST_SIDE} a side")


@dataclass(frozen=True)
class SliceInfo:
    """The origin of a slice."""

    path: str  # file, relative to the root, with forward slashes
    frame: int  # number of the frame or stack entry in the file
    n_frames: int  # frames in the file
    patient: str  # the patient's name or number
    series: str  # the scan of the patient
    position: float  # sorts the slices of a series. It is the position along the patient in mm, or a number, or 0
    uids: str = ""  # StudyInstanceUID and SeriesInstanceUID with a space between, or empty. Each is of one patient only

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
    """One decoded slice, [H, W] in HU, and its origin."""

    info: SliceInfo
    hu: FloatArray
    spacing: tuple[float, float] | None = None  # mm between its rows and between its columns; None: not in the file
    uid: str = ""  # SOPInstanceUID, and the frame, which are the same in each copy of a file; empty: not in the file
    template: Any = None  # pydicom's dataset of the file, for what is reconstructed from it; None for other formats


@dataclass(frozen=True)
class OpenFile:
    """A file of slices, which are decoded one at a time."""

    n_frames: int  # the number of its slices
    decode: Callable[[int], FloatArray]  # one of them as HU [H, W]. Raises SkipFile
    # In mm: between its rows and between its columns; None if the file has none
    spacing: Callable[[int], tuple[float, float] | None] = lambda _: None
    dataset: Any = None  # of pydicom; None for a format that is not DICOM


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
    if hu.max() > DENSEST:
        raise SkipFile(f"values above {DENSEST:g}, which are no HU")
    return np.where(hu < _BELOW_AIR, np.float32(AIR), hu).astype(np.float32, copy=False)


def require_content(hu: FloatArray) -> None:
    """Raise SkipFile for a slice of air only, or of one constant value."""
    if hu.max() < NO_AIR:
        raise SkipFile("nothing but air in the slice")
    if hu.max() == hu.min():
        raise SkipFile("all pixels have the same value")
    if is_no_hu(float(hu.min()), float(hu.max())):
        raise SkipFile("values from −1 to 2, which are not HU")


def is_no_hu(low: float, high: float) -> bool:
    """Whether slices with this range are in another unit, such as attenuation or x in [0, 1]."""
    return low >= -1 and high <= 2


class UnitSigns(NamedTuple):
    """What a slice shows of its unit and of the order of its axes."""

    has_air: bool  # whether a pixel is below −500 HU
    is_shifted: bool  # whether it looks like HU + 1024 with padding: no air but flat padding, and much "bone"
    tissue: float  # share of the pixels above −500 HU
    is_turned: bool  # whether its `.npy` stack may be [H, W, N]: two equal sides first, and another one last


def unit_signs(hu: FloatArray, info: SliceInfo) -> UnitSigns:
    """The signs of a slice [H, W] as its file has it, after `clean_hu`."""
    tissue = hu > NO_AIR
    has_real_air = (~tissue & (hu != AIR)).any()  # padding is flat
    # Real slices in HU without such air have bone in less than 5 % of their tissue. Those in HU + 1024 have over 10 %.
    is_shifted = not has_real_air and (hu > _BONE).sum() > 0.1 * tissue.sum()
    is_turned = info.path.lower().endswith(".npy") and info.n_frames == hu.shape[0] != hu.shape[1]
    return UnitSigns(bool(hu.min() < NO_AIR), bool(is_shifted), round(float(tissue.mean()), 6), is_turned)


def doubted(groups: Sequence[str], signs: Sequence[UnitSigns]) -> list[str]:
    """The groups of slices, such as patients, that do not look like HU. `groups` has the group of each slice.

    Planes of a turned stack show no unit.
    """
    signs_by_group: dict[str, list[UnitSigns]] = {}
    for group, sign in zip(groups, signs, strict=True):
        if not sign.is_turned:
            signs_by_group.setdefault(group, []).append(sign)
    # A slice of one patient may have no air, or little tissue. All of them together have both.
    return sorted(
        group
        for group, group_signs in signs_by_group.items()
        if any(sign.is_shifted for sign in group_signs)
        or not any(sign.has_air for sign in group_signs)
        or sum(sign.tissue for sign in group_signs) < 0.01 * len(group_signs)
    )


def shortlist(names: Sequence[str]) -> str:
    """The first names of a list, for a message."""
    return ", ".join(names[:8]) + ", …" * (len(names) > 8)


def unit_warnings(
    root: str, groups: Sequence[str], noun: str, files: Sequence[str], signs: Sequence[UnitSigns]
) -> Iterator[str]:
    """Warnings about groups that do not look like HU, and about `.npy` stacks that may be [H, W, N].

    The groups (`noun`: what they are), the files below the root, and the signs are those of each slice.
    """
    if names := doubted(groups, signs):
        yield (
            f"{root}: {len(names)} of {len({*groups})} {noun} ({shortlist(names)}) have no air near −1000 HU, or "
            "hardly any tissue; is this really in HU (air −1000, water 0)? If not, save it in HU: subtract 1024 from "
            "HU + 1024"
        )
    if stacks := sorted({file for file, sign in zip(files, signs, strict=True) if sign.is_turned}):
        path = str(Path(root, stacks[0]))
        yield (
            f"{root}: {len(stacks)} .npy stacks are read as [N, H, W], but their first two sides are equal, as in "
            f"[H, W, N] ({shortlist(stacks)}). Turn such a stack: numpy.save({path!r}, "
            f"numpy.moveaxis(numpy.load({path!r}), -1, 0)); what nibabel gives, with numpy.load(…).T"
        )


def summarise_skipped(root: str, skipped: Sequence[tuple[str, str]], section: str | None = None) -> str:
    """One line: how many files were skipped, why, and the first names, from (name, reason) of each.

    `section`: of the config, whose key `derived` takes derived images; None if there is none.
    """
    reasons = "; ".join(f"{count} {reason}" for reason, count in Counter(r for _, r in skipped).most_common())
    names = ", ".join(name for name, _ in skipped[:3]) + ", …" * (len(skipped) > 3)
    line = f"{root}: skipped {len(skipped)} of its files or frames ({reasons}): {names}"
    if not any(reason.startswith(DERIVED) for _, reason in skipped):
        return line
    if section is None:
        return f"{line}; to take derived images, save them as .npy in HU"
    key = f"{'' if section == 'data' else '++'}{section}.derived"  # a source of a mix has only some keys written out
    return f"{line}; {key}=true takes derived images"
