"""Files that are there whole or not at all."""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from qnmixer.errors import ConfigError, DataError

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
BEFORE_SUFFIX = ".before"
PART_SUFFIX = ".part"


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/qnmixer`, or `~/.cache/qnmixer`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qnmixer"


def is_open_to_all(folder: Path) -> bool:
    """Whether a folder is another user's and everybody may write to it: what it holds may be anybody's."""
    if os.name != "posix":
        return False
    stat = folder.stat()
    return stat.st_uid not in (0, os.geteuid()) and bool(stat.st_mode & 0o002)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside path; it takes path's place when the block ends well and is removed when it fails.

    Raises:
        OSError: as on a full disk; path is then as it was before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:64]}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """Whether a name is one that `atomic_file` makes, which a killed process may have left."""
    return _TEMPORARY.fullmatch(path.name) is not None


def check_unused(key: str, folder: Path) -> None:
    """Raise ConfigError where the folder that a key gives holds files: results are never written over others.

    What Hydra, the run lock and a sweep put there before a run does not count.
    """
    if folder.is_dir():
        left = (path.name for path in folder.iterdir() if not is_temporary(path))
        found = sorted(name for name in left if name not in (".hydra", ".lock", "output.log"))
        if found:
            raise ConfigError(f"{key}={folder} holds {found[0]} already: give a new folder, or empty that one")


def digest(what: Any, length: int = 16, sort_keys: bool = False) -> str:
    """The first digits of the SHA-256 of what JSON can hold. Caches on disk are named by it, so its form stays."""
    return hashlib.sha256(json.dumps(what, sort_keys=sort_keys).encode()).hexdigest()[:length]


def digest_of_bytes(data: bytes | memoryview) -> int:
    """A number below 2^56, and so one that an int64 tensor holds, that tells changed bytes and finds equal ones."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest())


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all. Of names that are not UTF-8, the bytes in question become "?"."""
    with atomic_file(path) as stream:
        stream.write(text.encode(errors="replace"))


def read_record(path: Path) -> dict[str, Any]:
    """A JSON file of keys and values that `write_text` wrote. Raises DataError where it is damaged."""
    try:
        record = json.loads(path.read_text())
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise DataError(f"{path} is damaged or of another program: give another folder, or write it again")
    return record


def replace(new: Path, path: Path) -> None:
    """Put a file or folder in the place of another, of either kind.

    A folder is replaced in two steps. Between them only `path.before` exists, which `newest_complete` returns.
    """
    before = path.with_name(path.name + BEFORE_SUFFIX)
    if path.is_dir() or (new.is_dir() and path.exists()):
        remove(before)
        path.rename(before)
    os.replace(new, path)
    remove(before)


def newest_complete(path: Path) -> Path:
    """The newest complete version: `path`, or `path.before` if a process was killed inside `replace`."""
    before = path.with_name(path.name + BEFORE_SUFFIX)
    return before if before.exists() and not path.exists() else path


def remove(path: Path) -> None:
    """Remove a file or folder that may be there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def last_change(*paths: Path) -> float:
    """When one of some files was last written, as the system counts seconds; one of them must be there."""
    return max(path.stat().st_mtime for path in paths if path.exists())


def check_there(key: str, path: str, what: str) -> None:
    """Raise DataError where there is nothing at the path that a key gives; `what` is to be there."""
    try:
        there = path != "" and Path(path).expanduser().exists()
    except OSError:  # too long a name
        there = False
    if not there:
        raise DataError(f"{key}={path if len(path) < 200 else f'{path[:60]}…'} does not exist: give {what}")


def check_no_nifti(key: str, path: str) -> None:
    """Raise DataError for a NIfTI file, and for a folder that holds nothing else, before anything is loaded."""
    place = Path(path).expanduser()
    # A generator: of a folder of anything else, one file is looked at.
    inside = (Path(folder) / name for folder, _, names in os.walk(place) for name in sorted(names))
    first = None
    for file in [place] if place.is_file() else inside:
        if not file.name.lower().endswith((".nii", ".nii.gz")):
            return
        first = first or file
    if first is not None:
        raise DataError(
            f"{key}={path} is NIfTI, which is not read here: give the DICOM that it was made from, or convert it to "
            f".npy in HU: numpy.save('ct.npy', nibabel.load('{first.name}').get_fdata(dtype='float32').T)"
        )
