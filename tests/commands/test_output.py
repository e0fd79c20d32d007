"""Standard output that survives the end of its reader, and takes every character."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from qnmixer.runs.processes.output import lasting_output

from ..conftest import Command


@contextmanager
def ascii_output(to: int) -> Iterator[None]:
    """Standard output is a terminal that shows ASCII only. Not a fixture: pytest sets its own output after those."""
    with pytest.MonkeyPatch.context() as patch, os.fdopen(to, "w", encoding="ascii") as stream:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "__stdout__", stream)
        yield


def test_a_terminal_gets_what_it_can_show_and_may_close() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with ascii_output(writing):
        lasting_output()
        print("8 × 24, T = 2 \udcff", flush=True)
        assert os.read(reading, 100) == b"8 ? 24, T = 2 ?\n"
        os.close(reading)
        print("nobody reads this", flush=True)
        print("nor this", flush=True)
        assert os.fstat(writing).st_rdev == os.stat(os.devnull).st_rdev


def test_a_full_file_is_no_closed_terminal() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with ascii_output(full):
        lasting_output()
        with pytest.raises(OSError, match="standard output"):
            print("a line", flush=True)
        with open(os.devnull, "w") as nobody:
            os.dup2(nobody.fileno(), full)  # else what is left of the line would be written at the end
        sys.stdout.flush()


def test_the_stream_of_a_notebook_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = io.StringIO()
    monkeypatch.setattr(sys, "stdout", own)
    lasting_output()
    assert sys.stdout is own


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("overrides", [[], ["strategy=ddp", "trainer.devices=2"]])
def test_a_run_goes_on_after_its_reader_has_ended(start: Callable[..., Command], overrides: list[str]) -> None:
    run = start(*overrides)
    assert run.process.stdout is not None
    run.process.stdout.readline()
    run.process.stdout.close()
    assert run.process.wait(200) == 0
    assert run.record()["status"] == "done"
    run.process.stdout = None


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("files", [12, 24])
def test_a_run_with_too_few_open_files_ends_in_one_line(start: Callable[..., Command], files: int) -> None:
    limited = ("bash", "-c", f'ulimit -n {files}; exec "$0" "$@"', sys.executable)
    assert start("data.num_workers=2", under=limited).outcome().error.startswith("too many open files: ")
