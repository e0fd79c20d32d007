import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qnmixer.engine.config.run import Config
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
