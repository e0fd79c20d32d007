"""Fixtures that every room's tests share."""

import os
from pathlib import Path

# One thread a test process, set before torch is loaded: several of them on few cores would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(scope="session")
def real_ct() -> Path:
    """Folder of real CT files to try things on; QNMIXER_TEST_CT, or shared/ct beside the checkout."""
    folder = Path(os.environ.get("QNMIXER_TEST_CT", Path(__file__).resolve().parents[2] / "shared" / "ct"))
    if not folder.is_dir():
        pytest.skip("no real CT files here (set QNMIXER_TEST_CT to a folder of them)")
    return folder
