"""Folders in the temporary folder of this machine. Those of a killed process are removed by the next run."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qnmixer.files import remove

_LOCK = ".lock"
_FOLDER = "qnmixer-"


@contextmanager
def temporary_folder(label: str) -> Iterator[Path]:
    """A folder in the temporary folder of this machine, while the block runs. Its name begins with qnmixer-LABEL-.

    If this process is killed, the next run removes the folder: `remove_left_folders`.
    """
    remove_left_folders()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{label}-"))
        with (folder / _LOCK).open("w") as lock:
            with suppress(OSError):  # a disk without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.fstat(lock.fileno()).st_nlink:  # another process has removed it before it was locked
                continue
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return


def remove_left_folders() -> None:
    """Remove the folders of `temporary_folder` whose process was killed.

    The system releases a lock with its process, in any container. So a process number that is used again, or that
    belongs to another container, does not count. Other users' folders stay, and those without a lock file.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        with suppress(OSError):  # its process lives; or another one removes it too
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "r+b") as lock:
                # Not lockf: this process may hold the lock of another folder, which lockf would give it again.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in folder.iterdir():
                    if path.name != _LOCK:
                        remove(path)
                (folder / _LOCK).unlink()  # last: a folder without it would stay
                folder.rmdir()
