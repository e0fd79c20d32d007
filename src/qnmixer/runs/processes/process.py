"""This process: its rank among several, how it ends, and the signals that stop it. No torch import."""

import ctypes
import json
import os
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

from qnmixer.errors import Stopped, visible
from qnmixer.files import write_text


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

# Time for a rank to close its loggers after SIGTERM. One that hangs in a collective is ended then.
_SECONDS_TO_LEAVE = 10

# Time for the rank that failed first to end, before one that only lost contact does.
_SECONDS_TO_BE_SECOND = 2

# Errors of a rank whose partner has ended. The user should see the error of the partner.
_LOST_CONTACT = ("connection closed by peer", "connection reset by peer", "broken pipe", "gloo", "nccl")


def end_after_sigterm() -> None:
    """End this process within seconds of SIGTERM, by which our launcher ends the others when a rank has failed.

    This works even inside a collective that hangs. torchrun and srun kill such a rank after 30 s by themselves. Call
    this in the main thread.
    """
    # Python runs handlers between bytecodes, so never inside a collective that hangs. The C code of a signal writes to
    # this pipe at once, and a thread reads it.
    listen, notify = os.pipe()
    os.set_blocking(notify, False)
    signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def end() -> None:
        while os.read(listen, 1)[0] != signal.SIGTERM:
            pass
        time.sleep(_SECONDS_TO_LEAVE)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()


def end_with_parent(parent: int | None = None) -> None:
    """As `die_with_parent`, for this process and its forks, such as data workers."""
    die_with_parent(parent)
    # A fork does not inherit this setting. When it begins, its parent may be dead.
    forking = {"pid": 0}
    os.register_at_fork(
        before=lambda: forking.update(pid=os.getpid()), after_in_child=lambda: die_with_parent(forking["pid"])
    )


def die_with_parent(parent: int | None = None) -> None:
    """Make the system kill this process when its parent dies, for any reason (Linux only).

    `parent`: the process that started this one, which may be dead already. None: the current parent.
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
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    record, stopped = _record_of(error, line), isinstance(error, KeyboardInterrupt)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        write_text(Path(path), json.dumps(record))  # at once: the agent may read at any time
    has_own_error = not record["secondary"]
    if not has_own_error and not stopped and stop_requested() is None:
        # The rank that failed first must end first. Then SIGTERM ends this one. Without SIGTERM all ranks may have
        # lost contact, and this error is the only one.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        time.sleep(_SECONDS_TO_BE_SECOND)
        has_own_error = True
    if say and has_own_error:
        details = record["traceback"] if record["bug"] else ""
        print(visible(f"{details}error: rank {rank()}: {record['message']}", keep="\n"), file=sys.stderr)
    elif say and rank() == 0 and (record["stopped"] or getattr(error, "number", None) == signal.SIGINT):
        print(visible(str(error)), file=sys.stderr)  # all ranks stop with the same words, so one of them says them
    # os._exit skips the cleanup at the end of Python, which also writes these buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.code if isinstance(error, Stopped) else 130 if stopped else 1)


def _record_of(error: BaseException, line: str | None) -> dict[str, Any]:
    """An error for torch's elastic agent, ours or torchrun's, which reads two fields; `launch` reads all."""
    stopped, end_time = isinstance(error, KeyboardInterrupt), time.time()
    return {
        "message": "was stopped by a signal" if stopped else line or f"{type(error).__name__}: {error}",
        "timestamp": int(end_time),
        "time": end_time,
        "traceback": traceback.format_exc(),
        "bug": line is None and not stopped,  # the traceback is for the user too
        "secondary": is_secondary(error),
        "stopped": isinstance(error, Stopped) and error.together,  # as all others did, with a checkpoint
    }


def is_secondary(error: BaseException) -> bool:
    """Whether a rank ends with this error because another rank ended, or because of a signal."""
    if isinstance(error, KeyboardInterrupt):
        return True
    is_dist_error = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return is_dist_error or any(words in str(error).lower() for words in _LOST_CONTACT)


# Signals

SIGNALS = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")]
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
        if echo.repeats(number):  # Ctrl-C comes twice: from the terminal, and from the launcher
            return
        is_second, _received = _received is not None, _received or number
        if not _defers_stop or (is_second and not is_rank()):
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


@contextmanager
def loading() -> Iterator[None]:
    """End the process at once on a stop signal while libraries load. torch aborts if its import raises an exception."""

    def end(number: int, _: FrameType | None) -> None:
        if not is_rank():
            print("interrupted", file=sys.stderr, flush=True)
        os._exit(Stopped(number).code)

    with handle_signals(SIGNALS, end):
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
    earlier_handlers = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number, earlier_handler in earlier_handlers.items() if earlier_handler is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield handled
    finally:
        for number, earlier_handler in earlier_handlers.items():
            signal.signal(number, earlier_handler)


class Echo:
    """Recognises a signal that arrives twice: once from the process group, once from a parent process."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def repeats(self, number: int) -> bool:
        """Whether this is the first signal again."""
        arrival = time.monotonic()
        if self._first is None:
            self._first = number, arrival
            return False
        return number == self._first[0] and arrival - self._first[1] < _SECONDS_OF_ECHO
