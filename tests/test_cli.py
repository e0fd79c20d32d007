import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from qnmixer import cli
from qnmixer.config import parse, parse_evaluate, parse_reconstruct
from qnmixer.errors import ConfigError, DataError

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


REFUSED = [
    # unknown and misspelt keys
    ("model.n_iteration=3", "unknown key model.n_iteration: did you mean model.n_iterations?"),
    ("+model.n_iteration=3", "unknown key model.n_iteration: did you mean model.n_iterations?"),
    ("++trainer.max_step=3", "unknown key trainer.max_step: did you mean trainer.max_steps?"),
    ("train.max_steps=4", "unknown key train.max_steps: did you mean trainer.max_steps?"),
    ("geometry.n_view=4", "unknown key geometry.n_view: did you mean geometry.n_views?"),
    ("sede=4", "unknown key sede: did you mean seed?"),
    ("+sede=4", "unknown key sede: did you mean seed?"),
    ("~sede", "unknown key sede: did you mean seed?"),
    ("optimiser=adamw", "unknown key optimiser: did you mean optimizer?"),
    ("hydra.foo=3", "unknown key hydra.foo"),
    ("foo=1", "unknown key foo: "),
    # keys of another variant
    ("data.root=/ct", "data.root goes with data=dicom or deeplesion or numpy only: choose that, or leave"),
    ("+data.root=/ct", "data.root goes with data=dicom"),
    ("loss.ssim_weight=0.3", "loss.ssim_weight goes with loss=ssim_mix only"),
    ("optimizer.momentum=0.9", "optimizer.momentum goes with optimizer=sgd only"),
    ("noise.photons=1e5", "noise.photons goes with noise=field or physical only"),
    ("data=dicom data.root=/ct data.n_train=3", "data.n_train goes with data=phantoms only"),
    # options that are not there
    ("data=dicm", "data=dicm does not exist: did you mean dicom?"),
    ("noise=fielt", "noise=fielt does not exist: did you mean field?"),
    ("experiment=demmo", "experiment=demmo does not exist: did you mean demo?"),
    ("model=unet", "model=unet does not exist: choose qn_mixer, qn_mixer_paper"),
    ("optimizer=adam", "optimizer=adam does not exist: did you mean adamw?"),
    ("data=as_trained", "data=as_trained is not known: choose"),
    # values
    ("data=dicom", "data.root has no value: give one with data.root=…"),
    ("geometry.n_views=0", "geometry.n_views=0 is too small: give 1 or more"),
    ("geometry.n_views=-1", "geometry.n_views=-1 is too small: give 1 or more"),
    ("data.image_size=30", "data.image_size=30 is not divisible by model.patch_size=4: choose data.image_size=28"),
    ("data.image_size=abc", "data.image_size: Value 'abc' of type 'str' could not be converted to Integer"),
    ("trainer.precision=64", "trainer.precision=64 is not known: choose 32, 16-mixed, bf16-mixed"),
    ("data.image_size=???", "data.image_size has no value"),
    ("data.image_size=${bad}", "Interpolation key 'bad' not found"),
    # the grammar of overrides
    ("data.image_size", "Error parsing override 'data.image_size' missing EQUAL"),
    ("seed=[1,2", "no viable alternative at input '[1,2'"),
    # sections that are no sections
    ("~model", "the config has no model"),
    ("model=null", "model"),
    ("model=3", "model"),
    ("trainer=3", "trainer"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[overrides for overrides, _ in REFUSED])
def test_bad_overrides_get_one_line_and_no_folder(start: Start, overrides: str, message: str) -> None:
    outcome = start.train(*overrides.split(" "))
    assert outcome.line.startswith(message)
    assert not start.folder.exists()


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


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("evaluate", [], "run has no value: give one with run=…"),
        ("evaluate", ["run=x", "model.n_iterations=3"], "model.n_iterations is fixed by the run"),
        ("evaluate", ["run=x", "geometry.n_views=3"], "geometry.n_views is fixed by the run"),
        ("evaluate", ["run=x", "data.n_test=3"], "data.n_test"),
        ("evaluate", ["run=x", "noise=fielt"], "noise=fielt does not exist: did you mean field?"),
        ("evaluate", ["runn=x"], "unknown key runn: did you mean run?"),
        ("reconstruct", ["run=x", "input=y"], "output has no value: give one with output=…"),
        ("reconstruct", ["run=x", "input=y", "output=z", "formats=[dcom]"], "formats: dcom is not known: did you mean"),
        ("reconstruct", ["run=x", "inptu=y", "output=z"], "unknown key inptu: did you mean input?"),
    ],
)
def test_the_other_commands_refuse_too(start: Start, name: str, overrides: list[str], message: str) -> None:
    assert start(name, *overrides).line.startswith(message)
    assert not list(start.folder.parent.iterdir())


