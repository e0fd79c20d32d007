"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

The first line of a run, before Lightning is loaded.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..heavy import LOADED, path_without
from ..warm import Warm

pytestmark = pytest.mark.slow


def first_lines(folder: Path, *arguments: str, **more: str) -> list[str]:
    """What a command prints until it imports the first large library."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HYDRA", "SLURM", "TORCHELASTIC"))
    }
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, capture_output=True, text=True, timeout=60,
        env=kept | {"PYTHONPATH": path_without(folder)} | more,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (LOADED, "")
    *lines, last = done.stdout.splitlines()
    assert last.endswith(" was imported")
    return lines


def test_a_run_says_at_once_where_it_is_and_what_it_trains(tmp_path: Path) -> None:
    (line,) = first_lines(tmp_path, "qnmixer.train", "experiment=demo", "model=learn", "hydra.run.dir=my/run")
    where = tmp_path / "my" / "run"
    assert line == f"starting a run in {where}: experiment=demo, model=learn, data=phantoms (loading PyTorch …)"


def test_a_resumed_run_says_that_it_is(tmp_path: Path) -> None:
    """Of a checkpoint it has a name alone: what is in it is not looked at before."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "last.ckpt").touch()
    (tmp_path / "run" / "results.json").write_text('{"status": "interrupted", "overrides": []}')
    (line,) = first_lines(tmp_path, "qnmixer.train", "resume=run")
    assert line == f"resuming the run in {tmp_path / 'run'}: model=qn_mixer, data=phantoms (loading PyTorch …)"


@pytest.mark.parametrize(
    "overrides",
    [
        *(
            f"experiment=demo model={it}"
            for it in ["tv", "fbp", "fbpconvnet", "regformer", "learn", "learned_primal_dual", "itnet"]
        ),
        *(f"experiment={it} data=dicom data.root=." for it in ("pretrained", "measured", "compare_small")),
        *(f"experiment={it} data=numpy data.root=." for it in ("pretrained", "measured", "compare_small")),
        "experiment=paper_aapm data=phantoms",
    ],
)
def test_experiments_start_beside_other_options(tmp_path: Path, cold: Warm, overrides: str) -> None:
    """What an experiment sets and the chosen option cannot have stops no command; the checks are before this line."""
    environment = os.environ | {"PYTHONPATH": path_without(tmp_path)}
    done = cold.run("-m", "qnmixer.train", *overrides.split(), "hydra.run.dir=run", cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (LOADED, "")
    line, last = done.stdout.splitlines()
    words = ", ".join(word for word in overrides.split() if not word.startswith("data.root"))
    assert line.startswith(f"starting a run in {tmp_path / 'run'}: ")
    assert {*words.split(", ")} <= {*line.partition(": ")[2].replace(" (loading PyTorch …)", "").split(", ")}
    assert last == "lightning was imported"


@pytest.mark.parametrize(("rank", "n_lines"), [("0", 1), ("1", 0)])
def test_of_several_processes_the_first_says_it(tmp_path: Path, rank: str, n_lines: int) -> None:
    by_torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": rank, "WORLD_SIZE": "2"}
    lines = first_lines(
        tmp_path,
        "qnmixer.train",
        "strategy=ddp",
        "trainer.devices=2",
        "trainer.accelerator=cpu",
        "hydra.run.dir=run",
        **by_torchrun,
    )
    assert len(lines) == n_lines


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("qnmixer.evaluate run=pretrained", "evaluating pretrained (loading PyTorch …)"),
        ("qnmixer.compare sweep=a_sweep", "comparing the jobs of a_sweep (loading PyTorch …)"),
        (
            "qnmixer.reconstruct run=pretrained input=a_sweep output=out",
            "reconstructing a_sweep by pretrained (loading PyTorch …)",
        ),
    ],
)
def test_other_commands_say_what_they_do(tmp_path: Path, arguments: str, line: str) -> None:
    (tmp_path / "a_sweep").mkdir()
    (tmp_path / "a_sweep" / "sweep.json").touch()
    assert first_lines(tmp_path, *arguments.split()) == [line]


def test_json_has_no_line_before_it(tmp_path: Path) -> None:
    assert first_lines(tmp_path, "qnmixer.doctor", "format=json") == []
