"""How a slice gets the size of the network, and the cache of slices that have it.

A cache is a file of float32 pixels [N, S, S] in HU, and an index beside it. The name of both is a digest of their
sources, the format and the file of the reader, so a change of these builds a new cache. The index is written last, by
an atomic rename. One process builds under a lock file. The others wait and then read.

The index has a digest of itself and a digest of each slice. The latter is checked when the slice is read, in 0.3 ms for
256 × 256 pixels. A check of all slices at the start would read the whole file.
"""

import inspect
import json
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from multiprocessing import reduction
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from filelock import FileLock
from torch.nn import functional

from qnmixer.data.fingerprints import look, original
from qnmixer.data.slices import (
    COPY,
    NO_SPACING,
    SkipFile,
    Slice,
    SliceInfo,
    UnitSigns,
    clean_hu,
    require_content,
    summarise_skipped,
    unit_signs,
)
from qnmixer.errors import DataError
from qnmixer.files import (
    atomic_file,
    check_there,
    default_cache_dir,
    digest,
    digest_of_bytes,
    is_temporary,
    make_own_folder,
    path_of,
    write_text,
)
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.units import AIR, FloatArray
from qnmixer.runs.terminal import Console, progress
from qnmixer.settings.data import FolderData

# The grid of the network


def square_padding(shape: tuple[int, int]) -> tuple[int, int, int]:
    """(side, rows, columns): side of the square that holds a slice, and its offset in it."""
    side = max(shape)
    return side, (side - shape[0]) // 2, (side - shape[1]) // 2


def to_square(hu: FloatArray, size: int) -> FloatArray:
    """Pad [H, W] with air to a square, then resample to [size, size]: bilinear with antialiasing, as in most papers."""
    side, row, column = square_padding((hu.shape[0], hu.shape[1]))
    square = np.full((side, side), AIR, np.float32)
    square[row : row + hu.shape[0], column : column + hu.shape[1]] = hu
    if side == size:
        return square
    image = torch.from_numpy(square)[None, None]
    resampled = functional.interpolate(image, (size, size), mode="bilinear", antialias=True, align_corners=False)
    return resampled[0, 0].numpy()


def to_grid(hu: FloatArray, spacing: tuple[float, float] | None, size: int, field_of_view: float | None) -> FloatArray:
    """[H, W] as [size, size]: at its true size in the middle of a field, bilinear with antialiasing.

    Parts of the slice outside the field are cut. Pixels that the slice does not cover are air. With an unknown
    `spacing` (mm between its rows and between its columns) or `field_of_view` (mm of the grid), the slice fills the
    whole image.
    """
    if field_of_view is None or spacing is None:
        return to_square(hu, size)
    step = field_of_view / size
    rows, columns = (_resampling_weights(n, mm, size, step) for n, mm in zip(hu.shape, spacing, strict=True))
    return rows @ (hu - np.float32(AIR)) @ columns.T + np.float32(AIR)


def _resampling_weights(n: int, mm: float, size: int, step: float) -> FloatArray:
    """The weight of each of n pixels of `mm` in each of `size` pixels of `step`, [size, n].

    Both rows of pixels are centred on 0.
    """
    centres = (np.arange(size) - (size - 1) / 2) * (step / mm) + (n - 1) / 2  # in pixels of the slice
    reach = max(1.0, step / mm)
    pixels = np.ceil(centres - reach).astype(int)[:, None] + np.arange(int(2 * reach) + 1)
    weights = np.maximum(0.0, 1.0 - np.abs(pixels - centres[:, None]) / reach)
    weights /= weights.sum(axis=1, keepdims=True)  # pixels beyond the slice are air, and count in the mean
    row, near = np.nonzero((pixels >= 0) & (pixels < n))
    matrix = np.zeros((size, n), np.float32)
    matrix[row, pixels[row, near]] = weights[row, near]
    return matrix


# The cache

_CACHE_FORMAT = 10  # raise it when caches get other slices or other values, or another layout
_PIXEL = np.dtype("<f4")


class Reader(Protocol):
    """Decodes the files of one kind."""

    kind: str
    wanted: str

    def read(self, root: Path, path: str) -> Iterator[Slice]:
        """The slices of one file. Raises SkipFile if the file, or after the last slice if a frame, cannot be used."""
        ...


class _Stream:
    """A file that stays open until the object is gone, also in the data workers, whichever way they start."""

    def __init__(self, path: Path, duplicate: Any = None) -> None:
        self._path = path
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)  # Windows has it
        self._descriptor = os.open(path, flags) if duplicate is None else duplicate.detach()
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, length: int, offset: int) -> bytes:
        """Bytes of the file, fewer at its end."""
        if hasattr(os, "pread"):  # processes share the position of an open file, and pread does not use it
            return os.pread(self._descriptor, length, offset)
        os.lseek(self._descriptor, offset, os.SEEK_SET)
        return os.read(self._descriptor, length)

    def __reduce__(self) -> tuple[Any, ...]:
        # Only Windows keeps an open file from being removed, so that its path will do.
        return _Stream, (self._path, None if os.name == "nt" else reduction.DupFd(self._descriptor))


