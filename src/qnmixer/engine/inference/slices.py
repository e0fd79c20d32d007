"""Slices to reconstruct, streamed one at a time from a file or a folder of files, at their own size."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydicom.dataset import FileDataset

from qnmixer.engine.data.cache import list_files
from qnmixer.engine.data.deeplesion import read_hu_png
from qnmixer.engine.data.dicom import decode_frame, frame_count, open_ct, pixel_spacing
from qnmixer.engine.data.numpy_files import open_slices, read_frame
from qnmixer.engine.data.slices import (
    NO_AIR,
    NO_SPACING,
    FloatArray,
    SkipFile,
    clean_hu,
    doubt,
    reading,
    summarise_skipped,
)
from qnmixer.errors import DataError

_NPY_MAGIC, _PNG_MAGIC = b"\x93NUMPY", b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class InputSlice:
    """A slice to reconstruct.

    Attributes:
        hu: [H, W] float32, padding set to air.
        name: file relative to the given folder, and `#frame` if the file has several frames.
        template: the DICOM file of the slice, for `write_dicom`; None for other formats.
        frame: number of the frame in the file.
        spacing: mm between its rows and between its columns; None if the file has none.
    """

    hu: FloatArray
    name: str
    template: FileDataset | None
    frame: int
    spacing: tuple[float, float] | None


class InputSlices:
    """The slices of a path: a DICOM file (any number of frames), a `.npy`, a 16-bit PNG, or a folder of these.

    Iterating decodes one slice at a time. A file that is named directly must be usable. In a folder, unusable files are
    left out and listed in `skipped` (`warnings` puts them into one line).

    Args:
        path: a file or folder.
        true_size: leave out DICOM without a pixel size.

    Raises:
        DataError: the path is missing, or contains nothing usable.
    """

    def __init__(self, path: Path, *, true_size: bool = False) -> None:
        self.path, self.single, self.true_size = path, path.is_file(), true_size
        self.files = [path.name] if self.single else [file.path for file in list_files(path, key="input")]
        self.root = path.parent if self.single else path
        self.skipped: list[tuple[str, str]] = []
        self.lowest = np.inf  # HU, of all slices so far

    def __iter__(self) -> Iterator[InputSlice]:
        self.skipped = []
        found = False
        for file in self.files:
            for piece in self.read(file):
                found = True
                yield piece
        if not found:
            why = summarise_skipped(str(self.path), self.skipped)
            raise DataError(f"input has no usable slice ({why}): give CT in DICOM, HU in .npy or 16-bit PNG")

    def read(self, file: str) -> Iterator[InputSlice]:
        """The slices of one of `files`. If the file is unusable, it is added to `skipped`."""
        try:
            n_frames, template, decode = _open(self.root / file)
        except SkipFile as reason:
            self._skip(file, reason)
            return
        for frame in range(n_frames):
            name = f"{file}#{frame}" if n_frames > 1 else file
            try:
                spacing = None if template is None else pixel_spacing(template, frame)
                if self.true_size and template is not None and spacing is None:
                    raise SkipFile(NO_SPACING)
                hu = clean_hu(decode(frame))
            except SkipFile as reason:
                self._skip(name, reason)
                continue
            self.lowest = min(self.lowest, float(hu.min()))
            yield InputSlice(hu, name, template, frame, spacing)

    def warnings(self) -> Iterator[str]:
        """Lines about skipped files, and about values that are probably not HU."""
        if self.skipped:
            yield summarise_skipped(str(self.path), self.skipped)
        if np.inf > self.lowest > NO_AIR:
            yield doubt(str(self.path))

    def _skip(self, name: str, reason: SkipFile) -> None:
        """Record an unusable file of a folder. Raises for a file that is named directly."""
        if self.single:
            raise DataError(
                f"input={self.path}: {name} cannot be used ({reason}): give CT in DICOM, HU in .npy or 16-bit PNG"
            )
        self.skipped.append((name, str(reason)))


def _open(path: Path) -> tuple[int, FileDataset | None, Callable[[int], FloatArray]]:
    """(number of slices, DICOM dataset if it is one, decoder of slice i). The first bytes show the format."""
    with reading("unreadable"), path.open("rb") as stream:
        magic = stream.read(8)
    if magic.startswith(_NPY_MAGIC):
        return len(open_slices(path)), None, lambda frame: read_frame(path, frame)
    if magic == _PNG_MAGIC:
        return 1, None, lambda frame: read_hu_png(path)
    dataset = open_ct(path)
    return frame_count(dataset), dataset, lambda frame: decode_frame(dataset, frame)
