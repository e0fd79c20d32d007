"""Signals that stop a run: what they set off, and what is raised then. No torch import."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from qnmixer.errors import Stopped
from qnmixer.processes.ranks import at_once, is_rank

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C; what ends jobs; a terminal or ssh that has gone; and what SLURM sends beforehand when asked to
(#SBATCH --signal=USR1@120), and submitit has it send."""

_SECONDS_OF_ECHO = 2

_told: int | None = None
_patient = False


class Echo:
    """Tells a signal that comes twice, from the process group and from a parent, from one that is sent again."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def of(self, number: int) -> bool:
        """Whether this is the first signal once more."""
        now = time.monotonic()
        if self._first is None:
            self._first = number, now
            return False
        return number == self._first[0] and now - self._first[1] < _SECONDS_OF_ECHO


@contextmanager
def heeding() -> Iterator[None]:
    """Where a signal to stop raises Stopped: at once, or, while training, when it asks `told`; in the main thread.

    A second one, later or another, does not wait for training, other than in a rank, whose launcher sends one too.
    """
    global _told
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, echo = os.getpid(), Echo()

    def heed(number: int, _: FrameType | None) -> None:
        global _told
        if os.getpid() != owner:  # a data worker that has only just been forked
            return
        if echo.of(number) and not at_once():
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
