"""The device as a parameter: on a machine without a GPU the same bodies run on the CPU, and cuda is skipped."""

import os
from pathlib import Path

import pytest
import torch
from notebooks.benchmarks.measuring import Row, machine, markdown

from qnmixer.files import write_text

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
_FOUND: list[Row] = []
_PASSED: dict[str, bool] = {}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def findings(device: torch.device) -> list[Row]:
    """Where a test puts what it measures; of a GPU it is kept."""
    return _FOUND if device.type == "cuda" else []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "cuda" in report.keywords and report.when == "call" and not report.skipped:
        _PASSED[report.nodeid] = report.passed


def pytest_sessionfinish() -> None:
    if (path := os.environ.get("QNMIXER_GPU_RESULTS")) is not None and _PASSED:
        write(Path(path), _PASSED, _FOUND)


def write(path: Path, passed: dict[str, bool], rows: list[Row]) -> None:
    """The file that `make test-gpu` asks for: which tests passed, and a table for each title of what they measured."""
    failed = [name for name, its in passed.items() if not its]
    text = f"`make test-gpu` on {machine()}: {len(passed) - len(failed)} of {len(passed)} tests passed.\n"
    write_text(path, text + "".join(f"\nFailed: `{name}`.\n" for name in failed) + markdown(rows))
