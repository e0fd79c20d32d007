"""Promise 2: 34 of 34 kills resume bit for bit; a dead rank is named within seconds, no orphan; two writers never share
a folder.

No command writes into a folder in which another has written, or writes.
"""

from pathlib import Path

import numpy as np
import pytest

from ..conftest import lock_of_another
from .commands import contents, reconstruction, run, slice_hu

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("commands")]


@pytest.mark.parametrize(("source", "output", "words"), [
    (".", ".", "lies in input"),
    (".", "link/out", "lies in input"),  # a second call would take the results for slices
    ("s.npy", ".", "contains s.npy already"), ("s.npy", "../other", "contains scan.png already"),
])  # fmt: skip
def test_reconstructions_never_take_the_place_of_files(
    noise_free: Path, tmp_path: Path, source: str, output: str, words: str
) -> None:
    folder, other_folder = tmp_path / "in", tmp_path / "other"
    for path in (folder, other_folder):
        path.mkdir()
    np.save(folder / "s.npy", slice_hu(0))
    (tmp_path / "link").symlink_to(folder)
    (other_folder / "scan.png").write_text("mine")
    before = contents(tmp_path)
    place = tmp_path / output if output.startswith("link") else folder / output
    assert words in reconstruction(noise_free, folder / source, place).error
    assert contents(tmp_path) == before


def test_what_a_command_writes_is_for_its_user_alone(trained: Path, ct: Path, tmp_path: Path) -> None:
    """Pictures, slices and records may show patients."""
    assert reconstruction(trained, ct, tmp_path / "out").code == 0
    paths = [trained, *trained.rglob("*"), tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert {".png", ".dcm", ".ckpt", ".json"} <= {path.suffix for path in paths}
    open_names = [path.name for path in paths if path.stat().st_mode & 0o077]
    assert open_names == ["stdout.txt"]  # of this test


def test_an_evaluation_takes_a_folder_of_its_own(trained: Path, tmp_path: Path) -> None:
    """Neither that of a run nor that of another evaluation, nor one that another process writes to."""
    command = ["evaluate", f"run={trained}", "accelerator=cpu"]
    before = contents(trained)
    assert "contains checkpoints already" in run(*command, f"hydra.run.dir={trained}").error
    assert contents(trained) == before
    assert run(*command, f"hydra.run.dir={tmp_path}/old").code == 0
    before = contents(tmp_path)
    assert "give a new folder" in run(*command, "noise=none", f"hydra.run.dir={tmp_path}/old").error
    assert contents(tmp_path) == before

    folder = tmp_path / "new"
    with lock_of_another(folder):
        assert f"writes to {folder}" in run(*command, f"hydra.run.dir={folder}").error
