"""One fresh tree of processes a run, one process a device, by torch's elastic agent (what torchrun is made of).

The process that the user started runs nothing itself: it watches, stops all ranks when one fails, and says which.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from qnmixer.errors import RankFailed

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

# How long ranks that are stopped have to leave by themselves; collectives that hang do not, and are killed then.
_SECONDS_TO_LEAVE = 10

# What a rank says when another one has gone: the other one's word is the one to hear, so this one comes later.
_LOST_CONTACT = ("connection closed by peer", "connection reset by peer", "gloo", "nccl")
_SECONDS_TO_LET_OTHERS_SPEAK = 2


def launch(arguments: list[str], n_processes: int) -> None:
    """Run `python *arguments` once a rank and wait for all of them.

    Raises RankFailed when one fails (the others are stopped), KeyboardInterrupt on Ctrl-C, SystemExit on SIGTERM.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the line below says it shorter
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // n_processes)))
    with tempfile.TemporaryDirectory(prefix="qnmixer-ranks-") as log_dir:
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
            shutdown_timeout=_SECONDS_TO_LEAVE,
        )
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise RankFailed(f"rank {rank}: {_reason(failure.exitcode, failure.message)}") from error
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from stop
            raise SystemExit(128 + stop.sigval) from stop


def die_with_parent() -> None:
    """Have the system end this process when the one that started it dies, however that dies (Linux only)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(error: BaseException, line: str) -> NoReturn:
    """End this rank after an error, handing the line to the process that launched it."""
    if any(words in str(error).lower() for words in _LOST_CONTACT):
        time.sleep(_SECONDS_TO_LET_OTHERS_SPEAK)
    with open(os.environ[_ERROR_FILE], "w") as file:
        json.dump({"message": line, "timestamp": int(time.time())}, file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # not by way of collectives that would wait for the others


def _reason(exitcode: int, message: object) -> str:
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}; the other ranks were stopped"
    return str(message)