class SliceCache:
    """Decoded slices [S, S] of one folder, sorted by patient, series and position."""

    endless = False

    def __init__(self, pixels: Path, shape: tuple[int, int], index: dict[str, Any]) -> None:
        self._file, self._shape, self._rows = pixels, shape, index["rows"]
        # Open as long as the cache is in use: the file may be removed meanwhile, when the folder has changed.
        self._stream = _Stream(pixels)
        self.infos = [SliceInfo(**info) for info in index["infos"]]
        self.digests: list[int] = index["digests"]  # of their pixels
        # Before they were resampled, see `qnmixer.data.fingerprints`.
        self.originals: list[int] = index["originals"]
        self.looks: list[list[int]] = index["looks"]
        self.skipped: list[tuple[str, str]] = [(name, reason) for name, reason in index["skipped"]]  # files of no use
        self.signs = [UnitSigns(*sign) for sign in index["signs"]]
        self.clashes: list[str] = index["clashes"]  # names of slices with the UID of another one, but other pixels

    def __len__(self) -> int:
        return len(self.infos)

    def load(self, index: int) -> FloatArray:
        """Slice [S, S] in HU, or sinogram [V, D], float32, as a copy that the caller may change.

        Raises DataError if it is damaged.
        """
        # Read, not mapped: with a map, a file that gets shorter would end the process with SIGBUS.
        length = math.prod(self._shape) * _PIXEL.itemsize
        pixels = self._stream.read(length, self._rows[index] * length)
        if digest_of_bytes(memoryview(pixels)) != self.digests[index]:
            self._file.with_suffix(".json").unlink(missing_ok=True)
            raise DataError(f"{self._file} has changed on the disk at {self.name(index)}: start again to rebuild it")
        return np.frombuffer(pixels, _PIXEL).reshape(self._shape).copy()

    sinogram = load  # of a folder of measured sinograms, which has no slices

    def name(self, index: int) -> str:
        """The file (and frame) of the slice."""
        return self.infos[index].name


def list_files(root: Path, *, leave_out: Path | None = None, key: str = "data.root") -> list[str]:
    """Every file below root, to any depth, sorted, as paths relative to it. Hidden files are left out.

    Raises DataError, which names the key, if there are none.
    """
    check_there(key, str(root), "the folder with the slices")
    relative_paths: list[str] = []
    visited_folders = {leave_out and os.path.realpath(leave_out)}
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited_folders:  # by a link
            subfolders.clear()
            continue
        visited_folders.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(files) if not name.startswith("."))
        relative_paths += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    if not relative_paths:
        raise DataError(f"{key}={root} is empty (no file at any depth): give the folder with the slices")
    return relative_paths


def open_cache(
    config: FolderData, image_size: int, field_of_view: float | None = None, scan: FanBeamGeometry | None = None
) -> SliceCache:
    """The decoded slices of a folder: from the cache if it is complete and up to date, else decoded now.

    `field_of_view`: mm that an image covers, each slice at its true size; None: a slice fills the whole image. `scan`:
    of a folder of sinograms [V, D].

    Raises:
        DataError: the folder is missing, empty, or contains no usable slice; or other users may have written the cache.
        OSError: the disk is full. No half-written file stays.
    """
    reader: Reader = config.build(supplied={} if scan is None else {"geometry": scan, "hu_max": config.hu_max})
    shape = (image_size, image_size) if scan is None else (scan.n_views, scan.n_detectors)
    root, cache_dir = path_of(str(config.root)), path_of(config.cache_dir or default_cache_dir())
    files = list_files(root, leave_out=cache_dir)
    matches = [path for path in files if fnmatch(path, config.include)]
    if not matches:
        raise DataError(f"data.include={config.include} matches none of {len(files)} files below {root}: {files[0]}, …")
    reader_identity = [config.target, sorted(config.arguments.items())]
    of_scan = [] if scan is None else [asdict(scan), config.hu_max]
    identity = [*reader_identity, str(root.resolve()), config.include, image_size, field_of_view, *of_scan]
    folder = cache_dir / f"{root.resolve().name}-{reader.kind}-{image_size}-{digest(identity)}"
    # A program can set the time of the last change, as `cp -p` does, but not ctime, which every change updates.
    states = ((path, os.stat(root / path)) for path in matches)
    versions = [[path, state.st_size, state.st_mtime_ns, state.st_ctime_ns] for path, state in states]
    # Not in `identity`: after a change of the code the old cache makes way for the new one.
    code = digest_of_bytes(Path(inspect.getfile(type(reader))).read_bytes())
    pixels = folder / f"{digest([_CACHE_FORMAT, identity, versions, code])}.f32"
    try:
        make_own_folder(folder)
    except PermissionError as error:
        raise DataError(
            f"{error.filename} cannot keep slices ({error.strerror}): give a folder of your own, data.cache_dir=…"
        ) from error
    with FileLock(folder / "lock"):
        index = _read_index(pixels, shape)
        if index is None:
            decoding = _Decoding(reader, root, image_size, field_of_view, config.section, of_sinograms=scan is not None)
            index = _build_cache(decoding, matches, pixels)
        return SliceCache(pixels, shape, index)


