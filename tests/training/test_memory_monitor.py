import io
import shutil
from pathlib import Path

import pytest

from qnmixer.fit import fit
from qnmixer.memory.plan import Planner
from qnmixer.parallel.device_memory import MIB
from qnmixer.runs.records import read_metrics, read_results
from qnmixer.runs.run import Run
from qnmixer.runs.terminal import Console
from qnmixer.training.callbacks import MemoryMonitor

from ..conftest import every_third, tiny_config
from .test_progress import train


def monitor() -> MemoryMonitor:
    return MemoryMonitor(Console(file=io.StringIO(), width=80))


def lines(watching: MemoryMonitor) -> list[str]:
    assert isinstance(watching.console.file, io.StringIO)
    return watching.console.file.getvalue().splitlines()


@pytest.mark.parametrize("overrides", every_third([[], ["data.simulation_factor=2"], ["callbacks=ema"]]))
def test_after_two_steps_a_line_says_the_plan(tmp_path: Path, overrides: list[str]) -> None:
    watching, config = monitor(), tiny_config("trainer.limit_val_batches=0", *overrides)
    train(config, tmp_path, watching)
    assert watching.measured_mib is not None
    assert lines(watching) == [f"memory: {watching.measured_mib:.0f} MiB in tensors at the peak of a step"]
    in_metrics = [row["memory/peak_mib"] for row in read_metrics(tmp_path / "metrics.csv")]
    assert in_metrics[0] == ""
    assert float(in_metrics[1]) == pytest.approx(watching.measured_mib)
    planned = Planner(config).estimate(config).peak / MIB
    assert watching.measured_mib == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize(("overrides", "measured_at", "slices"), [
    (["data.n_train=5"], 3, None),  # 4, 1, 4
    (["data.n_train=6", "trainer.max_steps=2"], None, 2),
    (["data.n_train=3"], None, 3),  # every epoch is one step of three slices
    (["data.n_train=9", "trainer.accumulate_grad_batches=2"], 2, None),  # filled with slices of no weight
])  # fmt: skip
def test_a_step_of_fewer_slices_is_not_taken_for_a_whole_one(
    tmp_path: Path, overrides: list[str], measured_at: int | None, slices: int | None
) -> None:
    words = ["data.batch_size=4", "trainer.limit_val_batches=0"]
    watching, config = monitor(), tiny_config(*words, *overrides)
    train(config, tmp_path, watching)
    in_metrics = [row.get("memory/peak_mib", "") for row in read_metrics(tmp_path / "metrics.csv")]
    if slices is not None:
        measured = watching.as_record()
        short = measured["short_step"]
        assert short is not None
        assert measured == {"measured_step": None, "short_step": short, "slices": slices}
        assert lines(watching) == [
            f"memory: {short:.0f} MiB in tensors at the peak of a step with {slices} slices; a whole batch has 4, and "
            "needs more"
        ]
        assert set(in_metrics) == {""}
        config = config.changed(data=config.data.changed(batch_size=slices))
    else:
        short = watching.measured_mib
        assert measured_at == next(n for n, value in enumerate(in_metrics, 1) if value)
        assert watching.as_record() == {"measured_step": short}
        assert len(lines(watching)) == 1
    planned = Planner(config).estimate(config).peak / MIB
    assert short == pytest.approx(planned, rel=0.03)


def test_a_resumed_run_keeps_memory_of_equal_settings(tmp_path: Path) -> None:
    """One more step, in which nothing is measured."""
    words = ["test_after_training=false", "data.n_train=8", "data.batch_size=4"]
    fit(tiny_config(*words, "trainer.max_steps=3"), Run(tmp_path / "run"))
    measured = read_results(tmp_path / "run")["memory"]["measured_step"]
    assert measured > 0
    for name, more, kept in (("same", [], measured), ("other", ["memory=recompute"], None)):
        folder = shutil.copytree(tmp_path / "run", tmp_path / name)
        config = tiny_config(*words, *more, "trainer.max_steps=4", f"resume={folder}")
        fit(config, Run(folder, resume=str(folder)))
        assert read_results(folder)["memory"] == {"measured_step": kept}
