"""Errors of libraries and of the system in a task."""

import errno
from unittest.mock import Mock

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from qnmixer.errors import ConfigError, DataError

from ..typed import Typed

TASK_ERRORS = [
    (ConfigError("seed is odd: give an even one"), "seed is odd: give an even one"),
    (OSError(errno.ENOSPC, "No space left", "/d/last.ckpt"), "the disk is full writing /d/last.ckpt: choose"),
    (PermissionError(errno.EACCES, "Denied", "/etc/a"), "/etc/a cannot be used (Denied): choose another place"),
    (MisconfigurationException("`swa_lrs` is odd.\nmore"), "Lightning refuses this run: `swa_lrs` is odd."),
    (ModuleNotFoundError("needs `a` or `b`, try `pip install`ing either.", name="a"),
     "needs `a` or `b`, try `pip install`ing either: install it, or do not use"),
    (FloatingPointError("the loss became nan at step 3"), "the loss became nan at step 3: lower optimizer.lr"),
    (DataError("a\x1b[2J\r\nb\x9b.dcm is bad"), "a\\x1b[2J\\r\\nb\\x9b.dcm is bad"),
    (OSError(errno.EACCES, "Denied", "a\nb\u202e"), "a\\nb\\u202e cannot be used (Denied)"),
    (DataError("Caught DataError in DataLoader worker process 0.\nOriginal Traceback:\nerrors.DataError: no file"),
     "no file"),
    (OSError(errno.EMFILE, "Too many open files"), "too many open files: raise the limit of this shell"),
    (RuntimeError("unable to write to file </torch_12_3_0>: No space left on device"), "the shared memory of"),
    (RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 24. More"), "too many open files"),
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "a data worker is killed by signal"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message"), TASK_ERRORS)
def test_what_goes_wrong_in_a_task_is_one_line(typed: Typed, error: Exception, message: str) -> None:
    assert typed.train(task=Mock(side_effect=error)).line.startswith(message)
