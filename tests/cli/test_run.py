import errno
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from qnmixer.engine.cli import command
from qnmixer.engine.config.run import Config
from qnmixer.errors import ConfigError, DataError, Stopped
from qnmixer.train import check

from ..conftest import PYTHONS_LOADER, every_third
from ..schemas import SCHEMAS

CHECKS = {name: SCHEMAS[name].parse for name in ("evaluate", "reconstruct", "plan", "doctor")} | {"train": check}


class Outcome:
    """What a command left: exit code, standard error, and whether its task ran."""

    def __init__(self, code: int, stderr: str, ran: bool) -> None:
        self.code, self.stderr, self.ran = code, stderr, ran

    @property
    def line(self) -> str:
        """The one line of a refused call."""
        assert self.code != 0
        assert not self.ran
        (line,) = self.stderr.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")


class Start:
    """Starts a command in this process as its module does, with a task of the test's own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys

    def __call__(self, name: str, *arguments: str, task: Any = None) -> Outcome:
        ran: list[DictConfig] = []
        code = 0
        self.monkeypatch.setattr(sys, "argv", [name, *arguments])
        self.monkeypatch.delenv(command.TRACEBACK, raising=False)
        self.capsys.readouterr()
        try:
            command.run(task or ran.append, CHECKS[name], SCHEMAS[name])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Outcome(code, self.capsys.readouterr().err, bool(ran))

    def train(self, *overrides: str, task: Any = None) -> Outcome:
        """Train with its run folder in the test's own folder."""
        return self("train", *overrides, f"hydra.run.dir={self.folder}", task=task)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    monkeypatch.chdir(tmp_path)
    return Start(tmp_path / "run", monkeypatch, capsys)


def test_a_good_config_reaches_the_task_whose_warnings_are_one_line(start: Start) -> None:
    forms: list[str] = []
    outcome = start.train(task=lambda _: forms.append(warnings.formatwarning("few\x1b\n", UserWarning, "a.py", 1)))
    assert (outcome.code, forms, command.TRACEBACK in os.environ) == (0, ["warning: few\\x1b\\n\n"], False)
    assert (start.folder / ".hydra" / "overrides.yaml").is_file()


