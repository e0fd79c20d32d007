"""Large matrices on disk. They are built once; later processes map them into memory and share the pages.

There is one file per matrix, below `$XDG_CACHE_HOME/qnmixer/matrices` (or `~/.cache`): a header, then the arrays. A
file is written under a temporary name, then renamed. One process builds while others wait. Checksums of header and
arrays are checked when a file is opened, which takes 0.05 s for 100 MB. A damaged file is built again. If the disk is
full or read-only, only the caching is lost. Nothing here is needed to understand the mathematics.
"""

import errno
import json
import os
import struct
import time
import warnings
import zlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from qnmixer.files import atomic_file, default_cache_dir, digest, is_open_to_all, is_temporary, write_text
from qnmixer.physics.geometry import FanBeamGeometry
from qnmixer.physics.sparse import Csr

FORMAT = 2
"""Raise it when the layout or the values of the matrices change, or the layout of the files."""
WORTH_CACHING = 2**20
"""From this number of rays times pixels of a side on, a matrix is cached. It takes about 0.1 s to build, and 10 MB."""
LONG = 2**25
"""From this number of rays times pixels of a side on, building takes seconds, and a line on the terminal says so."""
LIMIT = 16 * 2**30
"""Most bytes of all files. The least recently used are removed first, but none that was used within `IN_USE`."""
IN_USE = 7 * 24 * 3600
"""Seconds. A process loses a file that it has mapped if another machine removes it from a network file system."""
_MAGIC = b"qnmixer matrix\n\0"
_ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")


def load_or_build(kind: str, geometry: FanBeamGeometry, build: Callable[[], tuple[Csr, Csr]]) -> tuple[Csr, Csr]:
    """The matrix of that kind and its transpose: from the cache if a complete file exists, else built and stored."""
    if not is_worth_caching(geometry):
        return build()
    key = _key(kind, geometry)
    found = built = None
    try:
        path = _folder() / f"{digest(key, 32)}.matrix"
        found = _read(path, key)
        if found is not None:
            return found
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / "lock"):
            found = _read(path, key)  # another process may have built it while this one waited
            if found is None:
                built = _build_shown(kind, geometry, build)
                _write(path, key, [array for csr in built for array in csr])
                found = _read(path, key)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder, or a file system without locks
        _warn(error)
    return found or built or _build_shown(kind, geometry, build)


def load_or_compute(kind: str, geometry: FanBeamGeometry, compute: Callable[[], float]) -> float:
    """A number that follows from the geometry and its kind, stored beside the matrices if these are cached."""
    if not is_worth_caching(geometry):
        return compute()
    key = _key(kind, geometry)
    with suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
        path = _folder() / f"{digest(key, 32)}.json"
        record = json.loads(path.read_text()) if path.is_file() else {}  # opening a pipe would not end
        if record["digest"] == digest([key, record["value"]]):
            return float(record["value"])
    value = compute()
    try:
        write_text(_folder() / f"{digest(key, 32)}.json", json.dumps({"value": value, "digest": digest([key, value])}))
    except (OSError, RuntimeError) as error:
        _warn(error)
    return value


def is_worth_caching(geometry: FanBeamGeometry) -> bool:
    """Whether building takes so long that the disk is used."""
    return _work(geometry) >= WORTH_CACHING


def _work(geometry: FanBeamGeometry) -> int:
    """Rays times pixels of a side. Time and memory of the build are proportional to it."""
    return geometry.n_distinct_views * len(geometry.distinct_bins) * geometry.image_size


def _folder() -> Path:
    """The folder of the files. Raises OSError if other users may write to it."""
    folder = default_cache_dir() / "matrices"
    for its in (folder.parent, folder):
        if its.is_dir() and is_open_to_all(its):
            raise OSError(errno.EPERM, "another user's, and everybody may write to it", str(its))
    return folder


def _key(kind: str, geometry: FanBeamGeometry) -> dict[str, Any]:
    """The identity of a file's content; 400 and 400.0 are the same. A parallel beam has no distances in it."""
    values = asdict(geometry)
    what = {"format": FORMAT, "kind": kind, "distinct_views": geometry.n_distinct_views, "beam": values.pop("beam")}
    ignored = () if geometry.is_fan else ("source_to_axis", "axis_to_detector")
    return what | {name: float(value) for name, value in values.items() if name not in ignored}


