"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

What a command says of itself: its help, its version, a traceback on request. It does not wait for torch.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from qnmixer.engine import cli

ASK = """
eval "$(qnmixer-train -sc install=bash)"
COMP_LINE="qnmixer-train $1" COMP_WORDS=(qnmixer-train "$1") COMP_CWORD=1
hydra_bash_completion
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the console script, as pip writes it, and torch as a module that fails to import."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "qnmixer-train"
    script.write_text(f"#!{sys.executable}\nfrom qnmixer.train import main\nmain()\n")
    script.chmod(0o755)
    (folder / "torch.py").write_text("raise ZeroDivisionError")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("strategy=", ["strategy=ddp", "strategy=fsdp", "strategy=pipeline", "strategy=single"]),
        ("schedule.w", ["schedule.warmup="]),
        ("debug=o", ["debug=off", "debug=overfit"]),
    ],
)
def test_bash_completes(installed: Path, tmp_path: Path, typed: str, offered: list[str]) -> None:
    environment = os.environ | {"PATH": f"{installed}:{os.environ['PATH']}", "PYTHONPATH": str(installed)}
    result = subprocess.run(
        ["bash", "-c", ASK, "bash", typed], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.stderr == ""
    assert sorted(result.stdout.split()) == offered


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"], ["--info", "defaults"]], ids=" ".join)
def test_questions_are_answered_without_torch(installed: Path, tmp_path: Path, flags: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "qnmixer.train", *flags], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": str(installed)},
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert "n_iterations" in result.stdout or "qn_mixer" in result.stdout
    assert not list(tmp_path.iterdir())


def test_the_version_is_this_programs() -> None:
    assert process("qnmixer.train", "--version").stdout == f"qnmixer {version('qnmixer')}\n"


def process(*arguments: str, full_error: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop(cli.TRACEBACK, None)
    if full_error:
        environment[cli.TRACEBACK] = "1"
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, env=environment, timeout=120
    )


def test_a_traceback_is_there_for_who_asks(tmp_path: Path) -> None:
    result = process("qnmixer.train", "geometry.n_views=0", f"hydra.run.dir={tmp_path / 'run'}", full_error=True)
    assert result.returncode != 0
    assert "Traceback (most recent call last)" in result.stderr
    assert "geometry.n_views=0 should be greater than or equal to 1" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["train", "evaluate", "reconstruct", "compare", "export", "plan", "doctor"])
def test_help_does_not_wait_for_torch(name: str) -> None:
    body = (
        f"import sys; from qnmixer.{name} import main; sys.argv[1:] = ['--help']; main(); print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True, timeout=120).stdout
    assert shown.splitlines()[-1] == "False"
