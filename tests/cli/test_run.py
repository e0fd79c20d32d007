import errno
import os
import re
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from qnmixer.engine import cli
from qnmixer.engine.cli.explain import explain
from qnmixer.engine.config import parse
from qnmixer.engine.config.commands import parse_evaluate, parse_reconstruct
from qnmixer.errors import ConfigError, DataError

from ..warm import Warm

CHECKS = {"train": parse, "evaluate": parse_evaluate, "reconstruct": parse_reconstruct}


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
        self.monkeypatch.delenv(cli.TRACEBACK, raising=False)
        self.capsys.readouterr()
        try:
            cli.run(task or ran.append, CHECKS[name], name)
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


def test_the_environment_stays_as_it_was(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    assert start.train(task=lambda _: seen.append(os.environ.get(cli.TRACEBACK))).code == 0
    assert (seen, cli.TRACEBACK in os.environ) == (["1"], False)


@pytest.mark.parametrize(
    ("overrides", "near"),
    [
        ("data=dicom data.rot=/ct", "data.root"),
        ("noise=physical noise.photon=1e5", "noise.photons"),
        ("optimizer=sgd optimizer.momentun=0.9", "optimizer.momentum"),
        ("loss=ssim_mix loss.ssim_wight=0.1", "loss.ssim_weight"),
        ("batch_size=4", "data.batch_size"),
        ("n_views=16", "geometry.n_views"),
        ("data.n_views=16", "geometry.n_views"),
    ],
)
def test_the_nearest_key_may_be_of_the_chosen_variant_or_another_group(start: Start, overrides: str, near: str) -> None:
    assert f"did you mean {near}?" in start.train(*overrides.split(" ")).line


def test_a_good_config_reaches_the_task(start: Start) -> None:
    outcome = start.train("data.image_size=32")
    assert (outcome.code, outcome.ran) == (0, True)
    assert (start.folder / ".hydra" / "overrides.yaml").is_file()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("seed is odd: give an even one"), "seed is odd: give an even one"),
        (DataError("a.dcm is bad: fix it"), "a.dcm is bad: fix it"),
        (OSError(errno.ENOSPC, "No space left", "/d/last.ckpt"), "the disk is full writing /d/last.ckpt: free some"),
        (OSError(errno.EDQUOT, "Quota", "/d/a"), "the disk is full writing /d/a"),
        (PermissionError(errno.EACCES, "Denied", "/etc/a"), "/etc/a cannot be used (Denied): choose another place"),
        (FileNotFoundError(errno.ENOENT, "No such", "/proc/x"), "/proc/x cannot be used (No such): choose another"),
        (
            MisconfigurationException("`swa_lrs` should be positive.\nmore"),
            "Lightning refuses this run: `swa_lrs` should be positive.",
        ),
        (
            FloatingPointError("the loss became nan at step 3 (slices: a)"),
            "the loss became nan at step 3 (slices: a): ",
        ),
        (DataError("a\x1b[2J\r\nb\x9b.dcm is bad"), "a\\x1b[2J\\r\\nb\\x9b.dcm is bad"),
        (OSError(errno.EACCES, "Denied", "a\nb\u202e"), "a\\nb\\u202e cannot be used (Denied)"),
    ],
)
def test_what_goes_wrong_in_a_task_is_one_line(start: Start, error: Exception, message: str) -> None:
    def task(cfg: DictConfig) -> None:
        raise error

    outcome = start.train(task=task)
    assert outcome.line.startswith(message)


@pytest.mark.parametrize(
    ("word", "way"),
    [
        ("+extras.print_config=false", "--cfg job prints the config"),
        ("logger.wandb.tags=[a]", "use tags=[…]"),
        ("+experiment=demo", "experiment has an option already: leave out the +"),
        ("++data=numpy", "data has an option already: leave out the +"),
    ],
)
def test_habits_of_other_templates_have_an_answer(start: Start, word: str, way: str) -> None:
    assert way in start.train(word).line


def test_only_what_a_command_takes_is_offered(start: Start) -> None:
    assert "as_trained" not in start.train("data=mnist").line
    assert "as_trained" in start("evaluate", "run=x", "data=mnist").line


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("tags.0=a", "tags.0=a cannot be set: tags is no group of keys. Give it as a whole: tags=…"),
        ("++tags.0=a.b", "++tags.0=a.b cannot be set: tags is no group of keys. Give it as a whole: tags=…"),
        (f"seed={'1' * 5000}", "a value cannot be read (Exceeds the limit"),
        (f"data={'d' * 5000}", "data=dddd"),
        ("x" * 5000, "xxxx"),
        (f"monitor={'v' * 5000}", "monitor=vvvv"),
        (f"{'x' * 5000}=1", "xxxx"),
        (f"tags={'[' * 400}{']' * 400}", "tags=[[[["),
        (f"seed={'{a:' * 100}1{'}' * 100}", "seed={a:{a:"),
    ],
    ids=lambda it: it[:9],
)
def test_a_refusal_is_short(start: Start, word: str, line: str) -> None:
    found = start.train(word).line
    assert found.startswith(line) or "cannot be used (File name too long)" in found
    assert len(found) < 1000


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EFBIG, "Too large", "/d/a"), "/d/a cannot be used (Too large): choose another place"),
        (
            OSError(
                "Caught OSError in DataLoader worker process 0.\nOriginal Traceback:\nOSError: [Errno 5] Bad: '/d/a'"
            ),
            "/d/a cannot be used (Bad): choose",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "too many open files: raise the limit of this shell"),
        (RuntimeError("unable to write to file </torch_12_3_0>: No space left on device (28)"), "the shared memory of"),
        (
            RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 24. Details"),
            "too many open files: raise the limit of this shell (ulimit -n 4096), or lower data.num_workers",
        ),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
            "a data worker is killed by signal: Killed: lower data.num_workers",
        ),
    ],
)
def test_an_error_of_the_system_is_one_line(error: Exception, message: str) -> None:
    assert str(explain(error, "train")).startswith(message)


