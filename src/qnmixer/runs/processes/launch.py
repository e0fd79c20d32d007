"""Launch one process for each device with torch's elastic agent, as torchrun does.

The process that the user started does not train. It watches the ranks. If one fails, it stops all and names that rank.
"""

import logging
import signal
import sys
import uuid
from collections.abc import Callable
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from qnmixer.errors import RankFailed, Stopped
from qnmixer.runs.processes.folders import temporary_folder
from qnmixer.runs.processes.process import SIGNALS, Echo, handle_signals

# A rank whose partner died may end with these: NCCL's watchdog aborts, and the agent sends SIGTERM.
_SIGNALS_OF_OTHERS = (signal.SIGABRT, signal.SIGTERM)

_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # SLURM sends them as a warning; another signal follows at the time limit


class RankTraceback(Exception):
    """The traceback of the rank that failed, as the cause of RankFailed."""


def launch(arguments: list[str], n_processes: int, ask_to_stop: Callable[[], bool] = lambda: False) -> None:
    """Run `python *arguments` once for each rank and wait for all ranks.

    Args:
        arguments: of python. A rank that fails must end by `qnmixer.runs.processes.process.leave`.
        ask_to_stop: called on the first signal of `SIGNALS`; True: the ranks will end by themselves. False: end them.

    Raises RankFailed if a rank fails; the others are stopped, and a note has the traceback of a bug. Raises Stopped
    after a stop signal.
    """
    _quieten_agent()
    stop = _AskToStop(ask_to_stop)
    with temporary_folder("ranks") as log_dir, handle_signals(SIGNALS, stop):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=n_processes,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # port 0: the system chooses a free one, for several runs on one machine
            local_addr="localhost",
            max_restarts=0,
            run_id=uuid.uuid4().hex,
            logs_specs=DefaultLogsSpecs(log_dir=str(log_dir)),
        )
        config.signals_to_handle = ""  # the agent handles none; torch before 2.9 has no such field
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            if all(_has_stopped(failure, stop.first_signal) for failure in error.failures.values()):
                raise Stopped(stop.first_signal, together=True) from None
            failed = _rank_failed(error.failures)
            raise failed from failed.__cause__
        except SignalException:
            raise Stopped(stop.first_signal) from None


def _quieten_agent() -> None:
    """Switch off the loggers of torch's agent. RankFailed says the same in fewer lines."""
    for name in list(logging.root.manager.loggerDict):  # each logger has its own level, so their parent is not enough
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


class _AskToStop:
    """Handler of stop signals: ask the ranks to stop. Raise if they cannot stop, or after a second signal."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self.ask, self.echo = ask, Echo()
        self.first_signal: int | None = None  # the signal that made us ask the ranks

    def __call__(self, number: int, _: FrameType | None) -> None:
        is_second, self.first_signal = self.first_signal is not None, self.first_signal or number
        # A terminal sends Ctrl-C to every process of its group, and a parent may send it once more.
        if self.echo.repeats(number) or (is_second and number in _WARNINGS):
            return
        if is_second or not self.ask():
            raise SignalException("stopped by a signal", signal.SIGTERM)


def _rank_failed(failures: dict[int, ProcessFailure]) -> RankFailed:
    """The error of the rank that failed first. Its failure made the others fail."""
    # A rank that ended because of the failure may be seen first. The records of the ranks show which one failed.
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


def _has_stopped(failure: ProcessFailure, stop_signal: int | None) -> bool:
    """Whether a rank ended because of a stop signal. `stop_signal`: the one that made us ask the ranks to stop."""
    record = failure.error_file_data
    if stop_signal is None:
        return bool(record.get("stopped"))
    # Before the first step and after the last, ranks end where they are: the first one makes the others secondary. A
    # rank that hangs meanwhile in a collective writes no record, and ends by the agent's SIGTERM.
    return bool(record.get("secondary", failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)))


def _order(failure: ProcessFailure) -> tuple[bool, float]:
    record = failure.error_file_data
    if "secondary" in record:
        return record["secondary"], record["time"]
    return -failure.exitcode in _SIGNALS_OF_OTHERS, failure.timestamp
