"""Run folders with untrained weights, and commands on them by the code that they run, in this process."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from qnmixer.commands import command
from qnmixer.module.base import RunModule
from qnmixer.module.build import build_module
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.reconstruction.weights import CHECKPOINT_KEY
from qnmixer.settings.compose import compose
from qnmixer.settings.run import parse

from .schemas import SCHEMAS

TINY = [
    "data.image_size=32", "geometry.n_views=8", "geometry.n_detectors=48", "geometry.detector_pitch=20",
    "model.n_iterations=2", "model.channels=8", "model.n_mixer_layers=1", "logger=csv",
]  # fmt: skip


def run(task: Any, check: Any, name: str, *arguments: str, **options: Any) -> tuple[int, str, str]:
    """Exit code, output and error of a command; `options` of command.run."""
    code, stdout, stderr = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", [name, *arguments])
        patch.delenv(command.TRACEBACK, raising=False)
        try:
            command.run(task, check, SCHEMAS[name], **options)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, stdout.getvalue(), stderr.getvalue()


def checkpoint_of(module: RunModule | Reconstructor) -> dict[str, Any]:
    """What commands read of the checkpoint of a run."""
    settings = {"format": 1, "config": module.config.plain()}
    return {"state_dict": module.state_dict(), "global_step": 3, CHECKPOINT_KEY: settings}


def write_checkpoint(module: RunModule | Reconstructor, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint_of(module), path)
    return path


def save(folder: Path, *overrides: str, seed: int = 0) -> Path:
    """A run folder with random weights as its best."""
    torch.manual_seed(seed)
    write_checkpoint(build_module(parse(compose("train", list(overrides)))), folder / "checkpoints" / "best.ckpt")
    return folder
