"""What a run says and does around training."""

from collections.abc import Callable
from pathlib import Path

import pytest

from qnmixer.config import Config
from qnmixer.tracking.metrics_file import read_metrics
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


def test_an_epoch_of_fewer_batches(tiny_config: TinyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["+trainer.limit_train_batches=3", "trainer.max_epochs=2", "trainer.max_steps=-1"]
    fit(tiny_config(*overrides, "trainer.val_every_n_steps=null", "test_after_training=false"), tmp_path, [])
    assert "2 epochs (6 steps)" in capsys.readouterr().out
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [int(row["step"]) for row in rows if row["val/psnr"]] == [3, 6]
    assert float(rows[-1]["samples"]) == 12


def test_arguments_of_the_trainer_reach_it(tiny_config: TinyConfig, tmp_path: Path) -> None:
    overrides = ["+trainer.profiler=simple", "+trainer.max_time=00:00:00:01", "trainer.max_steps=-1"]
    overrides += ["trainer.max_epochs=100000", "+trainer.gradient_clip_algorithm=value", "test_after_training=false"]
    fit(tiny_config(*overrides), tmp_path, [])
    results = read_results(tmp_path)
    assert results["status"] == "done"
    assert 0 < results["steps"] < 400000
    assert "run_training_batch" in "".join(path.read_text() for path in (tmp_path / "profile").iterdir())
