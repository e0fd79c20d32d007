"""The device as a parameter: on a machine without a GPU the same bodies run on the CPU, and cuda is skipped."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