def test_an_error_of_the_disk_without_a_name_gets_that_of_the_folder(start: Start) -> None:
    def task(cfg: DictConfig) -> None:
        raise OSError(errno.ENOSPC, "Full")

    assert start.train(task=task).line.startswith(f"the disk is full writing {start.folder}: ")


def test_hydra_names_no_file(start: Start) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        line = start.train().line
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert line.startswith(f"{start.folder}/.hydra cannot be used (File too large)")


def test_out_of_memory_names_what_the_command_takes() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    lines = {name: explain(error, name) for name in ("train", "evaluate", "compare", "reconstruct")}
    assert lines.pop("train").endswith(
        "GiB): lower data.batch_size, model.n_iterations or model.channels, or set trainer.precision=16-mixed"
    )
    assert {*lines.values()} == {"out of memory (CUDA out of memory. Tried to allocate 2 GiB): set accelerator=cpu"}


@pytest.mark.parametrize("flags", [[], ["--cfg", "job"]])
def test_a_group_without_an_option_is_one_line(start: Start, flags: list[str]) -> None:
    assert "the name of one" in start("train", "noise=null", *flags).line


def test_an_option_that_hydra_refuses_without_a_word_has_a_line(start: Start) -> None:
    assert start.train("data=${oc.select:seed}").line.endswith("the name of one of its options, as in data=dicom")
    assert "a value cannot be read" in start("reconstruct", "run=x", "++hydra.sweeper.params.seed=1").line
    assert re.fullmatch(r"an option cannot be read \(.+\): give its name, as in .*", start.train("data=${.}").line)


def test_home_is_the_users(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(start.folder))
    quoted = f"{start.folder}/a b"
    assert cli.completed(['hydra.run.dir="~/a b"'], "train") == [f'hydra.run.dir="{quoted}"']
    assert cli.completed(['hydra.sweep.dir="~/a b"', "-m"], "train") == ["-m", f'hydra.sweep.dir="{quoted}"']


def test_flags_and_overrides_stand_in_any_order() -> None:
    given = ["experiment=demo", "--cfg", "job", "model=regformer", "trainer.max_epochs=2"]
    own = ["model.n_iterations=12", "model.channels=96", "trainer.max_steps=-1"]
    completed = cli.completed(given, "train")
    assert completed[-2:] == ["--cfg", "job"]
    assert {*completed[:-2]} == {given[0], *given[3:], *own}


WARNINGS = """
import warnings
from qnmixer.engine.cli import warnings_in_one_line
from qnmixer.files import __file__ as ours
warnings.simplefilter("always")
with warnings_in_one_line():
    warnings.warn_explicit("few slices", UserWarning, ours, 1)
    warnings.warn_explicit("old", DeprecationWarning, ours, 2)
    warnings.warn("of another library")
warnings.warn_explicit("after", UserWarning, ours, 3)
"""


def test_our_warnings_are_one_line(cold: Warm, tmp_path: Path, start: Start) -> None:
    done = cold.run("-c", WARNINGS, cwd=tmp_path)
    shown = [line.rpartition("/")[2] for line in done.stderr.splitlines() if not line.startswith(" ")]
    assert shown == ["warning: few slices", "files.py:2: DeprecationWarning: old",
                     "<string>:9: UserWarning: of another library", "files.py:3: UserWarning: after"]  # fmt: skip
    forms: list[str] = []
    start.train(task=lambda _: forms.append(warnings.formatwarning("few\x1b\n", UserWarning, cli.__file__, 1)))
    assert forms == ["warning: few\\x1b\\n\n"]


def test_a_bug_of_ours_keeps_its_traceback(start: Start) -> None:
    def task(cfg: DictConfig) -> None:
        raise RuntimeError("a bug under srun")

    with pytest.raises(RuntimeError, match="a bug under srun"):
        start.train(task=task)


def test_interruption_has_its_exit_code(start: Start) -> None:
    def task(cfg: DictConfig) -> None:
        raise KeyboardInterrupt

    outcome = start.train(task=task)
    assert (outcome.code, outcome.stderr) == (130, "interrupted\n")


def test_a_sweep_of_another_command_runs_every_job_and_fails_when_one_did(start: Start) -> None:
    seen: list[str] = []

    def task(cfg: DictConfig) -> None:
        seen.append(cfg.run)
        if cfg.run == "b":
            raise DataError("second is bad: fix it")

    outcome = start("evaluate", "run=a,b,c", "-m", task=task)
    assert seen == ["a", "b", "c"]
    assert outcome.line == "second is bad: fix it"


def test_showing_the_config_runs_nothing(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = start("train", "--cfg", "job")
    assert (outcome.code, outcome.ran) == (0, False)
