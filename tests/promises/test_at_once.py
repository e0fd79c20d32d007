"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

What a command says at once, before torch or Lightning is loaded: its help, its version, and the first line of a run.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from qnmixer.commands import command
from qnmixer.settings.compose import compose
from qnmixer.settings.run import parse

from ..conftest import environment
from ..conftest import python as real
from ..heavy import LOADED, path_without
from ..pages import SEARCH_PATH
from ..terminal import in_terminal
from ..warm import Done, Warm

pytestmark = pytest.mark.slow

ASK = """
eval "$(qnmixer-train -sc install=bash)"
for typed in strategy= schedule.w debug=o; do
    COMP_LINE="qnmixer-train $typed" COMP_WORDS=(qnmixer-train "$typed") COMP_CWORD=1
    hydra_bash_completion
    printf '%s\\n' "${COMPREPLY[@]}"
done
"""


Python = Callable[..., Any]
"""python(folder, *words, **variables): code, output and error of a process; `real`, or the fixture `forked`."""


@pytest.fixture
def forked(cold: Warm) -> Python:
    """The same of a process that has loaded torch alone."""

    def run(folder: Path, *words: str, **variables: str) -> Done:
        return cold.run(*words, cwd=folder, env=environment(**variables), timeout=120)

    return run


def first_lines(python: Python, folder: Path, *words: str, **variables: str) -> list[str]:
    """What a command prints until it imports the first large library."""
    process = python(folder, "-m", *words, PYTHONPATH=path_without(folder), **variables)
    assert (process.returncode, process.stderr) == (LOADED, "")
    *lines, last_line = process.stdout.splitlines()
    assert last_line.endswith(" was imported")
    return lines


# Help


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the console script, as pip writes it, and torch as a module that fails to import."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "qnmixer-train"
    script.write_text(f"#!{sys.executable}\nfrom qnmixer.train import main\nmain()\n")
    script.chmod(0o755)
    (folder / "torch.py").write_text("raise ZeroDivisionError")
    return folder


def test_bash_completes(installed: Path, tmp_path: Path) -> None:
    paths = {"PATH": f"{installed}:{os.environ['PATH']}", "PYTHONPATH": f"{installed}:{os.environ.get('PYTHONPATH')}"}
    process = subprocess.run(
        ["bash", "-c", ASK], cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, timeout=60
    )
    assert process.stderr == ""
    assert {*process.stdout.split()} == {
        *(f"strategy={option}" for option in ("ddp", "fsdp", "pipeline", "single")), "schedule.warmup=",
        "debug=off", "debug=overfit",
    }  # fmt: skip


ALL = """
import importlib, sys
for name in "train evaluate reconstruct compare export plan doctor".split():
    sys.argv = [name, "--help"]
    importlib.import_module(f"qnmixer.{name}").main()
sys.argv = ["train", "--version"]
importlib.import_module("qnmixer.train").main()
"""


@pytest.mark.parametrize(("words", "answers"), [
    pytest.param(
        ["-c", ALL],
        ["n_iterations", *(f"python -m qnmixer.{name} " for name in ("evaluate", "export", "doctor"))],
        marks=pytest.mark.extras,
    ),
    (["-m", "qnmixer.train", "--cfg", "job"], ["n_iterations"]),
    (["-m", "qnmixer.train", "--info", "defaults"], ["qn_mixer"]),
], ids=["help of each command", "config", "defaults"])  # fmt: skip
def test_questions_are_answered_without_torch(
    installed: Path, tmp_path: Path, words: list[str], answers: list[str]
) -> None:
    process = real(tmp_path, *words, PYTHONPATH=f"{installed}:{os.environ.get('PYTHONPATH', '')}")
    assert (process.returncode, process.stderr) == (0, "")
    assert all(word in process.stdout for word in answers)
    assert words[0] == "-m" or process.stdout.endswith(f"qnmixer {version('qnmixer')}\n")
    assert not list(tmp_path.iterdir())


def test_a_traceback_is_there_for_who_asks(tmp_path: Path) -> None:
    process = real(
        tmp_path, "-m", "qnmixer.train", "geometry.n_views=0", "hydra.run.dir=run", **{command.TRACEBACK: "1"}
    )
    assert process.returncode != 0
    assert "Traceback (most recent call last)" in process.stderr
    assert "geometry.n_views=0 should be greater than or equal to 1" in process.stderr.splitlines()[-1]


