"""Decoders in a separate process: if they crash, the run continues."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.compressed import compressed

from qnmixer.data.decoder import decode_apart
from qnmixer.data.slices import SkipFile

from .conftest import body_hu, make_ct


@pytest.fixture
def good(tmp_path: Path) -> Path:
    make_ct(tmp_path / "good.dcm", body_hu(16, 16))
    return compressed(tmp_path / "good.dcm", tmp_path / "good.dcm")


STORED = body_hu(16, 16) + 1024


def decoder() -> int:
    """The process that decodes for this one."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (pid,) = [pid for pid in children if b"qnmixer.data.decoder" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(pid)


def test_one_process_decodes_file_after_file(good: Path) -> None:
    np.testing.assert_array_equal(decode_apart(str(good), 0), STORED)
    first = decoder()
    for path, frame in ((good, 1), (good.with_name("nowhere"), 0)):
        with pytest.raises(SkipFile, match="cannot be decoded"):
            decode_apart(str(path), frame)
    np.testing.assert_array_equal(decode_apart(str(good), 0), STORED)
    assert decoder() == first


@pytest.mark.parametrize("ends", ["by itself", "by the clock"])
def test_a_decoder_that_dies_or_hangs_skips_its_file(good: Path, ends: str) -> None:
    os.mkfifo(good.with_name("pipe"))  # so that it is at work when it ends
    np.testing.assert_array_equal(decode_apart(str(good), 0), STORED)
    start, seconds = time.monotonic(), 20 if ends == "by itself" else 1
    if ends == "by itself":  # as decoders in C do that find their memory damaged
        threading.Timer(0.2, os.kill, (decoder(), signal.SIGABRT)).start()
    with pytest.raises(SkipFile, match=f"died, or took longer than {seconds} s"):
        decode_apart(str(good.with_name("pipe")), 0, seconds=seconds)
    assert time.monotonic() - start < 15
    np.testing.assert_array_equal(decode_apart(str(good), 0), STORED)


def test_a_decoder_ends_with_its_process(good: Path) -> None:
    def decode() -> None:
        decode_apart(str(good), 0)
        theirs.send(decoder())
        time.sleep(60)

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=decode)
    process.start()
    child = ours.recv()
    process.kill()
    process.join()
    deadline = time.monotonic() + 15
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
