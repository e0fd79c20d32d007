import math

import pytest
import torch

from qnmixer.engine.training.finite_check import FiniteCheck

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_named_when_it_is_asked_for(value: float, device: str) -> None:
    check = FiniteCheck()
    check.ask(torch.tensor(1.0, device=device), "at step 1")
    check.raise_if_not()
    check.ask(torch.tensor(value, device=device), "at step 2")
    with pytest.raises(FloatingPointError, match=f"the loss became {value} at step 2"):
        check.raise_if_not()
    check.raise_if_not()  # said once


def test_nothing_was_asked() -> None:
    FiniteCheck().raise_if_not()
