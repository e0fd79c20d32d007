"""How a slice gets the size of the network, and the cache of slices that have it.

A cache is a file of float32 pixels [N, S, S] in HU, and an index beside it. The name of both is a digest of their
sources, the format and the file of the reader, so a change of these builds a new cache. The index is written last, by
an atomic rename. One process builds under a lock file. The others wait and then read.

The index has a digest of itself and a digest of each slice. The latter is checked when the slice is read, in 0.3 ms for
256 × 256 pixels. A check of all slices at the start would read the whole file.
"""

import inspect
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from filelock import FileLock
from rich.progress import track
from torch.nn import functional

from qnmixer.engine.config.data import FolderData
from qnmixer.engine.data.slices import (
    AIR,
    NO_SPACING,
    FloatArray,
    SkipFile,
    Slice,
    SliceInfo,
    clean_hu,
    is_no_hu,
    require_content,
    summarise_skipped,
)
from qnmixer.engine.reports.terminal import Console
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

# The grid of the network


def square_padding(shape: tuple[int, int]) -> tuple[int, int, int]:
    """(side, rows, columns): side of the square that holds a slice, and its offset in it."""
    side = max(shape)
    return side, (side - shape[0]) // 2, (side - shape[1]) // 2


def to_square(hu: FloatArray, size: int) -> FloatArray:
    """Pad [H, W] with air to a square, then resample to [size, size]: bilinear with antialiasing, as in most papers."""
    side, top, left = square_padding((hu.shape[0], hu.shape[1]))
    square = np.full((side, side), AIR, np.float32)
    square[top : top + hu.shape[0], left : left + hu.shape[1]] = hu
    if side == size:
        return square
    image = torch.from_numpy(square)[None, None]
    return functional.interpolate(image, (size, size), mode="bilinear", antialias=True, align_corners=False)[
        0, 0
    ].numpy()


