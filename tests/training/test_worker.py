import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qnmixer.engine.config import Config
from qnmixer.engine.tracking.run import Run
from qnmixer.engine.training.worker import fit_in_processes
from qnmixer.errors import CheckpointError
from qnmixer.train import FIT

DDP = ["strategy=ddp", "trainer.devices=1"]


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("key", ["finetune", "resume"])
def test_a_run_that_is_not_there_is_refused_before_there_are_ranks(
    tiny_config: Callable[..., Config], tmp_path: Path, key: str
) -> None:
    """Data that are not there: tests/promises has them."""
    overrides = [*DDP, f"{key}={tmp_path}/none"]
    config = tiny_config(*overrides)
    with pytest.raises(CheckpointError, match="no run folder at"):
        fit_in_processes(config, Run(tmp_path / "run", overrides, config.resume), FIT)
    assert record(tmp_path / "run")["status"] == "failed"
    assert "no run folder at" in record(tmp_path / "run")["error"]
    assert record(tmp_path / "run")["overrides"] == overrides


def test_the_process_that_watches_does_without_lightning() -> None:
    """Its import takes longer than all else that this process does."""
    code = """
import sys
from pathlib import Path
from qnmixer.engine.config import parse
from qnmixer.engine.config.compose import compose
from qnmixer.engine.processes import launch
from qnmixer.engine.tracking.run import Run
from qnmixer.engine.training import worker
config = parse(compose("train", ["experiment=demo", "strategy=ddp", "trainer.devices=1"]))
worker._check_inputs(config, Run(Path("nowhere")))
print(*(name for name in ("lightning", "torchmetrics", "torch._dynamo") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


@pytest.mark.slow
@pytest.mark.long
def test_one_process_is_a_tree_too(
    tiny_config: Callable[..., Config], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = [*DDP, "trainer.max_steps=2"]
    best = fit_in_processes(tiny_config(*overrides, "test_after_training=false"), Run(tmp_path, overrides), FIT)
    assert record(tmp_path)["status"] == "done"
    assert record(tmp_path)["best"]["val/psnr"] == best
    assert record(tmp_path)["overrides"] == overrides
    with (tmp_path / "metrics.csv").open(newline="") as stream:
        assert len([line for line in csv.DictReader(stream) if line["train/loss"]]) == 2
    assert capfd.readouterr().err == ""