def _read_index(pixels: Path, shape: tuple[int, int]) -> dict[str, Any] | None:
    """The index of a complete cache, or None."""
    file = pixels.with_suffix(".json")
    if not (file.is_file() and pixels.is_file()):  # opening a pipe may never end
        return None
    try:
        index: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        is_whole = index.pop("digest") == digest(index)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    is_whole = is_whole and pixels.stat().st_size == len(index["infos"]) * math.prod(shape) * _PIXEL.itemsize
    return index if is_whole else None


def _build_cache(decoding: "_Decoding", files: Sequence[str], pixels: Path) -> dict[str, Any]:
    """Decode all files into a new cache file, then commit it by writing the index. Returns the index."""
    # A killed process may have left these. The caller holds the lock, so nobody else writes here.
    for leftover in filter(is_temporary, pixels.parent.iterdir()):
        leftover.unlink()
    with atomic_file(pixels) as stream:
        for file in progress(files, len(files), f"decoding {decoding.root.name}", "file", Console(stderr=True)):
            decoding.add_file(file, stream)
        index = decoding.index()
    write_text(pixels.with_suffix(".json"), json.dumps(index | {"digest": digest(index)}))
    # The version before this one stays for a folder that changes back. A run keeps what it has opened anyway.
    for pixel_file in sorted(pixels.parent.glob("*.f32"), key=lambda path: path.stat().st_mtime)[:-2]:
        pixel_file.unlink()
        pixel_file.with_suffix(".json").unlink(missing_ok=True)
    return index


@dataclass
class _Decoding:
    """The slices of a folder while its files are decoded one by one, for `open_cache`."""

    reader: Reader
    root: Path
    size: int
    field_of_view: float | None
    section: str  # for messages
    of_sinograms: bool  # which are stored as the reader gives them
    _rows: list[tuple[SliceInfo, dict[str, Any]]] = field(default_factory=list)  # of the index, in decoding order
    _skipped: list[tuple[str, str]] = field(default_factory=list)
    _contents: dict[str, set[int]] = field(default_factory=dict)  # digests of the slices with the same UID
    _clashes: list[str] = field(default_factory=list)

    def add_file(self, file: str, stream: IO[bytes]) -> None:
        """Write the pixels of each slice of a file to the stream. A file or slice of no use is noted as skipped."""
        try:
            for piece in self.reader.read(self.root, file):
                try:
                    hu = self._checked(piece)
                except SkipFile as reason:
                    self._skipped.append((piece.info.name, str(reason)))
                else:
                    self._add(piece, hu, stream)
        except SkipFile as reason:  # of the whole file, or after its last slice
            self._skipped += reason.frames or [(file, str(reason))]

    def _checked(self, piece: Slice) -> FloatArray:
        """HU of a slice as its file has it. Raises SkipFile for one that the cache does not take, or that it has."""
        if self.of_sinograms:
            return piece.hu
        # Before it is resampled, so that every size has the same slices.
        hu = clean_hu(piece.hu)
        require_content(hu)
        if self.field_of_view is not None and piece.spacing is None:
            raise SkipFile(f"{NO_SPACING}, which data.pixel_size=header needs")
        # A copy has the UID and the pixels of another slice. With other pixels, the UID is wrong, and both count.
        if piece.uid:
            known, content = self._contents.setdefault(piece.uid, set()), digest_of_bytes(hu.tobytes())
            if content in known:
                raise SkipFile(f"{COPY} (SOPInstanceUID)")
            if known:
                self._clashes.append(piece.info.name)
            known.add(content)
        return hu

    def _add(self, piece: Slice, hu: FloatArray, stream: IO[bytes]) -> None:
        """Write a slice on the grid of the network, and note what the index says of it."""
        of_grid = hu if self.of_sinograms else to_grid(hu, piece.spacing, self.size, self.field_of_view)
        pixels = of_grid.astype(_PIXEL, copy=False).tobytes()
        stream.write(pixels)
        row = {
            "infos": asdict(piece.info),
            "digests": digest_of_bytes(pixels),
            "originals": original(hu),
            "looks": look(hu),
            "rows": len(self._rows),
            "signs": unit_signs(hu, piece.info),
        }
        self._rows.append((piece.info, row))

    def index(self) -> dict[str, Any]:
        """The index of all slices, sorted by patient, series and position. Raises DataError if there are none."""
        if not self._rows:
            reasons = summarise_skipped(str(self.root), self._skipped, self.section)
            raise DataError(f"data.root has no usable slice ({reasons}): give a folder with {self.reader.wanted}")
        # Pixels stay in the order of decoding: sorting them would need all of them in memory. `rows` has the order.
        rows = [row for _, row in sorted(self._rows, key=lambda pair: pair[0].order)]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        return columns | {"skipped": self._skipped, "clashes": self._clashes}
