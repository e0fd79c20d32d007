"""This process: its rank among several, how it ends, and the signals that stop it. No torch import."""

import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from qnmixer.errors import Stopped

# The rank


def is_rank() -> bool:
    """Whether a launcher (ours, torchrun, srun) has started this process as one of several."""
    return _by_agent() or by_srun()


def by_srun() -> bool:
    """Whether srun itself has started this rank, and not our launcher or torchrun inside a SLURM job."""
    return not _by_agent() and _slurm_tasks() > 1


def rank() -> int:
    """Number of this process among all ranks; 0 for a single process."""
    return int(os.environ["RANK" if _by_agent() else "SLURM_PROCID"]) if is_rank() else 0


def world_size() -> int:
    """The number of processes."""
    return int(os.environ["WORLD_SIZE"]) if _by_agent() else max(1, _slurm_tasks())


def _by_agent() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _slurm_tasks() -> int:
    """Processes of a step of srun; 0 in an sbatch script itself, which has SLURM_NTASKS but is no step."""
    if "SLURM_STEP_ID" not in os.environ:
        return 0
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", os.environ.get("SLURM_NTASKS", "1")))


# The end of a rank

# Time for a rank to close its loggers after another one failed. A rank that hangs in a collective is killed then.
_SECONDS_TO_LEAVE = 10

# Time for a rank to finish its step and write a checkpoint: torchrun and SLURM kill it after 30 s.
_SECONDS_TO_STOP = 25

# Time for the main thread to hear a signal. If it does not, it hangs outside Python, as while the ranks connect.
_SECONDS_TO_HEAR = 3

# Time for a rank that lost contact and already closes its loggers when SIGTERM arrives.
_SECONDS_TO_LEAVE_BY_ITSELF = 2

_end_heard = threading.Event()
"""Set once the thread that listens has heard SIGTERM, SIGINT or SIGHUP."""
_another_failed = threading.Event()
_stops_in_order = threading.Event()
"""Set while the main thread finishes its step before it stops, and once it has heard a signal to stop."""

# Errors of a rank whose partner has ended. The user should see the error of the partner.
_LOST_CONTACT = ("connection closed by peer", "connection reset by peer", "broken pipe", "gloo", "nccl")


def end_with_the_others(parent: int | None = None) -> None:
    """End this rank and its child processes within seconds of SIGTERM or of the parent's death.

    This works even inside a collective that hangs. From our launcher SIGTERM means that another rank has failed.
    Together with SIGUSR1 it means that the run shall stop. From other launchers it can mean both. First the main thread
    reacts, by an exception or after its step. If it does not end in time, the rank is killed. Call this in the main
    thread.

    Args:
        parent: as in `die_with_parent`, for a rank of our launcher.
    """
    die_with_parent(parent)

    def in_fork() -> None:
        signal.set_wakeup_fd(-1)
        die_with_parent()  # a fork does not inherit this setting

    os.register_at_fork(after_in_child=in_fork)

    # Python runs handlers between bytecodes, so never inside a collective that hangs. The C code of a signal writes to
    # this pipe at once, and a thread reads it.
    listen, notify = os.pipe()
    os.set_blocking(notify, False)
    signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
    # By default SIGTERM ends the process at once, before it has closed its loggers.
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=_end_when_signalled, args=(listen, parent is not None), daemon=True).start()


def another_rank_failed() -> bool:
    """Whether another rank has failed. If so, there is nothing to wait for."""
    return _another_failed.is_set()


def _end_when_signalled(listen: int, launched: bool) -> None:
    heard: set[int] = set()
    while not (ending := heard & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}):
        heard.update(os.read(listen, 1))
    _end_heard.set()
    code = 128 + ending.pop()
    # A rank that lost contact may be closing its loggers already. A SIGUSR1 in this time means a stop, not a failure.
    end = time.monotonic() + _SECONDS_TO_LEAVE_BY_ITSELF
    while launched and signal.SIGUSR1 not in heard and (left := end - time.monotonic()) > 0:
        if select.select([listen], [], [], left)[0]:
            heard.update(os.read(listen, 1))
    if launched and signal.SIGUSR1 not in heard:
        _another_failed.set()
        # A thread cannot raise an exception in the main thread. The handler of a signal can.
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_SECONDS_TO_LEAVE)
    elif _stops_in_order.wait(_SECONDS_TO_HEAR):
        time.sleep(_SECONDS_TO_STOP)
    os._exit(code)


