"""Promise 3: DDP, FSDP, pipeline, accumulation with a partial last window: the gradient of one process.

At the demo's own size, where parts that only act on large tensors act, each precision. `test_gradients_in_float64` has
the strategies and memory modes at this size, and `test_gradients_of_one_process` compares more, on images of 16 pixels.
"""

from pathlib import Path

import pytest
import torch

from ..conftest import last_checkpoint, metrics
from .commands import Command

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("demo size")]

FEW = (
    "experiment=demo model.n_iterations=3 trainer.accelerator=cpu trainer.max_steps=2 trainer.log_every_n_steps=1 "
    "data.n_train=4 data.n_val=1 data.n_test=1 data.num_workers=0 logger=csv test_after_training=false "
    "data.batch_size=2 memory=keep"
)
TOLERANCE = {"16-mixed": 5e-3, "bf16-mixed": 2.5e-2}
"""How far losses and mean gradients may be from those of another rounding."""
Trained = tuple[list[float], torch.Tensor, torch.Tensor]


def trained(command: Command, folder: Path, *words: str) -> Trained:
    """Losses, weights and moments after two steps: Muon's and AdamW's means of the gradients, not clipped here."""
    assert command(folder, "train", *FEW.split(), *words, "hydra.run.dir=run").code == 0
    checkpoint = last_checkpoint(folder / "run")
    states = checkpoint["optimizer_states"][0]["state"].values()
    moments = [state["momentum"] if "momentum" in state else state["exp_avg"] for state in states]
    vectors = (torch.cat([t.flatten() for t in tensors]) for tensors in (checkpoint["state_dict"].values(), moments))
    return metrics(folder / "run")["train/loss"], *vectors


@pytest.fixture(scope="module")
def expected(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """In full precision."""
    return trained(command, tmp_path_factory.mktemp("full"))


@pytest.mark.parametrize("precision", TOLERANCE)
def test_half_precision_is_near_full_precision(
    command: Command, tmp_path: Path, expected: Trained, precision: str
) -> None:
    """Of one process with two slices a step, because fp16 takes a CPU ten times as long."""
    losses, *vectors = trained(command, tmp_path, f"trainer.precision={precision}")
    assert losses == pytest.approx(expected[0], rel=TOLERANCE[precision])
    weights, moments = (float((a - b).norm() / b.norm()) for a, b in zip(vectors, expected[1:], strict=True))
    assert weights < TOLERANCE[precision] / 10
    assert 1e-5 < moments < TOLERANCE[precision]  # and it is not full precision
