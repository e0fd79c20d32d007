"""What a run says and does around training."""

from collections.abc import Callable
from pathlib import Path

import pytest

from qnmixer.config import Config
from qnmixer.tracking.results import read_results
from qnmixer.training.fit import fit

TinyConfig = Callable[..., Config]


@pytest.mark.parametrize(
    ("overrides", "steps", "line"),
    [  # eight slices, four steps an epoch
        (["trainer.max_epochs=2", "trainer.max_steps=-1"], 8, "training ends after 2 epochs (8 steps)"),
        (["trainer.max_steps=2"], 2, "training ends after 2 steps (0.5 epochs)"),
        (
            ["trainer.max_epochs=1", "trainer.max_steps=3"],
            3,
            "ends after 3 steps, before trainer.max_epochs=1 (4 steps)",
        ),
        (
            ["trainer.max_epochs=1", "trainer.max_steps=9"],
            4,
            "ends after 1 epoch (4 steps), before trainer.max_steps=9",
        ),
    ],
)
def test_the_start_says_which_limit_ends_a_run(
    overrides: list[str],
    steps: int,
    line: str,
    tiny_config: TinyConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(tiny_config(*overrides, "test_after_training=false"), tmp_path, [])
    assert line in capsys.readouterr().out
    assert read_results(tmp_path)["steps"] == steps
