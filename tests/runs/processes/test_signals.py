import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from qnmixer.errors import Stopped
from qnmixer.runs.processes import process
from qnmixer.runs.processes.process import SIGNALS, defer_stop, handle_signals, loading, stop_requested, stop_signals


def test_a_signal_waits_until_training_asks_its_echo_is_none_and_a_later_one_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stop_signals():
        defer_stop(True)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert stop_requested() == signal.SIGUSR1
        monkeypatch.setattr(process, "_SECONDS_OF_ECHO", 0)
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 143), (signal.SIGUSR2, 143),
])  # fmt: skip
def test_the_exit_code_names_the_signal(number: signal.Signals, code: int) -> None:
    with pytest.raises(Stopped) as stop, stop_signals():
        signal.raise_signal(number)
    assert stop.value.code == code


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_one_that_comes_while_libraries_load_ends_the_process_with_the_same_code(number: int, code: int) -> None:
    """SIGTERM had killed it, which a parent sees as −15."""
    if (child := os.fork()) == 0:
        with loading():
            signal.raise_signal(number)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def test_another_thread_than_the_main_one_leaves_signals_alone() -> None:
    """As `qnmixer.train.train` in a thread of a user's program: Python lets only the main thread handle signals."""

    def found() -> list[signal.Signals]:
        with loading(), stop_signals(), handle_signals(SIGNALS, print) as handled:
            return handled

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(found).result() == []


def test_ignored_signals_are_not_handled() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_signals([signal.SIGHUP, signal.SIGUSR1], lambda *_: None) as handled:
            assert handled == [signal.SIGUSR1]
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