def test_a_good_config_reaches_the_task(start: Start) -> None:
    outcome = start.train("data.image_size=32")
    assert (outcome.code, outcome.ran) == (0, True)
    assert (start.folder / ".hydra" / "overrides.yaml").is_file()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("seed is odd: give an even one"), "seed is odd: give an even one"),
        (DataError("a.dcm is bad: mend it"), "a.dcm is bad: mend it"),
        (OSError(errno.ENOSPC, "No space left", "/d/last.ckpt"), "the disk is full writing /d/last.ckpt: free some"),
        (OSError(errno.ENOSPC, "No space left"), "the disk is full: free some space, or choose another folder"),
        (OSError(errno.EDQUOT, "Quota", "/d/a"), "the disk is full writing /d/a"),
        (PermissionError(errno.EACCES, "Denied", "/etc/a"), "no permission for /etc/a: choose a place"),
        (OSError(errno.EROFS, "Read-only", "/ro/a"), "no permission for /ro/a"),
        (
            FloatingPointError("the loss became nan at step 3 (slices: a)"),
            "the loss became nan at step 3 (slices: a): ",
        ),
    ],
)
def test_what_goes_wrong_in_a_task_is_one_line(start: Start, error: Exception, message: str) -> None:
    def task(cfg: DictConfig) -> None:
        raise error

    outcome = start.train(task=task)
    assert outcome.line.startswith(message)


def test_a_bug_of_ours_keeps_its_traceback(start: Start) -> None:
    def task(cfg: DictConfig) -> None:
        raise ZeroDivisionError("bug")

    with pytest.raises(ZeroDivisionError, match="bug"):
        start.train(task=task)


def test_interruption_is_told_by_the_exit_code(start: Start) -> None:
    def task(cfg: DictConfig) -> None:
        raise KeyboardInterrupt

    outcome = start.train(task=task)
    assert (outcome.code, outcome.stderr) == (130, "interrupted\n")


def test_a_sweep_runs_every_job_and_fails_when_one_did(start: Start) -> None:
    seen: list[int] = []

    def task(cfg: DictConfig) -> None:
        seen.append(cfg.seed)
        if cfg.seed == 2:
            raise DataError("second is bad: mend it")

    outcome = start("train", "-m", "seed=1,2,3", f"hydra.sweep.dir={start.folder}", task=task)
    assert seen == [1, 2, 3]
    assert outcome.line == "second is bad: mend it"


def test_every_job_of_a_sweep_is_checked(start: Start) -> None:
    def task(cfg: DictConfig) -> None:
        parse(cfg)

    outcome = start("train", "-m", "geometry.n_views=8,0", f"hydra.sweep.dir={start.folder}", task=task)
    assert outcome.line.startswith("geometry.n_views=0 is too small")


def test_showing_the_config_runs_nothing(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = start("train", "--cfg", "job")
    assert (outcome.code, outcome.ran) == (0, False)


def process(*arguments: str, full_error: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop(cli.TRACEBACK, None)
    if full_error:
        environment[cli.TRACEBACK] = "1"
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, env=environment, timeout=120
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qnmixer.train", "+model.n_iteration=3"], "did you mean model.n_iterations?"),
        (["qnmixer.evaluate", "run=/nowhere", "split=tset"], "did you mean test?"),
        (["qnmixer.reconstruct", "run=/nowhere", "input=/nowhere"], "output has no value"),
    ],
)
def test_real_processes_end_with_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    folder = tmp_path / "run"
    result = process(*arguments, f"hydra.run.dir={folder}")
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not folder.exists()


def test_a_traceback_is_there_for_who_asks(tmp_path: Path) -> None:
    result = process("qnmixer.train", "geometry.n_views=0", f"hydra.run.dir={tmp_path / 'run'}", full_error=True)
    assert result.returncode != 0
    assert "Traceback (most recent call last)" in result.stderr
    assert "geometry.n_views=0 is too small" in result.stderr.splitlines()[-1]


def test_a_wrong_override_is_answered_without_loading_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from qnmixer import cli, train; from qnmixer.config import parse\n"
        f"sys.argv = ['train', 'sede=1', 'hydra.run.dir={tmp_path / 'run'}']\n"
        "try: cli.run(train.train, parse, 'train')\n"
        "finally: print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, "False\n")
    assert result.stderr == "error: unknown key sede: did you mean seed?\n"