def _build_shown(kind: str, geometry: FanBeamGeometry, build: Callable[[], tuple[Csr, Csr]]) -> tuple[Csr, Csr]:
    """Build a matrix, with a line on the terminal if it takes long."""
    with _line(f"Building the {kind} matrix of the scan") if _work(geometry) >= LONG else nullcontext():
        return build()


def _line(text: str) -> Any:
    """Show a line on the terminal, if there is one, while the block runs."""
    from rich.console import Console  # slow to import, and needed for large matrices only

    console = Console(stderr=True, markup=False)
    return console.status(text) if console.is_terminal else nullcontext()


def _write(path: Path, key: dict[str, Any], arrays: list[np.ndarray]) -> None:
    """Write a file of arrays, if there is room for it."""
    described: list[dict[str, Any]] = []
    size = 0
    for array in arrays:
        described.append(
            {"type": array.dtype.str, "count": len(array), "offset": size, "crc32": zlib.crc32(array.data)}
        )
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    content = {"key": key, "arrays": described, "size": size}
    header = json.dumps(content | {"digest": digest(content)}).encode()
    start = _start(len(header))
    if not _make_room(path.parent, start + size):
        return
    with atomic_file(path) as stream:
        stream.write(_MAGIC + _LENGTH.pack(len(header)) + header)
        for array, where in zip(arrays, described, strict=True):
            stream.seek(start + where["offset"])
            stream.write(array.data)
        stream.truncate(start + size)


def _read(path: Path, key: dict[str, Any]) -> tuple[Csr, Csr] | None:
    """The matrices of a file, mapped; None if it is missing, damaged or for another key.

    They are mapped copy-on-write: pages are shared until a process writes to them, and the file never changes.
    """
    if not path.is_file():  # opening a pipe would not end
        return None
    try:
        with path.open("rb") as stream:
            if stream.read(len(_MAGIC)) != _MAGIC:
                return None
            (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
            whole_size = os.fstat(stream.fileno()).st_size
            header = json.loads(stream.read(min(length, whole_size)))
        start = _start(length)
        if header.pop("digest") != digest(header) or header["key"] != key or whole_size != start + header["size"]:
            return None
        whole = np.memmap(path, mode="c")
        arrays = [
            whole[start + a["offset"] :][: a["count"] * np.dtype(a["type"]).itemsize].view(a["type"]).view(np.ndarray)
            for a in header["arrays"]
        ]
        if [zlib.crc32(array.data) for array in arrays] != [a["crc32"] for a in header["arrays"]]:
            return None
        found = Csr(*arrays[:3]), Csr(*arrays[3:])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None
    with suppress(OSError):
        os.utime(path)  # the time of the last use
    return found


def _start(header_length: int) -> int:
    """Offset of the arrays in a file."""
    return -(-(len(_MAGIC) + _LENGTH.size + header_length) // _ALIGNMENT) * _ALIGNMENT


def _make_room(folder: Path, size: int) -> bool:
    """Remove leftovers of killed processes, then the least recently used files. Returns whether there is room now.

    Only for the process that holds the lock.
    """
    for stale in filter(is_temporary, folder.glob(".*.matrix.*")):
        stale.unlink(missing_ok=True)
    files = sorted(((path.stat(), path) for path in folder.glob("*.matrix")), key=lambda entry: entry[0].st_mtime_ns)
    total = size + sum(stat.st_size for stat, _ in files)
    for stat, path in files:
        if total <= LIMIT or time.time() - stat.st_mtime < IN_USE:
            break
        path.unlink(missing_ok=True)
        total -= stat.st_size
    return total <= LIMIT


def _warn(error: Exception) -> None:
    """Warn once: Python shows the same warning from one line only once."""
    where = f" for {error.filename}" if isinstance(error, OSError) and error.filename else ""
    reason = f"{(isinstance(error, OSError) and error.strerror) or error}{where}"
    warnings.warn(f"no cache on disk ({reason}): the matrices of the scan are built again at every start", stacklevel=1)
