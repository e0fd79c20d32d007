"""The launcher, with ranks that run a line of code from the test."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from qnmixer.errors import RankFailed, Stopped
from qnmixer.runs.processes.launch import RankTraceback, launch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("launch")]

SCRIPT = """
import os, signal, sys, time
from qnmixer.runs.processes.process import end_with_parent, leave, rank
end_with_parent({launcher})
here, folder = int(os.environ["RANK"]), os.path.dirname(os.path.abspath(__file__))
try:
    {body}
except BaseException as error:
    leave(error, None if isinstance(error, ZeroDivisionError) else str(error))
"""


def run(folder: Path, body: str, n_processes: int = 2, **options: Any) -> None:
    """Launch ranks that each run a body, in which `here` is their number."""
    path = folder / "rank.py"
    path.write_text(SCRIPT.format(launcher=os.getpid(), body=body.replace("\n", "\n    ")))
    launch([str(path)], n_processes, **options)


def failure(folder: Path, body: str) -> RankFailed:
    with pytest.raises(RankFailed) as caught:
        run(folder, body)
    return caught.value


def test_ranks_know_their_place_and_nothing_is_left_behind(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    run(tmp_path, f"open(f'{tmp_path}/{{here}}', 'w').write(str(rank()))")
    assert [(tmp_path / str(here)).read_text() for here in range(2)] == ["0", "1"]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == handlers


@pytest.mark.parametrize(("body", "line"), [
    (  # who aborts since another one was killed is not blamed
        "import fcntl\n"
        "if here == 1:\n"
        "    lock = open(f'{folder}/lock', 'w')\n"
        "    fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "    open(f'{folder}/locked', 'w').close()\n"
        f"    os.kill(os.getpid(), {signal.SIGKILL})\n"
        "while not os.path.exists(f'{folder}/locked'):\n"
        "    time.sleep(0.001)\n"
        "fcntl.flock(open(f'{folder}/lock'), fcntl.LOCK_EX)  # free when rank 1 is dead\n"
        f"os.kill(os.getpid(), {signal.SIGABRT})",
        "rank 1 was killed by SIGKILL",
    ),
    (  # nor who only lost contact
        "if here == 1:\n    time.sleep(0.3)\n    raise ValueError('the loss became nan')\n"
        "raise RuntimeError('[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234')",
        "rank 1: the loss became nan",
    ),
], ids=["aborted", "lost contact"])  # fmt: skip
def test_the_rank_that_failed_first_is_named(tmp_path: Path, body: str, line: str) -> None:
    assert str(failure(tmp_path, body)).startswith(line)


@pytest.mark.parametrize(("body", "line", "is_bug"), [
    ("raise ValueError('slice 7 is bad')", "slice 7 is bad", False), ("1 / 0", "ZeroDivisionError: division", True),
])  # fmt: skip
def test_a_bug_shows_its_traceback_and_others_on_request(tmp_path: Path, body: str, line: str, is_bug: bool) -> None:
    error = failure(tmp_path, f"if here == 1: {body}\ntime.sleep(60)")
    assert str(error).startswith(f"rank 1: {line}")
    assert isinstance(error.__cause__, RankTraceback)
    assert body in str(error.__cause__)
    notes = getattr(error, "__notes__", [])
    assert [note.startswith("Traceback (most recent call last)") for note in notes] == [True] * is_bug


def test_ranks_are_asked_once_to_stop(tmp_path: Path) -> None:
    """By a signal that comes twice, from the process group and from a parent."""
    asked: list[bool] = []

    def ask() -> bool:
        asked.append(True)
        return True

    body = "for _ in range(2):\n    os.kill(os.getppid(), signal.SIGUSR2)\n    time.sleep(0.3)"
    run(tmp_path, body, n_processes=1, ask_to_stop=ask)
    assert asked == [True]


def test_ranks_that_are_not_there_to_be_asked_are_ended(tmp_path: Path) -> None:
    body = "os.kill(os.getppid(), signal.SIGHUP)\ntime.sleep(60)"
    with pytest.raises(Stopped) as stop:
        run(tmp_path, body, n_processes=1, ask_to_stop=lambda: False)
    assert stop.value.code == 129


@pytest.mark.parametrize(("number", "code", "wait"), [
    (signal.SIGINT, 130, "time.sleep(60)"),
    # As in a collective that hangs, here without the 25 s that a rank gets to stop.
    (signal.SIGINT, 130, "time.sleep(60) if here else os._exit(143)"),
])  # fmt: skip
def test_ranks_that_end_where_they_are_stop(tmp_path: Path, number: signal.Signals, code: int, wait: str) -> None:
    """Before the first step, or after the last, no rank waits for the end of a step."""

    def ask() -> bool:
        for path in tmp_path.glob("*.pid"):
            os.kill(int(path.read_text()), signal.SIGUSR1)
        return True

    body = f"""
from pathlib import Path
from qnmixer.runs.processes.process import stop_signals
with stop_signals():
    Path(f'{tmp_path}/{{here}}.pid').write_text(str(os.getpid()))
    while len(list(Path({str(tmp_path)!r}).glob('*.pid'))) < 2:
        time.sleep(0.01)
    if here == 0:
        time.sleep(0.1)
        os.kill(os.getppid(), {int(number)})
    {wait}"""
    with pytest.raises(Stopped) as stop:
        run(tmp_path, body, ask_to_stop=ask)
    assert stop.value.code == code


def test_a_rank_that_fails_while_the_others_stop_is_named(tmp_path: Path) -> None:
    body = """
if here == 1:
    os.kill(os.getppid(), signal.SIGUSR1)
    time.sleep(0.1)
    raise ValueError("the disk is full")
time.sleep(60)"""
    with pytest.raises(RankFailed, match="rank 1: the disk is full"):
        run(tmp_path, body, ask_to_stop=lambda: True)
