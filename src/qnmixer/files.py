"""Write files completely or not at all."""

import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

from qnmixer.errors import ConfigError, DataError

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EROFS)


TYPED_IN = "QNMIXER_TYPED_IN"
"""The variable with the folder in which a command line was typed, for all its processes, if Hydra has left it."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/qnmixer`, or `~/.cache/qnmixer`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qnmixer"


def make_own_folder(folder: Path) -> None:
    """Make a folder that this user alone can read and write, and close one that others could.

    Raises PermissionError if others may have written its files: the folder, or a file in it, is another user's.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name != "posix":
        return
    me, around = os.geteuid(), folder.parent.stat()
    if around.st_uid not in (0, me) and around.st_mode & 0o002:  # who owns it could put another folder in its place
        raise PermissionError(errno.EPERM, "it is another user's, and everybody may write to it", str(folder.parent))
    if folder.is_symlink() or folder.stat().st_uid != me:
        raise PermissionError(errno.EPERM, "it is another user's, or a link", str(folder))
    with suppress(OSError):  # a disk without modes
        folder.chmod(0o700)
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process has removed it since
            if path.lstat().st_uid != me:
                raise PermissionError(errno.EPERM, "it is another user's", str(path))


@contextmanager
def private_files() -> Iterator[None]:
    """All files and folders that are made while the block runs are this user's alone: they may show patients."""
    umask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(umask)


@contextmanager
def path_in_errors(path: Path | str) -> Iterator[None]:
    """Give an error of the disk the name of this file or folder, if it has none: a write through an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _OF_DISKS:
            error.filename = str(path)
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`. It replaces `path` if the block succeeds, and is deleted if the block fails.

    Raises OSError, for example if the disk is full. Then `path` is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:48]}.{uuid.uuid4().hex}.tmp")  # 48 letters may have 192 bytes
    try:
        with path_in_errors(path), temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # else a power failure can leave an empty file under the final name
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def make_free_folder(folder: Path) -> Path:
    """Make a folder that nobody has: this one, or NAME_1, NAME_2 and so on. Two processes never get the same."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for n in count():
        free = folder.with_name(f"{folder.name}_{n}") if n else folder
        with suppress(FileExistsError):
            free.mkdir()
            break
    return free


def is_temporary(path: Path) -> bool:
    """Whether a name is one of `atomic_file`. A killed process may leave such files."""
    return _TEMPORARY.fullmatch(path.name) is not None


def check_unused(key: str, folder: Path) -> None:
    """Raise ConfigError if the folder of this key contains files: results never overwrite other results.

    The files that Hydra, the run lock and a sweep write before a run do not count, unless they are links.
    """
    if folder.is_dir():
        check_no_links(folder)
        names = (path.name for path in folder.iterdir() if not is_temporary(path))
        results = sorted(name for name in names if name not in (".hydra", ".lock", "output.log"))
        if results:
            raise ConfigError(f"{key}={folder} contains {results[0]} already: give a new folder")


def check_no_links(folder: Path) -> None:
    """Raise ConfigError for a link that leads out of a folder: what is written there would destroy files elsewhere.

    Links inside the folder are fine, and so are those in the folders that W&B made for earlier parts of a run.
    """
    root = os.path.realpath(folder)
    for place, folders, files in os.walk(root):
        for path in (os.path.join(place, name) for name in (*folders, *files)):
            if os.path.islink(path) and not os.path.realpath(path).startswith(root + os.sep):
                raise ConfigError(f"{path} is a link to another place, which would be written: give another folder")
        if place != root and os.path.basename(place) == "wandb":
            folders.clear()


def digest(value: Any, length: int = 16, sort_keys: bool = False) -> str:
    """The first digits of the SHA-256 of a JSON value. Caches on disk have such names, so the form must not change."""
    return hashlib.sha256(json.dumps(value, sort_keys=sort_keys).encode()).hexdigest()[:length]


def digest_of_bytes(data: bytes | memoryview) -> int:
    """A hash below 2^56, so that an int64 tensor can hold it. Changed bytes give another number."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest())


def write_text(path: Path, text: str) -> None:
    """Write a text file completely or not at all. Bytes of file names that are not UTF-8 become "?"."""
    with atomic_file(path) as stream:
        stream.write(text.encode(errors="replace"))


def replace(source: Path, path: Path) -> None:
    """Replace a folder by another one. os.replace cannot replace a folder that contains files."""
    backup = path.with_name(f"{path.name}.before")
    remove(backup)
    if path.exists():
        path.rename(backup)
    source.rename(path)
    remove(backup)


def remove(path: Path) -> None:
    """Remove a file or folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def path_of(text: str | Path) -> Path:
    """The path of a text, where ~ is the home. A ~NAME of no user stays; pathlib's own expanduser raises an error.

    With hydra.job.chdir=true a relative one is in the folder in which the command was typed.
    """
    return Path(os.environ.get(TYPED_IN, ""), os.path.expanduser(text))


def check_there(key: str, path: str, description: str) -> None:
    """Raise DataError if the path of this key does not exist. `description` says what it should be."""
    if not os.path.exists(os.path.expanduser(path)):  # also one whose name is empty or too long, unlike pathlib's
        raise DataError(f"{key}={path if len(path) < 200 else f'{path[:60]}…'} does not exist: give {description}")
