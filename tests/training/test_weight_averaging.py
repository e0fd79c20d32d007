"""The mean of the weights: its values. A stopped run with it resumes as any other: test_checkpointing has that."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qnmixer.training.callbacks import EMA


def test_the_mean_is_of_optimizer_steps_and_stands_for_the_weights_in_a_checkpoint() -> None:
    """Of two batches each."""
    module: Any = torch.nn.Linear(1, 1, bias=False)
    weights = [1.0, 2.0, 4.0, 8.0]
    trainer: Any = SimpleNamespace(accumulate_grad_batches=2, global_step=0)
    module.weight.data.fill_(1.0)
    averaging = EMA(decay=0.75)
    averaging.on_fit_start(trainer, module)
    for trainer.global_step, weight in enumerate(weights, 1):
        averaging.on_train_batch_end(trainer, module, None, None, 0)
        module.weight.data.fill_(weight)
        averaging.on_train_batch_end(trainer, module, None, None, 1)
    mean = ((1 * 0.75 + 2 * 0.25) * 0.75 + 4 * 0.25) * 0.75 + 8 * 0.25
    for validating in (False, True):
        if validating:
            averaging.on_validation_start(trainer, module)
        assert module.weight.item() == pytest.approx(mean if validating else 8)
        checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
        averaging.on_save_checkpoint(trainer, module, checkpoint)
        assert checkpoint["state_dict"]["weight"].item() == pytest.approx(mean)
        assert checkpoint["trained_weights"]["weight"].item() == pytest.approx(8)
    averaging.on_validation_end(trainer, module)
    assert module.weight.item() == pytest.approx(8)