TASK_ERRORS = [
    (ConfigError("seed is odd: give an even one"), "seed is odd: give an even one"),
    (OSError(errno.ENOSPC, "No space left", "/d/last.ckpt"), "the disk is full writing /d/last.ckpt: choose"),
    (OSError(errno.ENOSPC, "Full"), "the disk is full writing {folder}: choose"),
    (PermissionError(errno.EACCES, "Denied", "/etc/a"), "/etc/a cannot be used (Denied): choose another place"),
    (MisconfigurationException("`swa_lrs` is odd.\nmore"), "Lightning refuses this run: `swa_lrs` is odd."),
    (ModuleNotFoundError("needs `a` or `b`, try `pip install`ing either.", name="a"),
     "needs `a` or `b`, try `pip install`ing either: install it, or do not use"),
    (FloatingPointError("the loss became nan at step 3"), "the loss became nan at step 3: lower optimizer.lr"),
    (DataError("a\x1b[2J\r\nb\x9b.dcm is bad"), "a\\x1b[2J\\r\\nb\\x9b.dcm is bad"),
    (OSError(errno.EACCES, "Denied", "a\nb\u202e"), "a\\nb\\u202e cannot be used (Denied)"),
    (DataError("Caught DataError in DataLoader worker process 0.\nOriginal Traceback:\nerrors.DataError: no file"),
     "no file"),
    (OSError(errno.EMFILE, "Too many open files"), "too many open files: raise the limit of this shell"),
    (RuntimeError("unable to write to file </torch_12_3_0>: No space left on device"), "the shared memory of"),
    (RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 24. More"), "too many open files"),
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "a data worker is killed by signal"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message"), every_third(TASK_ERRORS))
def test_what_goes_wrong_in_a_task_is_one_line(start: Start, error: Exception, message: str) -> None:
    def task(cfg: DictConfig) -> None:
        raise error

    outcome = start.train(task=task)
    assert outcome.line.startswith(message.format(folder=start.folder))


WRONG_WORDS = [
    ("hydra=null", "hydra"),
    ("evaluation.window.low=3", "'low'): check the values"),
    ("experiment=demo data=dicom", "data.root has no value: give one with data.root=…"),
    (f"seed={'1' * 5000}", "a value cannot be read (Exceeds the limit"),
    (f"data={'d' * 5000}", "dddddddddd"),
    ("x" * 5000, "xxxx"),
    (f"monitor={'v' * 5000}", "monitor=vvvv"),
    ("model._target_=3", "model._target_=3 should be a valid string"),
    ("+trainer.max_time=3h", "max_time=3h is not DAYS:HOURS:MINUTES:SECONDS: give for example 00:12:00:00"),
    ("geometry.angle_span=360", "geometry.angle_span=360.0 is outside of 1e-06 to 2π: give radians"),
    ("trainer.devices=-1.5", "trainer.devices=-1.5 should be a valid integer"),
]


@pytest.mark.parametrize(("words", "line"), every_third(WRONG_WORDS), ids=lambda it: it[:12])
def test_a_wrong_word_is_one_short_line(start: Start, words: str, line: str) -> None:
    found = start("train", *words.split()).line
    assert line in found
    assert "as_trained" not in found
    assert len(found) < 1000


@pytest.mark.parametrize("words", ["plan format=json", "train --cfg job", "train --help -c job", "doctor"])
def test_a_rank_without_a_folder_of_its_own_needs_no_name_for_one(
    words: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert start(*words.split()).code == 0
    assert "evaluate works in one process: start it without torchrun or srun" in start("evaluate", "run=x").line
    assert "give all of them the same hydra.run.dir=FOLDER" in start("train").line
    assert "--ntasks-per-node" in start("train", "++hydra.run.dir=run").line  # the next check


def test_the_home_in_a_run_folder(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert start("train", "++hydra.run.dir=~/runs/a=1").ran
    assert (tmp_path / "runs" / "a=1" / ".hydra").is_dir()


def test_what_these_lines_say_works(start: Start) -> None:
    custom = ["experiment=demo", "optimizer=custom", "optimizer._target_=torch.optim.NAdam"]
    for words in (
        custom,
        ["~logger"],
        ["~callbacks"],
        ["experiment=demo", "model=learn"],
    ):
        assert start.train(*words).ran


BROKEN_FILES = {
    "a: 1\nb: *x\n": ("found undefined alias 'x'", "line 2"),
    "a: 1\n---\nb: 2\n": ("expected a single document in the stream", "line 2"),
    "a: !!python/object/apply:os.system [ls]\n": ("could not determine a constructor for the tag", "line 1"),
    "a:\n\tb: 1\n": ("found character '\\t' that cannot start any token", "line 2"),
    "a: 1\nb: [1,\n": ("expected the node content", "line 3"),
    "a: 1\na: 2\n": ("found duplicate key a", "line 2"),
    "a: 1\nb: \0\n": ("special characters are not allowed", "odd.yaml"),
    b"a: 1\nb: \xe9\n": ("invalid continuation byte", "odd.yaml"),
    "3\n": ("Invalid loaded object type: int", "odd.yaml"),
    "null: 2\n": ("Incompatible key type 'NoneType'", "odd.yaml"),
    "a: &a [*a]\n": ("maximum recursion depth exceeded", "odd.yaml"),
    "defaults: [3]\n": ("Unsupported type in defaults : int",),
}
"""The text of a group file of one's own, and parts of its line."""


@pytest.mark.parametrize(("text", "parts"), every_third(BROKEN_FILES.items()), ids=lambda text: ascii(text)[:30])
def test_a_group_file_of_ones_own_that_cannot_be_read_is_named(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | bytes, parts: tuple[str, ...]
) -> None:
    """With an experiment; by an experiment of one's own; and for another command."""
    monkeypatch.setattr(yaml, "SafeLoader", PYTHONS_LOADER)
    for folder in ("conf/noise", "conf/experiment"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "conf/noise/odd.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    mine = "# @package _global_\ndefaults: [{override /noise: odd}]\n"
    (tmp_path / "conf/experiment/mine.yaml").write_text(mine, encoding="utf-8")
    for words in ("train experiment=demo noise=odd", "evaluate run=a noise=odd", "train experiment=mine"):
        line = start(*words.split(), "--config-dir=conf").line
        assert all(part in line for part in parts), line
    if len(parts) > 1:  # a config is shown, not checked
        for flags in (["--cfg", "job"], ["--help"]):
            assert parts[0] in start("train", "noise=odd", "--config-dir=conf", *flags).line


def test_home_is_the_users(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(start.folder))
    quoted = f"{start.folder}/a b"
    assert command.completed(['hydra.run.dir="~/a b"'], Config) == [f'hydra.run.dir="{quoted}"']
    assert command.completed(['hydra.sweep.dir="~/a b"', "-m"], Config) == ["-m", f'hydra.sweep.dir="{quoted}"']


def test_flags_and_overrides_stand_in_any_order(start: Start) -> None:
    given = ["experiment=demo", "--cfg", "job", "model=regformer", "trainer.max_epochs=2"]
    own = ["model=regformer", "trainer.max_steps=-1"]
    completed = command.completed(given, Config)
    assert completed[-2:] == ["--cfg", "job"]
    assert {*completed[:-2]} == {given[0], given[4], *own}
    outcome = start("train", "--cfg", "job")
    assert (outcome.code, outcome.ran) == (0, False)


@pytest.mark.parametrize(
    ("epochs", "limit"), [("2", ["trainer.max_steps=-1"]), ("2,3", ["trainer.max_steps=-1"]), ("2,null", [])]
)
def test_a_sweep_has_one_limit_with_any_launcher(epochs: str, limit: list[str]) -> None:
    words = ["-m", "hydra/launcher=slurm", f"trainer.max_epochs={epochs}"]
    assert command.completed(words, Config) == [*words, *limit]


def test_a_bug_of_ours_keeps_its_traceback(start: Start) -> None:
    def task(cfg: DictConfig) -> None:
        raise RuntimeError("a bug under srun")

    with pytest.raises(RuntimeError, match="a bug under srun"):
        start.train(task=task)


@pytest.mark.parametrize(
    ("stop", "code"), [(KeyboardInterrupt(), 130), (Stopped(signal.SIGINT), 130), (Stopped(signal.SIGTERM), 143)]
)
def test_interruption_has_its_exit_code(start: Start, stop: KeyboardInterrupt, code: int) -> None:
    def task(cfg: DictConfig) -> None:
        raise stop

    outcome = start.train(task=task)
    assert (outcome.code, outcome.stderr) == (code, "interrupted\n")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--info --cfg job", "--info --cfg job does not work (Only one of "),
        ("--cfg jb", "--cfg jb does not work (argument --cfg/-c: invalid choice: 'jb' (choose from "),
        ("-sc instal=bash", "-sc does not work ("),
        ("-sc install=tcsh", "-sc does not work (No completion plugin for 'tcsh'"),
        ("--shell-completion", "--shell-completion does not work ("),
        ("-sc query=bash", "-sc does not work ('COMP_LINE'): --hydra-help explains Hydra's flags"),
        ("--resolve", "--resolve does not work (The --resolve flag can only be used in conjunction with --cfg"),
    ],
)
def test_flags_of_hydra_that_do_not_fit_are_one_line(
    start: Start, monkeypatch: pytest.MonkeyPatch, words: str, part: str
) -> None:
    monkeypatch.delenv("COMP_LINE", raising=False)
    assert part in start("train", *words.split()).line


def test_a_search_is_for_training_only(start: Start) -> None:
    """`start` gives no sweep, as plan and doctor do."""
    line = start("train", "-m", "hydra/sweeper=search", "seed=1,2").line
    assert line.startswith("a search needs the score of a training")


def test_a_sweep_of_another_command_runs_every_job_and_fails_when_one_did(start: Start) -> None:
    seen: list[str] = []

    def task(cfg: DictConfig) -> None:
        seen.append(cfg.run)
        if cfg.run == "b":
            raise DataError("second is bad: fix it")

    outcome = start("evaluate", "run=a,b,c", "-m", task=task)
    assert seen == ["a", "b", "c"]
    assert outcome.line == "second is bad: fix it"
