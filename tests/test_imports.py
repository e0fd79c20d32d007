"""Modules that a command loads, and names that stand in one place only. `lint-imports` checks the rooms."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import qnmixer

SRC = Path(qnmixer.__file__).parent


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("qnmixer", {"torch", "numpy", "omegaconf", "rich"}),
        ("qnmixer.settings.run", {"torch", "lightning"}),
        ("qnmixer.reconstruction.reconstruct", {"lightning", "torchmetrics", "matplotlib", "torch._dynamo"}),
        pytest.param(
            "qnmixer.extras.export.run", {"lightning", "torchmetrics", "matplotlib"}, marks=pytest.mark.extras
        ),
    ],
)
def test_what_is_not_needed_is_not_loaded(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print(*(name for name in {sorted(unwanted)} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_one_file_reaches_into_lightning() -> None:
    private = re.compile(
        r"from lightning[\w.]*(\._\w+|\bloops\b)[\w.]* import|from lightning[\w.]* import .*\b_\w"  # modules, names
        r"|\b(fit|val|epoch|evaluation)_loop\b|_batches_that_stepped|\btrainer\._\w"  # loops and attributes
    )
    found = {str(path.relative_to(SRC)) for path in SRC.rglob("*.py") if private.search(path.read_text())}
    assert found == {"parallel/lightning_private.py"}
