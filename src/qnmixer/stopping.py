"""Signals that stop a run: what they set off, and what is raised then. No torch import."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from qnmixer.errors import Stopped
from qnmixer.ranks import at_once, is_rank

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; what ends jobs; and what SLURM sends beforehand when asked to (#SBATCH --signal=USR1@120)."""


_told: int | None = None
_patient = False


@contextmanager
def heeding() -> Iterator[None]:
    """Where a signal to stop raises Stopped: at once, or, while training, when it asks `told`; in the main thread.

    A second one does not wait for training, other than in a rank, which gets each from several sides.
    """
    global _told
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def heed(number: int, _: FrameType | None) -> None:
        global _told
        if os.getpid() != owner:  # a data worker that has only just been forked
            return
        again, _told = _told is not None, _told or number
        if not _patient or at_once() or (again and not is_rank()):
            raise Stopped(_told)

    _told = None
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, heed)
    try:
        yield
    finally:
        be_patient(False)
        for number, handler in before.items():
            signal.signal(number, handler)


def told() -> int | None:
    """The signal by which this process has been told to stop."""
    return _told


def be_patient(on: bool) -> None:
    """Have a signal wait until `told` is asked, because that will be soon; or not."""
    global _patient
    _patient = on
