"""Decoders in a separate process: if they crash, the run continues."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.uid import RLELossless
from tests.compressed import compressed

from qnmixer.engine.data.decoder import decode_apart
from qnmixer.engine.data.dicom import DicomReader
from qnmixer.engine.data.slices import SkipFile


@pytest.fixture
def good(make_ct: Any, body_hu: Any, tmp_path: Path) -> Path:
    dataset = make_ct(tmp_path / "good.dcm", body_hu(16, 16))
    dataset.compress(RLELossless)
    dataset.save_as(tmp_path / "good.dcm")
    return tmp_path / "good.dcm"


@pytest.fixture
def coloured(make_ct: Any, body_hu: Any, tmp_path: Path) -> Path:
    """JPEG 2000 of one sample a pixel that says RGB: some plugins of pydicom write three, and end by SIGABRT."""
    make_ct(tmp_path / "plain.dcm", body_hu(64, 64))
    dataset = dcmread(compressed(tmp_path / "plain.dcm", tmp_path / "rgb.dcm"))
    dataset.PhotometricInterpretation = "RGB"
    dataset.save_as(tmp_path / "rgb.dcm")
    return tmp_path / "rgb.dcm"


def stored(body_hu: Any) -> Any:
    return body_hu(16, 16) + 1024


def test_one_process_decodes_file_after_file(good: Path, body_hu: Any) -> None:
    for _ in range(3):
        np.testing.assert_array_equal(decode_apart(str(good), 0), stored(body_hu))
    with pytest.raises(SkipFile, match="cannot be decoded"):
        decode_apart(str(good), 1)
    with pytest.raises(SkipFile, match="cannot be decoded"):
        decode_apart(str(good.with_name("nowhere")), 0)


def decoder() -> int:
    """The process that decodes for this one."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (pid,) = [pid for pid in children if b"qnmixer.engine.data.decoder" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(pid)


def test_a_decoder_that_dies_skips_its_file(good: Path, body_hu: Any) -> None:
    os.mkfifo(good.with_name("pipe"))  # so that it is at work when it dies
    np.testing.assert_array_equal(decode_apart(str(good), 0), stored(body_hu))
    start = time.monotonic()
    # As decoders in C do that find their memory damaged.
    timer = threading.Timer(0.2, lambda: os.kill(decoder(), signal.SIGABRT))
    timer.start()
    with pytest.raises(SkipFile, match="died, or took longer than 20 s"):
        decode_apart(str(good.with_name("pipe")), 0)
    timer.join()
    assert time.monotonic() - start < 15
    np.testing.assert_array_equal(decode_apart(str(good), 0), stored(body_hu))


def test_a_decoder_that_hangs_is_ended(good: Path, body_hu: Any) -> None:
    os.mkfifo(good.with_name("pipe"))
    start = time.monotonic()
    with pytest.raises(SkipFile, match="took longer than 1 s"):
        decode_apart(str(good.with_name("pipe")), 0, seconds=1)
    assert time.monotonic() - start < 20
    np.testing.assert_array_equal(decode_apart(str(good), 0), stored(body_hu))


def test_a_decoder_can_have_2_gb(good: Path) -> None:
    decode_apart(str(good), 0)
    (line,) = [it for it in Path(f"/proc/{decoder()}/limits").read_text().splitlines() if "address space" in it]
    assert int(line.split()[3]) <= 2 * 2**30 + good.stat().st_size


def test_grey_that_says_colour_is_not_decoded_at_all(coloured: Path) -> None:
    with pytest.raises(SkipFile, match="a colour image"):
        list(DicomReader().read(coloured.parent, coloured.name))
