"""Promise 3: DDP, FSDP, pipeline, accumulation with a partial last window: the gradient of one process.

At the demo's own size, where parts that only act on large tensors act, each memory mode and precision.
`test_gradients_in_float64` has the strategies at this size, and `test_gradients_of_one_process` compares more, on
images of 16 pixels.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ..conftest import metrics
from .commands import Command

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("demo size")]

FEW = (
    "trainer.accelerator=cpu trainer.max_steps=2 trainer.log_every_n_steps=1 data.n_train=32 data.n_val=1 "
    "data.n_test=1 data.num_workers=0 logger=csv test_after_training=false"
)
TOLERANCE = {"16-mixed": 5e-3, "bf16-mixed": 4e-2}
"""How far losses and mean gradients may be from those of another rounding."""


class Trained(NamedTuple):
    losses: list[float]
    weights: Tensor
    moments: Tensor  # Muon's and AdamW's means of the gradients, which are not clipped here

    def differences(self, reference: "Trained") -> tuple[float, float]:
        """The relative differences of weights and of moments."""
        pairs = ((self.weights, reference.weights), (self.moments, reference.moments))
        weights, moments = (float((a - b).norm() / b.norm()) for a, b in pairs)
        return weights, moments


Train = Callable[[str], Trained]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, command: Command) -> Train:
    """train(overrides): what `python -m qnmixer.train experiment=demo OVERRIDES` leaves after two steps."""
    folder = tmp_path_factory.mktemp("demo")

    @cache
    def run(overrides: str) -> Trained:
        run_folder = folder / str(len(list(folder.iterdir())))
        words = f"experiment=demo {FEW} {overrides}".split()
        assert command(folder, "train", *words, f"hydra.run.dir={run_folder}").code == 0
        losses = metrics(run_folder)["train/loss"]
        checkpoint = torch.load(run_folder / "checkpoints" / "last.ckpt", weights_only=True)
        states = checkpoint["optimizer_states"][0]["state"].values()
        moments = [state["momentum"] if "momentum" in state else state["exp_avg"] for state in states]
        vectors = (
            torch.cat([t.flatten() for t in tensors]) for tensors in (checkpoint["state_dict"].values(), moments)
        )
        return Trained(losses, *vectors)

    return run


@pytest.mark.parametrize("precision", TOLERANCE)
def test_half_precision_is_near_full_precision(train: Train, precision: str) -> None:
    """Of one process with two slices a step, because fp16 takes a CPU ten times as long."""
    words = "data.batch_size=2 memory=keep"
    result, expected = train(f"{words} trainer.precision={precision}"), train(words)
    assert result.losses == pytest.approx(expected.losses, rel=TOLERANCE[precision])
    weights, moments = result.differences(expected)
    assert weights < TOLERANCE[precision] / 10
    assert 1e-5 < moments < TOLERANCE[precision]  # and it is not full precision


@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_a_memory_mode_changes_no_bit(train: Train, mode: str) -> None:
    result, expected = train(f"memory={mode}"), train("memory=keep")
    assert result.losses == expected.losses
    assert result.differences(expected) == (0, 0)
