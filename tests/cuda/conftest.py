"""The device as a parameter: on a machine without a GPU the same bodies run on the CPU, and cuda is skipped."""

import pytest
import torch

from .findings import Findings, asked_for

_FINDINGS = Findings()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def findings(device: torch.device) -> Findings:
    """Where a test puts what it measures; of a GPU it is kept."""
    return _FINDINGS if device.type == "cuda" else Findings()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "cuda" in report.keywords and report.when == "call":
        if report.passed:
            _FINDINGS.passed += 1
        elif report.failed:
            _FINDINGS.failed.append(report.nodeid)


def pytest_sessionfinish() -> None:
    if (path := asked_for()) is not None and _FINDINGS.passed + len(_FINDINGS.failed):
        path.parent.mkdir(parents=True, exist_ok=True)
        _FINDINGS.write(path)