def die_with_parent(parent: int | None = None) -> None:
    """Make the system kill this process when its parent dies, for any reason (Linux only).

    Args:
        parent: the process that started this one, which may be dead already. None: the current parent.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent not in (None, os.getppid()):  # it died before this call
        os._exit(1)


def leave(error: BaseException, line: str | None, say: bool = False) -> NoReturn:
    """End this rank in an except clause, and write a record of the error for the launcher.

    sys.exit would run cleanup code that waits for other ranks.

    Args:
        error: the exception; a KeyboardInterrupt if a signal stopped the rank.
        line: its line for the user; None for a bug, whose traceback the user gets.
        say: also print the line, because no launcher will. A rank that ends because another one ended prints nothing.
    """
    # A second signal must not interrupt this function: the record would be lost.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    stopped, now = isinstance(error, KeyboardInterrupt), time.time()
    # For torch's elastic agent, ours or torchrun's. It reads the first two fields, and `launch` the others.
    record: dict[str, Any] = {
        "message": "was stopped by SIGTERM or SIGINT" if stopped else line or f"{type(error).__name__}: {error}",
        "timestamp": int(now),
        "time": now,
        "traceback": traceback.format_exc(),
        "bug": line is None and not stopped,  # the traceback is for the user too
        "secondary": is_secondary(error),
        "stopped": isinstance(error, Stopped) and error.together,  # as all others did, with a checkpoint
    }
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The agent may read at any time, and must not find half a record.
        temporary = Path(f"{path}.tmp")
        temporary.write_text(json.dumps(record), encoding="utf-8")
        temporary.replace(path)
    shows = say and not record["secondary"]
    interrupted = record["stopped"] or (isinstance(error, Stopped) and error.number == signal.SIGINT)
    if record["secondary"] and not record["stopped"]:
        # The first failed rank must end first. If nobody ends this rank then, all ranks may have lost contact.
        shows = not _end_heard.wait(_SECONDS_TO_LEAVE_BY_ITSELF) and say and not stopped
    if shows:
        print(f"{record['traceback'] * record['bug']}error: rank {rank()}: {record['message']}", file=sys.stderr)
    elif say and interrupted and rank() == 0:
        print(error, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.code if isinstance(error, Stopped) else 130 if stopped else 1)


def is_secondary(error: BaseException) -> bool:
    """Whether a rank ends with this error because another rank ended, or because of a signal."""
    if isinstance(error, KeyboardInterrupt):
        return True
    of_torch = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return of_torch or any(words in str(error).lower() for words in _LOST_CONTACT)


# Signals

SIGNALS = [it for it in signal.Signals if it.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")]
"""SIGINT: Ctrl-C. SIGTERM: the end of a job. SIGHUP: the terminal or ssh closed. SIGUSR1, SIGUSR2: SLURM's warning
before the time limit (#SBATCH --signal=USR1@120, which submitit also sets). Windows has the first two only."""
_SECONDS_OF_ECHO = 2

_received: int | None = None  # the stop signal
_defers_stop = False


@contextmanager
def stop_signals() -> Iterator[None]:
    """Turn stop signals into Stopped while the block runs.

    After `defer_stop(True)` a signal is only recorded, and the training loop asks `stop_requested()` between steps. A
    second signal raises at once. In a rank it does not, because the launcher sends a second signal too. Does nothing
    outside the main thread.
    """
    global _received
    owner, echo = os.getpid(), Echo()

    def stop(number: int, _: FrameType | None) -> None:
        global _received
        if os.getpid() != owner:  # a data worker: a fork inherits this handler
            return
        _stops_in_order.set()
        # Ctrl-C comes twice: from the terminal, and from the launcher.
        if echo.of(number) and not another_rank_failed():
            return
        again, _received = _received is not None, _received or number
        if not _defers_stop or another_rank_failed() or (again and not is_rank()):
            raise Stopped(_received)

    _received = None
    with handle_signals(SIGNALS, stop):
        try:
            yield
        finally:
            defer_stop(False)


def stop_requested() -> int | None:
    """The stop signal that this process has received; None if there was none."""
    return _received


def defer_stop(on: bool) -> None:
    """True: only record stop signals from now on, because `stop_requested` is asked soon. False: raise again."""
    global _defers_stop
    _defers_stop = on
    (_stops_in_order.set if on else _stops_in_order.clear)()


@contextmanager
def loading() -> Iterator[None]:
    """End the process at once on Ctrl-C while libraries load. torch aborts if its import raises an exception."""

    def end(*_: object) -> None:
        if not is_rank():
            print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)

    with handle_signals([signal.SIGINT], end):
        yield


@contextmanager
def handle_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[list[signal.Signals]]:
    """Handle signals by `handler` while the block runs, then restore the earlier handlers.

    A signal that is ignored stays ignored: nohup ignores SIGHUP. Yields the other signals. Does nothing outside the
    main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    before = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number, old in before.items() if old is not signal.SIG_IGN]
    for number in handled:
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
