"""Signals that stop a run, and the handlers for them. No torch import."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from qnmixer.engine.processes.ranks import another_rank_failed, is_rank, stops_in_order
from qnmixer.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""SIGINT: Ctrl-C. SIGTERM: the end of a job. SIGHUP: the terminal or ssh closed. SIGUSR1, SIGUSR2: SLURM's warning
before the time limit (#SBATCH --signal=USR1@120, which submitit also sets)."""

_SECONDS_OF_ECHO = 2

_requested: int | None = None
_deferred = False


@contextmanager
def handle_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object] | None
) -> Iterator[list[signal.Signals]]:
    """Handle signals by `handler` while the block runs, then restore the earlier handlers.

    A signal that is ignored stays ignored: nohup ignores SIGHUP. Yields the other signals. Without a `handler` the
    block may install its own. Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    before = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number, old in before.items() if old is not signal.SIG_IGN]
    for number in handled if handler else []:
        signal.signal(number, handler)
    try:
        yield handled
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Echo:
    """Recognises a signal that arrives twice: once from the process group, once from a parent process."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def of(self, number: int) -> bool:
        """Whether this is the first signal again."""
        now = time.monotonic()
        if self._first is None:
            self._first = number, now
            return False
        return number == self._first[0] and now - self._first[1] < _SECONDS_OF_ECHO


@contextmanager
def stop_signals() -> Iterator[None]:
    """Turn stop signals into Stopped while the block runs.

    After `defer_stop(True)` a signal is only recorded, and the training loop asks `stop_requested()` between steps. A
    second signal raises at once. In a rank it does not, because the launcher sends a second signal too. Does nothing
    outside the main thread.
    """
    global _requested
    owner, echo = os.getpid(), Echo()

    def stop(number: int, _: FrameType | None) -> None:
        global _requested
        if os.getpid() != owner:  # a data worker: a fork inherits this handler
            return
        stops_in_order.set()
        # Ctrl-C comes twice: from the terminal, and from the launcher.
        if echo.of(number) and not another_rank_failed():
            return
        again, _requested = _requested is not None, _requested or number
        if not _deferred or another_rank_failed() or (again and not is_rank()):
            raise Stopped(_requested)

    _requested = None
    with handle_signals(SIGNALS, stop):
        try:
            yield
        finally:
            defer_stop(False)


def stop_requested() -> int | None:
    """The stop signal that this process has received; None if there was none."""
    return _requested


def defer_stop(on: bool) -> None:
    """True: only record stop signals from now on, because `stop_requested` is asked soon. False: raise again."""
    global _deferred
    _deferred = on
    (stops_in_order.set if on else stops_in_order.clear)()


@contextmanager
def loading() -> Iterator[None]:
    """End the process at once on Ctrl-C while libraries load. torch aborts if its import raises an exception."""

    def end(*_: object) -> None:
        if not is_rank():
            print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)

    with handle_signals([signal.SIGINT], end):
        yield
