"""Other training loops: the example of docs/other_loops.md, run as it stands there."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from qnmixer.runs.records import read_metrics, read_results

from ..conftest import PHANTOMS, Outcome, assert_equal, last_checkpoint
from ..conftest import TINY as COMMON

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("loops")]

Run = Callable[..., Outcome]
DOCS = Path(__file__).parents[2] / "docs"
TINY = [*COMMON, *PHANTOMS, "callbacks=none"]
GAN = ["module._target_=my_gan.Gan", "+module.channels=4", "trainer.gradient_clip_val=null", *TINY]
TWO = ["trainer.devices=2", "data.batch_size=1"]
"""The two slices of a step, each on a device."""


def code_of(page: str) -> str:
    """The first Python of a page of docs."""
    return re.search(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)[1]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loops")
    (folder / "my_gan.py").write_text(code_of("other_loops.md"))
    assert len((folder / "my_gan.py").read_text().splitlines()) <= 60
    return folder


@pytest.fixture(scope="module")
def alone(here: Path, command: Run) -> Path:
    words = [*GAN, "test_after_training=true", "callbacks=default", "hydra.run.dir=alone"]
    outcome = command(here, "train", *words)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "step 4/4" in outcome.stdout
    return here / "alone"


def test_a_step_is_a_training_step_everywhere(alone: Path) -> None:
    found = last_checkpoint(alone)
    assert (read_results(alone)["steps"], found["global_step"]) == (4, 4)
    assert [state["state"][0]["step"] for state in found["optimizer_states"]] == [4, 4]
    rows = read_metrics(alone / "metrics.csv")
    trained = [row for row in rows if row["train/loss"]]
    assert [int(row["step"]) for row in trained] == [1, 2, 3, 4]
    assert [float(row["samples"]) for row in trained] == [2, 4, 6, 8]
    assert all(row["train/grad_norm"] and row["train/grad_norm_1"] and row["train/discriminator"] for row in trained)
    assert [int(row["step"]) for row in rows if row["val/psnr"]] == [2, 4]
    assert {float(row["train/lr_1"]) for row in trained} == {1e-4}
    assert (alone / "evaluation" / "table.csv").is_file()


def test_a_resumed_gan_is_that_of_one_run_bit_for_bit(here: Path, command: Run) -> None:
    constant = [*GAN, "schedule=constant"]
    for words in (
        [*constant, "trainer.max_steps=3", "hydra.run.dir=parts"],
        ["resume=parts", "trainer.max_steps=4"],
        [*constant, "hydra.run.dir=whole"],
    ):
        outcome = command(here, "train", *words)
        assert (outcome.code, outcome.stderr) == (0, "")
    one, other = last_checkpoint(here / "whole"), last_checkpoint(here / "parts")
    assert any(name.startswith("discriminator.") for name in one["state_dict"])
    for part in ("state_dict", "optimizer_states"):
        assert_equal(other[part], one[part])
    parts, whole = (
        [(row["step"], row["train/loss"]) for row in read_metrics(here / name / "metrics.csv") if row["train/loss"]]
        for name in ("parts", "whole")
    )
    assert parts == whole


WRONG = """
import os
from my_gan import Gan

class Wrong(Gan):
    def surprise(self, image, is_true, weight):
        return super().surprise(image, is_true, weight) * (1.001 if os.environ.get("RANK") == "1" else 1)
"""


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_doctor_tells_right_gradients_from_wrong_ones(here: Path, command: Run, strategy: str) -> None:
    """In float64. In float32 rounding alone comes to 1e-4: Adam makes a full step of every gradient, however small."""
    (here / "my_wrong_gan.py").write_text(WRONG)
    words = [*GAN, f"strategy={strategy}", *TWO, "+module.adversarial=0.1"]
    right, wrong = (command(here, "doctor", *words, *more) for more in ([], ["module._target_=my_wrong_gan.Wrong"]))
    assert (right.code, right.stderr) == (0, ""), right.stdout
    assert re.search("PASS  gradients .*1e-06 allowed", right.stdout)
    assert wrong.code == 1
    assert [line.split()[1] for line in wrong.stdout.splitlines() if line.startswith("FAIL")] == ["gradients"]


def test_what_pipeline_and_a_plan_cannot_is_one_line(here: Path, command: Run) -> None:
    words = [word for word in GAN if not word.startswith(("logger", "test_after"))]
    assert "Gan optimizes by itself (automatic_optimization=False)" in command(here, "plan", *words).error
    line = command(here, "train", *GAN, "strategy=pipeline", *TWO, "hydra.run.dir=piped").error
    assert line.endswith("(automatic_optimization=False): choose strategy=single, ddp or fsdp")


UNUSED = """
from torch import nn
from qnmixer.models import LEARN

class Unused(LEARN):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.extra = nn.Conv2d(1, 4, 3)
"""


def unused(here: Path) -> list[str]:
    """Words of a run whose network has a weight that no loss depends on."""
    (here / "my_unused.py").write_text(UNUSED)
    words = [word for word in TINY if not word.startswith("model.")]
    words += ["model=custom", "model._target_=my_unused.Unused", "model.n_iterations=2", "model.channels=4"]
    return [*words, "strategy=ddp", *TWO, "optimizer=adamw"]


def test_a_weight_without_a_gradient_is_named_in_one_line(here: Path, command: Run) -> None:
    words = unused(here)
    expected = (
        "waits for a gradient of network.extra.weight and 1 more, but the loss does not depend on it: take the weight "
        "out (or requires_grad_(False)), or set strategy.find_unused_parameters=true"
    )
    line = command(here, "train", *words, "hydra.run.dir=unused").error
    assert line.endswith(expected)
    assert "strategy=ddp" in line
    checked = command(here, "doctor", *words)
    found, _, fix = expected.rpartition(": ")
    assert any(found in line and fix in line for line in checked.stdout.splitlines())


@pytest.mark.long
def test_a_weight_without_a_gradient_trains_by_the_advice(here: Path, command: Run) -> None:
    words = [*unused(here), "strategy.find_unused_parameters=true", "hydra.run.dir=used"]
    assert command(here, "train", *words).code == 0
