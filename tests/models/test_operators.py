"""Budgets of operators: a change that doubles them fails. `python -m tests.operators OVERRIDES` says where they are."""

import pytest

from ..operators import SMALL_IMAGES, count_step

DEMO = ["experiment=demo", *SMALL_IMAGES]


@pytest.mark.parametrize(
    ("overrides", "budget"),
    [
        ([*SMALL_IMAGES, "memory=keep"], 6400),
        ([*DEMO, "memory=keep"], 2900),
        ([*DEMO, "memory=recompute"], 3850),
    ],
)
def test_a_training_step_stays_within_its_budget(overrides: list[str], budget: int) -> None:
    operators = count_step(*overrides)
    assert 0.9 * budget < operators.total <= budget
    of_files = {place for _, place in operators.by_place}
    assert of_files >= {"models/latent_bfgs.py", "models/incept_mixer.py", "physics/scan.py", "training/module.py"}
