"""Two commands, without what is extra: the core trains, evaluates and reconstructs with `extras/` taken away."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import qnmixer

from ..conftest import PHANTOMS, TINY


@pytest.mark.slow
@pytest.mark.long
def test_the_core_needs_no_extras(tmp_path: Path) -> None:
    source = Path(qnmixer.__file__).parents[1]
    without = shutil.ignore_patterns("extras", "__pycache__", "*.egg-info")
    shutil.copytree(source, tmp_path / "src", ignore=without)
    assert not (tmp_path / "src" / "qnmixer" / "extras").exists()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}

    def run(command: str, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", f"qnmixer.{command}", *words],
            cwd=tmp_path, env=environment, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout

    run("train", *TINY, *PHANTOMS, "hydra.run.dir=run")
    assert "QN-Mixer" in run("evaluate", "run=run", "hydra.run.dir=scores")
    slices = np.full((2, 16, 16), -1000, np.float32)
    slices[:, 4:12, 4:12] = 0
    np.save(tmp_path / "slices.npy", slices)
    run("reconstruct", "run=run", "input=slices.npy", "output=images")
    assert len([*(tmp_path / "images").iterdir()]) > 0
