"""The device as a parameter: on a machine without a GPU the same bodies run on the CPU, and cuda is skipped."""

import pytest
import torch

from ..benchmarks.measuring import Row
from .findings import asked_for, write

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
    if (path := asked_for()) is not None and _PASSED:
        write(path, _PASSED, _FOUND)
