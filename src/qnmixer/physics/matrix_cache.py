"""Large matrices on disk: the first run of a scan builds them, and later ones map the files into memory.

They are in `$XDG_CACHE_HOME/qnmixer/matrices` (or `~/.cache`). A file is written under another name, then renamed. One
process builds while others wait. A file whose checksum is wrong is built again; checking 100 MB takes 0.05 s. If the
disk is full or read-only, only the caching is lost. Nothing here is needed to understand the mathematics.
"""

import json
import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qnmixer.files import default_cache_dir, digest, make_own_folder
from qnmixer.physics.geometry import FanBeamGeometry

FORMAT = 3
"""Raise it when the layout or the values of the matrices change."""
WORTH_CACHING = 2**20
"""From this number of rays times pixels of a side on, a matrix is cached. It takes about 0.1 s to build, and 10 MB."""
LONG = 2**25
"""From this number on, building takes seconds, and a line on the terminal says so."""
UNUSED = 30 * 24 * 3600
"""Seconds after which a file that nobody used is removed, when another is written."""

Arrays = Sequence[np.ndarray]


def cached(kind: str, geometry: FanBeamGeometry, build: Callable[[], Arrays]) -> Arrays:
    """What `build` gives for that kind and scan: from the disk if it is there and the scan is large."""
    if _work(geometry) < WORTH_CACHING:
        return build()
    key, found = _key(kind, geometry), None
    try:
        path = _folder() / f"{digest(key, 32)}.safetensors"
        found = _read(path, key)
        if found is None:
            with FileLock(path.parent / "lock"):
                found = _read(path, key)  # another process may have built it while this one waited
                if found is None:
                    if _work(geometry) >= LONG and sys.stderr.isatty():
                        print(f"Building the {kind} of the scan, once …", file=sys.stderr)
                    found = build()
                    _write(path, key, found)
                    found = _read(path, key) or found  # mapped, so that processes share the pages
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: no home, or a disk without locks
        reason = f"{error.strerror} for {error.filename}" if isinstance(error, OSError) else error
        warnings.warn(f"no cache on disk ({reason}): every start builds the matrices of the scan again", stacklevel=1)
    return found or build()


def _work(geometry: FanBeamGeometry) -> int:
    """Rays times pixels of a side. Time and memory of the build are proportional to it."""
    return geometry.n_distinct_views * len(geometry.distinct_bins) * geometry.image_size


def _folder() -> Path:
    """The folder of the files. Raises OSError if other users may have written them."""
    folder = default_cache_dir() / "matrices"
    make_own_folder(folder)
    return folder


def _key(kind: str, geometry: FanBeamGeometry) -> str:
    """The identity of a file's content; 400 and 400.0 are the same. A parallel beam has no distances in it."""
    values = asdict(geometry)
    what = {"format": FORMAT, "kind": kind, "distinct_views": geometry.n_distinct_views, "beam": values.pop("beam")}
    if angles := values.pop("view_angles"):
        what["view_angles"] = angles
    ignored = () if geometry.is_fan else ("source_to_axis", "axis_to_detector")
    return json.dumps(what | {name: float(value) for name, value in values.items() if name not in ignored})


def _read(path: Path, key: str) -> Arrays | None:
    """The arrays of a file, mapped copy-on-write; None if it is missing, damaged or for another key."""
    if not path.is_file():  # opening a pipe would not end
        return None
    try:
        with safe_open(path, "pt") as file:
            arrays = [file.get_tensor(str(k)).numpy() for k in range(len(file.keys()))]
            if file.metadata() != {"key": key, "checksums": _checksums(arrays)}:
                return None
    except SafetensorError:
        return None
    with suppress(OSError):  # the file may be another's, or on a disk that cannot be written
        os.utime(path)  # the time of its last use
    return arrays


def _write(path: Path, key: str, arrays: Arrays) -> None:
    """Write a file. Only for the process that holds the lock, so that the name for the time being is nobody else's."""
    for other in path.parent.iterdir():
        if other.name != "lock" and time.time() - other.stat().st_mtime > UNUSED:
            other.unlink()
    temporary = path.with_suffix(".tmp")
    try:
        tensors = {str(k): torch.from_numpy(array) for k, array in enumerate(arrays)}
        save_file(tensors, temporary, {"key": key, "checksums": _checksums(arrays)})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _checksums(arrays: Arrays) -> str:
    return " ".join(str(zlib.crc32(array.data)) for array in arrays)
