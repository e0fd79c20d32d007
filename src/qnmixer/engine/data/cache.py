"""The cache of decoded slices: one float32 memory map [N, S, S] in HU for a folder, and an index beside it.

The index is written last, by an atomic rename. A cache is built again if it has no index, or if its sources, format or
size, or the code of the user's own reader, differ from its index. One process builds it under a lock file. The others
wait and then read.

The index has a digest of itself and a digest of each slice. The latter is checked when the slice is read, in 0.3 ms for
256 × 256 pixels. A check of all slices at the start would read the whole file.
"""

import inspect
import io
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from filelock import FileLock
from rich.console import Console
from rich.progress import Progress

from qnmixer.engine.data.resample import CutTissue, Grid
from qnmixer.engine.data.slices import (
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
from qnmixer.errors import DataError
from qnmixer.files import (
    atomic_file,
    default_cache_dir,
    digest,
    digest_of_bytes,
    is_open_to_all,
    is_temporary,
    write_text,
)

_FORMAT = 3
"""Raise it when caches get other slices or other values, or another layout."""
_ROW = np.dtype("<f4")
_INDEX = "index.json"


class Reader(Protocol):
    """Decodes the files of one kind."""

    kind: str
    wanted: str

    def read(self, root: Path, path: str) -> Iterator[Slice]:
        """The slices of one file. Raises SkipFile if the file cannot be used."""
        ...


@dataclass(frozen=True)
class SourceFile:
    """A source file at the time when the cache was built.

    A program can set mtime, the time of the last change, as `cp -p` does. No program can set ctime, which every change
    updates.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int


class SliceCache:
    """Decoded slices [S, S] of one folder, sorted by patient, series and position.

    Attributes:
        infos: the origin of each slice.
        digests: digests of the pixels of each slice.
        skipped: (name, reason) of files that could not be used.
        hu_range: smallest and largest value of all slices.
        cut: the parts of slices outside the field of view; nothing unless slices have their true size.
    """

    endless = False

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self._index_file, self._file = folder / _INDEX, _pixels(folder, index["fingerprint"])
        self._rows: list[int] = index["rows"]
        self._size: int = index["image_size"]
        self._stream: IO[bytes] | None = self._opened()
        self.infos = [SliceInfo(**info) for info in index["slices"]]
        self.digests: list[int] = index["digests"]
        self.skipped: list[tuple[str, str]] = [(name, reason) for name, reason in index["skipped"]]
        self.hu_range: tuple[float, float] = (index["hu_range"][0], index["hu_range"][1])
        self.cut = CutTissue(**index.get("cut", {}))

    def __len__(self) -> int:
        return len(self.infos)

    def load(self, index: int) -> FloatArray:
        """Slice [S, S] in HU, float32, as a copy that the caller may change. Raises DataError if it is damaged."""
        if self._stream is None:  # in a worker
            self._stream = self._opened()
        # Read, not mapped: with a map, a file that gets shorter would end the process with SIGBUS.
        length = self._size**2 * _ROW.itemsize
        pixels = os.pread(self._stream.fileno(), length, len(_header(0, self._size)) + self._rows[index] * length)
        if digest_of_bytes(pixels) != self.digests[index]:
            self._index_file.unlink(missing_ok=True)
            raise DataError(f"{self._file} has changed on the disk at {self.name(index)}: start again to rebuild it")
        return np.frombuffer(bytearray(pixels), _ROW).reshape(self._size, self._size)

    def name(self, index: int) -> str:
        """The file (and frame) of the slice."""
        return self.infos[index].name

    def __getstate__(self) -> dict[str, Any]:
        """Give workers only the name of the file: the open file belongs to this process."""
        return {**self.__dict__, "_stream": None}

    def _opened(self) -> IO[bytes]:
        """The pixels, under a lock that `_remove_unread` respects, while this object lives."""
        stream = self._file.open("rb", buffering=0)
        weakref.finalize(self, stream.close)
        with suppress(OSError):  # a file system without locks
            _lock(stream, shared=True)
        return stream


def _lock(stream: IO[bytes], *, shared: bool) -> None:
    """Lock an open file until it is closed. Raises OSError if another process has locked it."""
    import fcntl  # not on Windows, where reconstruct needs this file

    fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def _remove_unread(file: Path) -> None:
    """Remove files of pixels, except those that a `SliceCache` in any process still reads."""
    with suppress(OSError), file.open("rb") as stream:
        _lock(stream, shared=False)
        file.unlink()


def list_files(
    root: Path, include: str = "*", *, leave_out: Path | None = None, key: str = "data.root"
) -> list[SourceFile]:
    """Every file below root, to any depth, sorted. Hidden files are left out.

    Raises DataError, which names the key, if there are none.
    """
    if root.is_file():
        raise DataError(f"{key}={root} is a file: give its folder")
    if not root.is_dir():
        raise DataError(f"{key}={root} does not exist: give the folder with the slices")
    found, seen = [], set()
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen or (leave_out is not None and real == os.path.realpath(leave_out)):
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                stat = path.stat()
                below = path.relative_to(root).as_posix()
                found.append(SourceFile(below, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    if not found:
        raise DataError(f"{key}={root} is empty (no file at any depth): give the folder with the slices")
    chosen = [file for file in found if fnmatch(file.path, include)]
    if not chosen:
        raise DataError(
            f"data.include={include} matches none of the {len(found)} files below {root}, such as {found[0].path}"
        )
    return chosen


def open_cache(
    reader: Reader,
    root: Path,
    image_size: int,
    *,
    include: str = "*",
    cache_dir: Path | None = None,
    field_of_view: float | None = None,
    own: Sequence[Any] = (),
) -> SliceCache:
    """The decoded slices of a folder: from the cache if it is complete and up to date, else decoded now.

    Args:
        reader: decodes its files.
        root: the folder.
        image_size: rows and columns that slices are resampled to.
        include: only files whose path below root matches.
        cache_dir: where caches are; None: the default place.
        field_of_view: mm that an image covers, each slice at its true size; None: a slice fills the whole image.
        own: target and arguments of a reader of the user's own, whose code may change; empty for our readers.

    Raises:
        DataError: the folder is missing, empty, or contains no usable slice; or other users may write to the cache.
        OSError: the disk is full. No half-written file stays.
    """
    cache_dir = cache_dir or default_cache_dir()
    files = list_files(root, include, leave_out=cache_dir)
    what = [reader.kind, str(root.resolve()), include, image_size]
    what += [] if field_of_view is None else [f"{field_of_view:.9g} mm"]
    what += own
    folder = cache_dir / f"{root.resolve().name}-{reader.kind}-{image_size}-{digest(what)}"
    # Not in `what`: after a change of the code the old cache makes way for the new one.
    code = [digest_of_bytes(Path(inspect.getfile(type(reader))).read_bytes())] if own else []
    fingerprint = digest([_FORMAT, what, [asdict(file) for file in files], *code])
    folder.mkdir(parents=True, exist_ok=True)
    for its in (cache_dir, folder):
        if is_open_to_all(its):
            raise DataError(
                f"{its} is another user's, and everybody may write to it, so anybody may have changed its slices: "
                "give a folder of your own, data.cache_dir=…"
            )
    with FileLock(folder / "lock"):
        index = _read_index(folder, fingerprint)
        if index is None:
            index = _build(reader, root, files, Grid(image_size, field_of_view), folder, fingerprint)
        return SliceCache(folder, index)


def _read_index(folder: Path, fingerprint: str) -> dict[str, Any] | None:
    """The index of a complete cache of these sources, or None."""
    if not ((folder / _INDEX).is_file() and _pixels(folder, fingerprint).is_file()):  # opening a pipe may never end
        return None
    try:
        index: dict[str, Any] = json.loads((folder / _INDEX).read_text())
        if index.pop("digest") != digest(index) or index["fingerprint"] != fingerprint:
            return None
        images = np.lib.format.open_memmap(_pixels(folder, fingerprint), mode="r")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    size = index["image_size"]
    return index if images.shape == (len(index["slices"]), size, size) and images.dtype == _ROW else None


def _pixels(folder: Path, fingerprint: str) -> Path:
    return folder / f"{fingerprint}.npy"


def _build(
    reader: Reader, root: Path, files: Sequence[SourceFile], grid: Grid, folder: Path, fingerprint: str
) -> dict[str, Any]:
    """Decode all files into a new cache file, then commit it by writing the index. Returns the index."""
    # A killed process may have left these. The caller holds the lock, so nobody else writes here.
    for stale in filter(is_temporary, folder.iterdir()):
        stale.unlink()
    with atomic_file(_pixels(folder, fingerprint)) as stream:
        index = _decode_all(reader, root, files, grid, stream)
    index |= {"fingerprint": fingerprint, "image_size": grid.size, "cut": asdict(grid.cut)}
    write_text(folder / _INDEX, json.dumps(index | {"digest": digest(index)}))
    for old in folder.glob("*.npy"):
        if old != _pixels(folder, fingerprint):
            _remove_unread(old)
    return index


def _header(count: int, size: int) -> bytes:
    """Header of a `.npy` file of float32 [count, size, size]. numpy pads it to the same length for every count."""
    stream = io.BytesIO()
    described = {"descr": _ROW.str, "fortran_order": False, "shape": (count, size, size)}
    np.lib.format.write_array_header_1_0(stream, described)
    return stream.getvalue()


def _decode_all(
    reader: Reader, root: Path, files: Sequence[SourceFile], grid: Grid, stream: IO[bytes]
) -> dict[str, Any]:
    """Decode the files one by one into the stream. Returns their index, sorted by patient, series and position."""
    # The number of slices is known at the end only. The header is then written again, in the same length.
    stream.write(_header(0, grid.size))
    infos: list[SliceInfo] = []
    digests: list[int] = []
    skipped: list[tuple[str, str]] = []
    low, high = np.inf, -np.inf
    console = Console(stderr=True, markup=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for file in progress.track(files, description=f"Decoding {root.name}"):
            try:
                for piece in reader.read(root, file.path):
                    try:
                        hu = clean_hu(piece.hu)
                        require_content(hu)
                        if grid.field_of_view is not None and piece.spacing is None:
                            raise SkipFile(NO_SPACING)
                        image = grid.place(hu, piece.spacing)
                        # All of it may lie outside the field. Not by the image: every size must keep the same slices.
                        require_content(grid.seen(hu, piece.spacing))
                    except SkipFile as reason:
                        skipped.append((piece.info.name, str(reason)))
                        continue
                    pixels = image.astype(_ROW, copy=False).tobytes()
                    stream.write(pixels)
                    digests.append(digest_of_bytes(pixels))
                    infos.append(piece.info)
                    low, high = min(low, float(hu.min())), max(high, float(hu.max()))
            except SkipFile as reason:
                skipped.append((file.path, str(reason)))
    _require_slices(reader, root, len(infos), skipped, (low, high))
    header = _header(len(infos), grid.size)
    stream.seek(0)
    stream.write(header)
    # Pixels stay in the order of decoding: sorting them would need all of them in memory. `rows` has the order.
    order = sorted(range(len(infos)), key=lambda row: infos[row].order)
    slices = [asdict(infos[row]) for row in order]
    in_order = [digests[row] for row in order]
    return {"slices": slices, "digests": in_order, "rows": order, "skipped": skipped, "hu_range": [low, high]}


def _require_slices(
    reader: Reader, root: Path, count: int, skipped: list[tuple[str, str]], hu_range: tuple[float, float]
) -> None:
    """Raise DataError if there is no usable slice, or if the values cannot be HU."""
    if not count:
        reasons = {reason for _, reason in skipped}
        fix = f"give a folder with {reader.wanted}"
        if any("RescaleSlope" in reason for reason in reasons):
            fix = "add the tags (0028,1053) RescaleSlope and (0028,1052) RescaleIntercept, which give HU"
        elif any("RescaleType" in reason for reason in reasons):
            fix = "if they are in HU, set (0028,1054) RescaleType to HU"
        elif any(NO_SPACING in reason for reason in reasons):
            fix = "give data.pixel_size=field_of_view, because header needs the tag (0028,0030) PixelSpacing of DICOM"
        raise DataError(f"data.root has no usable slice ({summarise_skipped(str(root), skipped)}): {fix}")
    low, high = hu_range
    if is_no_hu(low, high):
        raise DataError(
            f"data.root={root} has values from {low:g} to {high:g}, which are not HU (air −1000, water 0): "
            "save the slices in HU"
        )
