"""Temporary folders of runs: those of killed processes go, all others stay."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from qnmixer.runs.processes.folders import remove_left_folders, temporary_folder
from qnmixer.runs.run import Run

BODY = """
import sys, tempfile, time
from qnmixer.runs.processes.folders import temporary_folder
with temporary_folder("ranks") as outer, temporary_folder("job") as inner:
    (outer / "deep").mkdir()
    (outer / "deep" / "error.json").write_text("{}")
    print(outer, inner, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def begin() -> tuple[subprocess.Popen[str], list[Path]]:
    process = subprocess.Popen([sys.executable, "-c", BODY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [Path(word) for word in process.stdout.readline().split()]


def test_folders_of_a_living_process_stay_and_those_of_a_killed_one_go(place: Path) -> None:
    (killed, its), (living, others) = begin(), begin()
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert all(map(Path.is_dir, [*its, *others]))
        with Run(place / "run").lock():  # what the next run does, also without ranks
            pass
        assert not any(map(Path.exists, its))
        assert all(map(Path.is_dir, others))
    finally:
        living.kill()
        living.wait()


def test_a_folder_in_use_by_this_process_stays() -> None:
    with temporary_folder("job") as outer, temporary_folder("job") as inner:
        remove_left_folders()
        assert outer.is_dir()
        assert inner.is_dir()
    assert not outer.exists()
    assert not inner.exists()


def test_what_is_not_of_a_killed_run_stays(place: Path) -> None:
    """Somebody's own folder, one of an earlier version, whose owner may live, and a link to files elsewhere."""
    for name in ("qnmixer-results-a", "mine"):
        (place / name).mkdir()
        (place / name / "data").touch()
    (place / "mine" / ".lock").touch()
    (place / "qnmixer-job-link").symlink_to(place / "mine")
    (place / "qnmixer-job-pipe").mkdir()
    os.mkfifo(place / "qnmixer-job-pipe" / "fifo")
    before = sorted(place.rglob("*"))
    remove_left_folders()
    assert sorted(place.rglob("*")) == before
