"""`qnmixer.export` by the code that its command runs, on an untrained network."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.engine.build import build_module
from qnmixer.engine.cli import command
from qnmixer.engine.config.compose import compose, quoted
from qnmixer.engine.config.run import parse
from qnmixer.engine.data.phantoms import phantom
from qnmixer.export import check, export
from qnmixer.reconstruct import check as check_reconstruct
from qnmixer.reconstruct import reconstruct

from .schemas import SCHEMAS

TINY = [
    "data.image_size=32", "geometry.n_views=8", "geometry.n_detectors=48", "geometry.detector_pitch=20",
    "model.n_iterations=2", "model.channels=8", "model.n_mixer_layers=1", "logger=csv",
]  # fmt: skip


def run(task: Any, check: Any, name: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error of a command."""
    code, stdout, stderr = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", [name, *arguments])
        patch.delenv(command.TRACEBACK, raising=False)
        try:
            command.run(task, check, SCHEMAS[name])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, stdout.getvalue(), stderr.getvalue()


def save(folder: Path, *overrides: str, seed: int = 0) -> Path:
    """A run folder with random weights as its best."""
    torch.manual_seed(seed)
    module = build_module(parse(compose("train", list(overrides))))
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict(), "global_step": 3}
    module.on_save_checkpoint(checkpoint)
    path = folder / "checkpoints" / "best.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, path)
    return folder


def refusal(*arguments: str) -> str:
    code, stdout, stderr = run(export, check, "export", *arguments)
    assert (code, stdout) == (1, "")
    (line,) = stderr.splitlines()
    return line.removeprefix("error: ")


def test_weights_and_card_and_the_same_reconstruction(tmp_path: Path) -> None:
    folder, output = save(tmp_path / "run", *TINY), tmp_path / "to [bold]" / "my.safetensors"
    given = [f"run={folder}", f"output={quoted(output)}"]
    code, stdout, stderr = run(export, check, "export", *given)
    assert (code, stderr) == (0, "")
    assert f"card: {output.with_suffix('.md')}" in stdout.splitlines()
    assert sorted(path.name for path in output.parent.iterdir()) == ["my.md", "my.safetensors"]
    text = output.with_suffix(".md").read_text()
    assert "| best, after 3 of unknown steps |" in text
    assert str(tmp_path) not in text
    np.save(tmp_path / "slice.npy", phantom(48, seed=0, part="test", index=0))
    for name, weights in (("a", folder), ("b", output)):
        words = [f"run={quoted(weights)}", f"input={tmp_path}/slice.npy", f"output={tmp_path / name}", "formats=[npy]"]
        code, _, stderr = run(reconstruct, check_reconstruct, "reconstruct", *words)
        assert code == 0, stderr
    assert (tmp_path / "a" / "slice.npy").read_bytes() == (tmp_path / "b" / "slice.npy").read_bytes()

    before = output.read_bytes()
    assert f"{output} exists already and is not overwritten" in refusal(*given)
    assert output.read_bytes() == before
    notes = tmp_path / "notes.md"  # the place of the card
    notes.write_text("mine")
    assert f"{notes} exists already" in refusal(given[0], f"output={notes.with_suffix('.safetensors')}")
    assert notes.read_text() == "mine"


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    output = f"output={tmp_path}/my.safetensors"
    assert "run=pretrained is a weights file already" in refusal("run=pretrained", output)
    sizes = [word for word in TINY if not word.startswith("model.")]
    folder = save(tmp_path / "run", *sizes, "model=fbp")
    assert "model=fbp, which has no weights" in refusal(f"run={folder}", output)
    path = (folder / "checkpoints" / "best.ckpt").rename(tmp_path / "best.ckpt")
    assert f"{path} lies in no run folder" in refusal(f"run={path}", output)