def to_grid(hu: FloatArray, spacing: tuple[float, float] | None, size: int, field_of_view: float | None) -> FloatArray:
    """[H, W] as [size, size]: at its true size in the middle of a field, bilinear with antialiasing.

    Parts of the slice outside the field are cut. Pixels that the slice does not cover are air.

    Args:
        hu: the slice.
        spacing: mm between its rows and between its columns; None: unknown, so it fills the whole image.
        size: rows and columns of the grid.
        field_of_view: mm that they cover; None: each slice fills the whole image.
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
    wanted = (np.arange(size) - (size - 1) / 2) * (step / mm) + (n - 1) / 2  # in pixels of the slice
    reach = max(1.0, step / mm)
    pixels = np.ceil(wanted - reach).astype(int)[:, None] + np.arange(int(2 * reach) + 1)
    weights = np.maximum(0.0, 1.0 - np.abs(pixels - wanted[:, None]) / reach)
    weights /= weights.sum(axis=1, keepdims=True)  # pixels beyond the slice are air, and count in the mean
    row, near = np.nonzero((pixels >= 0) & (pixels < n))
    found = np.zeros((size, n), np.float32)
    found[row, pixels[row, near]] = weights[row, near]
    return found


# The cache

_CACHE_FORMAT = 8
"""Raise it when caches get other slices or other values, or another layout."""
_PIXEL = np.dtype("<f4")


class Reader(Protocol):
    """Decodes the files of one kind."""

    kind: str
    wanted: str

    def read(self, root: Path, path: str) -> Iterator[Slice]:
        """The slices of one file. Raises SkipFile if the file cannot be used."""
        ...


class SliceCache:
    """Decoded slices [S, S] of one folder, sorted by patient, series and position.

    Attributes:
        infos: the origin of each slice.
        digests: digests of the pixels of each slice.
        skipped: (name, reason) of files that could not be used.
        lowest: the smallest value of all slices, HU.
    """

    endless = False

    def __init__(self, pixels: Path, size: int, index: dict[str, Any]) -> None:
        self._file, self._size, self._rows = pixels, size, index["rows"]
        self.infos = [SliceInfo(**info) for info in index["infos"]]
        self.digests: list[int] = index["digests"]
        self.skipped: list[tuple[str, str]] = [(name, reason) for name, reason in index["skipped"]]
        self.lowest: float = index["lowest"]

    def __len__(self) -> int:
        return len(self.infos)

    def load(self, index: int) -> FloatArray:
        """Slice [S, S] in HU, float32, as a copy that the caller may change. Raises DataError if it is damaged."""
        # Read, not mapped: with a map, a file that gets shorter would end the process with SIGBUS.
        n = self._size**2
        pixels = np.fromfile(self._file, _PIXEL, n, offset=self._rows[index] * n * _PIXEL.itemsize)
        if digest_of_bytes(pixels.data) != self.digests[index]:
            self._file.with_suffix(".json").unlink(missing_ok=True)
            raise DataError(f"{self._file} has changed on the disk at {self.name(index)}: start again to rebuild it")
        return pixels.reshape(self._size, self._size)

    def name(self, index: int) -> str:
        """The file (and frame) of the slice."""
        return self.infos[index].name


def list_files(root: Path, *, leave_out: Path | None = None, key: str = "data.root") -> list[str]:
    """Every file below root, to any depth, sorted, as paths relative to it. Hidden files are left out.

    Raises DataError, which names the key, if there are none.
    """
    check_there(key, str(root), "the folder with the slices")
    found: list[str] = []
    seen = {leave_out and os.path.realpath(leave_out)}
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # by a link
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(files) if not name.startswith("."))
        found += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    if not found:
        raise DataError(f"{key}={root} is empty (no file at any depth): give the folder with the slices")
    return found


def open_cache(config: FolderData, image_size: int, field_of_view: float | None = None) -> SliceCache:
    """The decoded slices of a folder: from the cache if it is complete and up to date, else decoded now.

    Args:
        config: of the folder.
        image_size: rows and columns that slices are resampled to.
        field_of_view: mm that an image covers, each slice at its true size; None: a slice fills the whole image.

    Raises:
        DataError: the folder is missing, empty, or contains no usable slice; or other users may have written the cache.
        OSError: the disk is full. No half-written file stays.
    """
    reader: Reader = config.build()
    root, cache_dir = path_of(str(config.root)), default_cache_dir()
    if config.cache_dir:
        cache_dir = path_of(config.cache_dir)
    files = list_files(root, leave_out=cache_dir)
    chosen = [path for path in files if fnmatch(path, config.include)]
    if not chosen:
        raise DataError(f"data.include={config.include} matches none of {len(files)} files below {root}: {files[0]}, …")
    its_reader = [config.target, sorted(config.arguments.items())]
    what = [*its_reader, str(root.resolve()), config.include, image_size, field_of_view]
    folder = cache_dir / f"{root.resolve().name}-{reader.kind}-{image_size}-{digest(what)}"
    # A program can set the time of the last change, as `cp -p` does, but not ctime, which every change updates.
    states = ((path, os.stat(root / path)) for path in chosen)
    versions = [[path, its.st_size, its.st_mtime_ns, its.st_ctime_ns] for path, its in states]
    # Not in `what`: after a change of the code the old cache makes way for the new one.
    code = digest_of_bytes(Path(inspect.getfile(type(reader))).read_bytes())
    pixels = folder / f"{digest([_CACHE_FORMAT, what, versions, code])}.f32"
    try:
        make_own_folder(folder)
    except PermissionError as error:
        raise DataError(
            f"{error.filename} cannot keep slices ({error.strerror}): give a folder of your own, data.cache_dir=…"
        ) from error
    with FileLock(folder / "lock"):
        index = _read_index(pixels, image_size)
        if index is None:
            index = _build_cache(reader, root, chosen, pixels, image_size, field_of_view)
        return SliceCache(pixels, image_size, index)


def _read_index(pixels: Path, size: int) -> dict[str, Any] | None:
    """The index of a complete cache, or None."""
    file = pixels.with_suffix(".json")
    if not (file.is_file() and pixels.is_file()):  # opening a pipe may never end
        return None
    try:
        index: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        is_whole = index.pop("digest") == digest(index)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    is_whole = is_whole and pixels.stat().st_size == len(index["infos"]) * size**2 * _PIXEL.itemsize
    return index if is_whole else None


def _build_cache(
    reader: Reader, root: Path, files: Sequence[str], pixels: Path, size: int, field_of_view: float | None
) -> dict[str, Any]:
    """Decode all files into a new cache file, then commit it by writing the index. Returns the index."""
    # A killed process may have left these. The caller holds the lock, so nobody else writes here.
    for stale in filter(is_temporary, pixels.parent.iterdir()):
        stale.unlink()
    with atomic_file(pixels) as stream:
        index = _decode_all(reader, root, files, stream, size, field_of_view)
    write_text(pixels.with_suffix(".json"), json.dumps(index | {"digest": digest(index)}))
    # The version before this one stays: a run may read it.
    for older in sorted(pixels.parent.glob("*.f32"), key=lambda it: it.stat().st_mtime)[:-2]:
        older.unlink()
        older.with_suffix(".json").unlink(missing_ok=True)
    return index


def _decode_all(
    reader: Reader, root: Path, files: Sequence[str], stream: IO[bytes], size: int, field_of_view: float | None
) -> dict[str, Any]:
    """Decode the files one by one into the stream. Returns their index, sorted by patient, series and position."""
    infos: list[SliceInfo] = []
    digests: list[int] = []
    skipped: list[tuple[str, str]] = []
    low, high = np.inf, -np.inf
    console = Console(stderr=True)
    hidden = not console.is_terminal
    for file in track(files, f"Decoding {root.name}", console=console, transient=True, disable=hidden):
        try:
            for piece in reader.read(root, file):
                try:  # before it is resampled, so that every size has the same slices
                    hu = clean_hu(piece.hu)
                    require_content(hu)
                    if field_of_view is not None and piece.spacing is None:
                        raise SkipFile(f"{NO_SPACING}, which data.pixel_size=header needs")
                except SkipFile as reason:
                    skipped.append((piece.info.name, str(reason)))
                    continue
                pixels = to_grid(hu, piece.spacing, size, field_of_view).astype(_PIXEL, copy=False).tobytes()
                stream.write(pixels)
                digests.append(digest_of_bytes(pixels))
                infos.append(piece.info)
                low, high = min(low, float(hu.min())), max(high, float(hu.max()))
        except SkipFile as reason:
            skipped.append((file, str(reason)))
    if not infos:
        what = summarise_skipped(str(root), skipped)
        raise DataError(f"data.root has no usable slice ({what}): give a folder with {reader.wanted}")
    if is_no_hu(low, high):
        raise DataError(
            f"data.root={root} has values from {low:g} to {high:g}, which are not HU (air −1000, water 0): "
            "save the slices in HU"
        )
    # Pixels stay in the order of decoding: sorting them would need all of them in memory. `rows` has the order.
    rows = sorted(range(len(infos)), key=lambda row: infos[row].order)
    return {
        "infos": [asdict(infos[row]) for row in rows],
        "digests": [digests[row] for row in rows],
        "rows": rows,
        "skipped": skipped,
        "lowest": low,
    }