# The first line


@pytest.mark.parametrize(("words", "line"), [
    ("train experiment=demo model=learn hydra.run.dir=my/run",
     "starting a run in {}/my/run: experiment=demo, model=learn, data=phantoms (loading Lightning …)"),
    ("train resume=run", "resuming the run in {}/run: model=qn_mixer, data=phantoms (loading Lightning …)"),
    ("evaluate run=pretrained", "evaluating pretrained (loading PyTorch …)"),
    ("compare sweep=a_sweep", "comparing the jobs of a_sweep (loading PyTorch …)"),
    ("reconstruct run=pretrained input=a_sweep output=out", "reconstructing a_sweep by pretrained (loading PyTorch …)"),
])  # fmt: skip
def test_a_command_says_at_once_what_it_does(forked: Python, tmp_path: Path, words: str, line: str) -> None:
    """Of a checkpoint it has a name alone: what is in it is not looked at before."""
    for path in ("run/checkpoints/last.ckpt", "a_sweep/sweep.json"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    (tmp_path / "run" / "results.json").write_text('{"status": "interrupted", "overrides": []}')
    python = real if words.startswith("train experiment") else forked
    assert first_lines(python, tmp_path, *f"qnmixer.{words}".split()) == [line.format(tmp_path)]


def test_a_terminal_shows_that_settings_are_read_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(f"import os\nos._exit({LOADED})\n")
    command = [sys.executable, "-m", "qnmixer.train", "experiment=demo", "hydra.run.dir=run"]
    session = in_terminal(command, cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    assert session.code == LOADED
    assert "reading the settings …" in session.text


def test_json_has_no_line_before_it_and_of_several_processes_only_the_first_says_it(
    forked: Python, tmp_path: Path
) -> None:
    assert first_lines(forked, tmp_path, "qnmixer.doctor", "format=json") == []
    words = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "hydra.run.dir=run"]
    variables = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}
    assert first_lines(forked, tmp_path, "qnmixer.train", *words, **variables) == []


BESIDE = [
    *(
        f"experiment=demo model={model}"
        for model in ("tv", "fbp", "fbpconvnet", "regformer", "learn", "learned_primal_dual", "itnet")
    ),
    *(f"experiment=pretrained data={source} data.root=." for source in ("dicom", "numpy")),
    *(f"experiment=measured data={source} data.root=." for source in ("dicom", "numpy")),
    *(f"experiment=compare_small data={source} data.root=." for source in ("dicom", "numpy")),
    "experiment=paper_aapm data=phantoms",
]
"""Words of an experiment, beside an option that cannot have what the experiment sets."""


@pytest.mark.parametrize("words", [BESIDE[0], BESIDE[-2], BESIDE[-1]])
def test_experiments_start_beside_other_options(tmp_path: Path, cold: Warm, words: str) -> None:
    """All checks are before this line."""
    path = {"PYTHONPATH": path_without(tmp_path)}
    process = cold.run(
        "-m", "qnmixer.train", *words.split(), SEARCH_PATH, "hydra.run.dir=run", cwd=tmp_path, env=os.environ | path
    )
    assert (process.returncode, process.stderr) == (LOADED, "")
    (line, _) = process.stdout.splitlines()
    start, _, settings = line.removesuffix(" (loading Lightning …)").partition(": ")
    assert start == f"starting a run in {tmp_path / 'run'}"
    assert {word for word in words.split() if not word.startswith("data.root")} <= {*settings.split(", ")}


@pytest.mark.parametrize("words", BESIDE)
def test_what_an_experiment_sets_stops_no_other_option(words: str) -> None:
    """Each part that is named is the class that it is without the experiment."""
    config = parse(compose("train", [SEARCH_PATH, *words.split()])).plain()
    _, *options = words.split()
    plain_config = parse(compose("train", options)).plain()
    for group in (word.partition("=")[0] for word in options if not word.startswith("data.root")):
        assert config[group]["_target_"] == plain_config[group]["_target_"]
