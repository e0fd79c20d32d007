"""Fixtures that every room's tests share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_ct() -> Path:
    """Folder of real CT files to try things on; QNMIXER_TEST_CT, or shared/ct beside the checkout."""
    folder = Path(os.environ.get("QNMIXER_TEST_CT", Path(__file__).resolve().parents[2] / "shared" / "ct"))
    if not folder.is_dir():
        pytest.skip("no real CT files here (set QNMIXER_TEST_CT to a folder of them)")
    return folder
