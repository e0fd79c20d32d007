import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.memory.plan import Planner
from qnmixer.engine.memory.usage import MIB
from qnmixer.engine.reports.terminal import Console
from qnmixer.engine.training.callbacks import MeanWeights, MemoryMonitor
from qnmixer.module import ReconstructionModule

from ..conftest import every_third

TinyModule = Callable[..., ReconstructionModule]


def train(module: ReconstructionModule, folder: Path, *callbacks: Callback, **options: Any) -> list[dict[str, str]]:
    """Rows of metrics.csv that hold memory."""
    options = {"limit_val_batches": 0, "log_every_n_steps": 1, "accelerator": "cpu", **options}
    trainer = L.Trainer(
        logger=CSVLogger(folder, name=""), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder, callbacks=list(callbacks),
        **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=SliceDataModule(module.config.data))
    rows = csv.DictReader((Path(str(trainer.log_dir)) / "metrics.csv").read_text().splitlines())
    return [row for row in rows if row["memory/allocated_mib"]]


def monitor() -> MemoryMonitor:
    return MemoryMonitor(Console(file=io.StringIO(), width=80))


def lines(watching: MemoryMonitor) -> list[str]:
    assert isinstance(watching.console.file, io.StringIO)
    return watching.console.file.getvalue().splitlines()


@pytest.mark.parametrize("overrides", every_third([[], ["data.simulation_factor=2"], ["callbacks=ema"]]))
def test_after_the_second_step_a_line_says_what_the_plan_says_too(
    tiny_module: TinyModule, tmp_path: Path, overrides: list[str]
) -> None:
    watching, module = monitor(), tiny_module("model.n_iterations=4", *overrides)
    averaging = [MeanWeights()] if "ema" in module.config.callbacks else []
    rows = train(module, tmp_path, watching, *averaging, max_steps=4, gradient_clip_val=1.0)
    assert watching.measured_mib is not None
    assert lines(watching) == [f"memory: {watching.measured_mib:.0f} MiB in tensors at the peak of a step"]
    in_metrics = [row["memory/peak_mib"] for row in rows]
    assert in_metrics[0] == ""
    assert float(in_metrics[1]) == pytest.approx(watching.measured_mib)
    planned = Planner(module.config).estimate(module.config).peak / MIB
    assert watching.measured_mib == pytest.approx(planned, rel=0.02)
