"""One fresh tree of processes a run, one process a device, by torch's elastic agent (what torchrun is made of).

The process that the user started runs nothing itself: it watches, stops all ranks when one fails, and says which.
"""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from qnmixer.errors import RankFailed, Stopped
from qnmixer.processes.signals import SIGNALS, Echo

_THREADS = "OMP_NUM_THREADS"

# Ranks whose partner has gone may end with these: NCCL's watchdog aborts, and the agent sends the other.
_SIGNALS_OF_OTHERS = (signal.SIGABRT, signal.SIGTERM)

_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # another signal comes when time is out


class RankTraceback(Exception):
    """Where in a rank it failed: the cause of RankFailed, for who asks for tracebacks."""


def launch(
    arguments: list[str],
    n_processes: int,
    ask_to_stop: Callable[[], bool] | None = None,
) -> None:
    """Run `python *arguments` once a rank and wait for all of them; the ranks share the cores.

    Args:
        arguments: of python; what they run ends by `qnmixer.processes.ranks.leave` when it fails.
        n_processes: how many ranks.
        ask_to_stop: called on the first signal of `signals.SIGNALS`; True: the ranks will end by themselves.

    Raises RankFailed when one fails (the others are stopped; a note holds the traceback of a bug), Stopped on such a
    signal; without `ask_to_stop` SIGUSR1 and SIGUSR2 are none.
    """
    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # RankFailed says it shorter
    with (
        tempfile.TemporaryDirectory(prefix="qnmixer-ranks-") as log_dir,
        _signals(ask_to_stop) as signals,
        _threads(max(1, (os.cpu_count() or 1) // n_processes)),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=n_processes,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            run_id=uuid.uuid4().hex,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        )
        config.signals_to_handle = ",".join(signals.of_agent)  # torch before 2.9 has no such field, and heeds all
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            if all(failure.error_file_data.get("stopped") for failure in error.failures.values()):
                raise Stopped(signals.told, together=True) from None
            failed = _rank_failed(error.failures)
            raise failed from failed.__cause__
        except SignalException as stop:
            raise Stopped(signals.told or stop.sigval) from None


@dataclass
class _Signals:
    of_agent: list[str]  # those by which it ends the ranks
    told: int | None = None  # that by which they have been asked to stop


@contextmanager
def _signals(ask_to_stop: Callable[[], bool] | None) -> Iterator[_Signals]:
    """What stops a run: not a signal that is ignored, as nohup has it. All handlers go at the end."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    signals = _Signals([] if ask_to_stop else [it.name for it in heeded if it not in _WARNINGS])
    echo = Echo()

    def ask(number: int, _: FrameType | None) -> None:
        again, signals.told = signals.told is not None, signals.told or number
        if echo.of(number) or (again and number in _WARNINGS):
            return
        if again or ask_to_stop is None or not ask_to_stop():
            raise SignalException("told to stop", signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    for number in heeded if ask_to_stop else []:
        signal.signal(number, ask)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _threads(n: int) -> Iterator[None]:
    """OMP_NUM_THREADS for the ranks, where the user has set none; the next job of a sweep may have another."""
    if _THREADS in os.environ:
        yield
        return
    os.environ[_THREADS] = str(n)
    try:
        yield
    finally:
        del os.environ[_THREADS]


def _rank_failed(failures: dict[int, ProcessFailure]) -> RankFailed:
    """The error of the rank whose end the ends of all others come from."""
    rank, failure = min(failures.items(), key=lambda item: _order(item[1]))
    record = failure.error_file_data
    if "traceback" in record:
        error = RankFailed(f"rank {rank}: {failure.message}")
        error.__cause__ = RankTraceback(record["traceback"])
        if record["bug"]:
            error.add_note(record["traceback"].rstrip())
        return error
    if failure.exitcode < 0:
        return RankFailed(f"rank {rank} was killed by {failure.signal_name()}; the other ranks were stopped")
    return RankFailed(f"rank {rank} ended with exit code {failure.exitcode}; the other ranks were stopped")


def _order(failure: ProcessFailure) -> tuple[bool, float]:
    record = failure.error_file_data
    if "secondary" in record:
        return record["secondary"], record["time"]
    return -failure.exitcode in _SIGNALS_OF_OTHERS, failure.timestamp
