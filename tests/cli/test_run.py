import errno
import inspect
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from qnmixer.engine.cli import command
from qnmixer.engine.cli.errors import explain
from qnmixer.engine.config.checking import answer
from qnmixer.engine.config.run import Config
from qnmixer.engine.config.sections import TrainerConfig
from qnmixer.errors import ConfigError, DataError, Stopped
from qnmixer.train import check

from ..conftest import PYTHONS_LOADER, every_third
from ..schemas import SCHEMAS
from ..studies import SEARCH_PATH

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
    (MisconfigurationException("Automatic gradient clipping is not supported for manual optimization. Remove "
                               "`Trainer(gradient_clip_val=0.01)` or switch to automatic optimization."),
     "this module optimizes by itself (automatic_optimization=False): set trainer.gradient_clip_val=null"),
    (MisconfigurationException("Automatic gradient accumulation is not supported for manual optimization. Remove "
                               "`Trainer(accumulate_grad_batches=2)` or switch to automatic optimization."),
     "this module optimizes by itself (automatic_optimization=False): set trainer.accumulate_grad_batches=1"),
    (ModuleNotFoundError("needs `a` or `b`, try `pip install`ing either.", name="a"),
     "needs `a` or `b`, try `pip install`ing either: install it, or do not use"),
    (FloatingPointError("the loss became nan at step 3"), "the loss became nan at step 3: lower optimizer.lr"),
    (DataError("a\x1b[2J\r\nb\x9b.dcm is bad"), "a\\x1b[2J\\r\\nb\\x9b.dcm is bad"),
    (OSError(errno.EACCES, "Denied", "a\nb\u202e"), "a\\nb\\u202e cannot be used (Denied)"),
    (OSError("Caught OSError in DataLoader worker process 0.\nOriginal Traceback:\nOSError: [Errno 5] Bad: '/d/a'"),
     "[Errno 5] Bad: '/d/a': choose another place"),
    (FileNotFoundError(errno.ENOENT, "No such file", "/d/a"),
     "/d/a cannot be used (No such file): if it was removed meanwhile start again"),
    (FileNotFoundError("Caught FileNotFoundError in DataLoader worker process 0.\nOriginal Traceback:\n"
                       "FileNotFoundError: [Errno 2] No such file: '/d/a'"),
     "[Errno 2] No such file: '/d/a': if it was removed meanwhile start again"),
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
    (
        "callbacks.model_checkpoint.save_top_k=3",
        "callbacks.model_checkpoint.save_top_k is not known here: best.ckpt",
    ),
    ("+experiment=demo", "experiment exists already: leave out the + before it"),
    ("hydra=null", "hydra"),
    ("--cfg job foo", "foo is not KEY=VALUE"),
    ("as_trained", "as_trained is not KEY=VALUE: leave out blanks"),
    ("+datamodule=default", "datamodule exists already: leave out the + before it"),
    ("tags.0=a", "Error merging override tags.0=a (list index out of range)"),
    ("evaluation.window.low=3", "'low'): check the values"),
    ("experiment=demo data=dicom", "data.root has no value: give one with data.root=…"),
    ("-m hydra/launcher=joblib", "hydra/launcher=joblib does not exist: choose processes, "),
    (
        "trainer.max_time=a",
        "unknown key trainer.max_time. An argument that is not in conf/ takes a plus: +trainer.m",
    ),
    (
        "callbacks.mine._target_=a.b",
        "takes a plus: +callbacks.mine._target_=…",
    ),
    ("loss=custom loss._target_=a.b loss.weight=1", "takes a plus: +loss.weight=…"),
    ("logger=tensorboard logger.tensorboard.dir=a", "choose logger.tensorboard.default_hp_metric, logger.tensorb"),
    ("model.foo=1", "unknown key model.foo: --cfg job prints all keys, --cfg hydra those of Hydra. An argument"),
    (f"seed={'1' * 5000}", "a value cannot be read (Exceeds the limit"),
    (f"data={'d' * 5000}", "dddddddddd"),
    ("x" * 5000, "xxxx"),
    (f"monitor={'v' * 5000}", "monitor=vvvv"),
    ("evaluation=task", "evaluation=task is for evaluate, not for train: choose default"),
    ("seed=${nope}", "unknown key nope"),
    ("seed=${nope} --cfg job --resolve", "unknown key nope"),
    ("model._target_=3", "model._target_=3 should be a valid string"),
    ("~model._target_", "model has no _target_: choose one of its options, fbp,"),
    ("logger.wandb=3", "logger.wandb=3 is not a group of keys: name a key of it, as in logger.wandb.KEY=VALUE"),
    ("+trainer.max_time=3h", "max_time=3h is not DAYS:HOURS:MINUTES:SECONDS: give for example 00:12:00:00"),
    ("geometry.angle_span=360", "geometry.angle_span=360.0 is outside of 1e-06 to 2π: give radians"),
    ("trainer.devices=-1.5", "trainer.devices=-1.5 should be a valid integer"),
    ("debu.name=1", "debu.name is no key: choose an option by its name, as in model=qn_mixer"),
    ("noise=null", "noise=null chooses nothing: write noise=none"),
    ("logger=null", "logger=null chooses nothing: write logger=csv"),
    ("memory=null", "memory=null chooses nothing: write memory=keep"),
    ("experiment=demo model=true", "model=true cannot be read (Config group override must be a string or a list"),
    ("experiment=demo model=[1,2]", "model=[1,2]: model takes one option, as in model=fbp"),
    ("data=${oc.select:seed}", "give data the name of one of its options: deeplesion, dicom"),
    ("data=${.}", "an option cannot be read ("),
    ("hydra=odd", "hydra cannot be chosen here: name keys, as in hydra.KEY=…"),
    ("memory=null --cfg job", "memory=null chooses nothing: write memory=keep"),
    (f"tags={'[' * 400}{']' * 400}", "a value has hundreds of brackets, or the defaults of"),
    (f"seed={'{a:' * 100}1{'}' * 100}", "a value has hundreds of brackets, or the defaults of"),
]


@pytest.mark.parametrize(("words", "line"), every_third(WRONG_WORDS), ids=lambda it: it[:12])
def test_a_wrong_word_is_one_short_line(start: Start, words: str, line: str) -> None:
    found = start("train", *words.split()).line
    assert line in found
    assert "as_trained" not in found
    assert len(found) < 1000


HABITS = [
    ("train --experiment demo", "--experiment is not an option: write experiment=demo"),
    ("train --gpus 1", "--gpus is not an option: use trainer.devices=…"),
    ("train --max_epochs 3", "--max_epochs is not an option: write trainer.max_epochs=3"),
    ("train --config-name=mine", "--config-name is not an option: use --config-dir FOLDER for options of your own"),
    ("train --experimental-rerun=a.pickle", "--experimental-rerun is not an option: write experiment="),
    ("train logger=null", "logger=null chooses nothing: write logger=csv"),
    ("train optimizer=adamw ~optimizer", "the config has no optimizer: choose one with optimizer=…"),
    ("train experiment=null", "experiment=null chooses nothing: leave it out, or write ~experiment"),
    ("train runs/x", "runs/x is not KEY=VALUE: write resume=runs/x or data.root=runs/x"),
    (
        "train callbacks.early_stopping={patience:3}",
        "callbacks.early_stopping works with callbacks=early_stopping only",
    ),
    ("train trainer.max_epochs=None", "write trainer.max_epochs=null for none"),
    ("train loss=[mse,l1]", "loss=[mse,l1]: loss takes one option, as in loss=l1"),
    ("train hydra.searchpath=[a", "hydra.searchpath=[a is no list of folders: write hydra.searchpath=[file:///abs/my_"),
    ("train --", "-- is not an option: leave it out"),
    ("train ~metrics", "the config has no metrics: choose one with metrics=…"),
    ("train data=dicom data.root=null", "data.root has no value: give one with data.root=…"),
    ("train data=DICOM", "data=DICOM does not exist: did you mean dicom?"),
    ("train seed=range(3)", "seed=range(3) has several values: add -m for a run of each"),
    ("train -m experiment=glob(nope*)", "experiment=glob(nope*) has no value: give at least one"),
    ("train -m optimizer.lr=interval(1e-4,1)", "is for a search: add hydra/sweeper=search, or give values"),
    ("train -m seed=1,2 hydra.run.dir=x", "hydra.run.dir=x is for one run: write hydra.sweep.dir=x"),
    ("train hydra/launcher=slurm", "is for a sweep: add -m, or leave hydra/launcher=slurm out"),
    ("train --package model", "--package is for what --cfg prints: add --cfg job, or leave it out"),
    ("train optimizer.foo=3", "takes a plus: +optimizer.foo=…"),
    ("train --data.root /d/(é,a)", "--data.root is not an option: write 'data.root=/d/(é,a)'"),
    ("train logger.wandb.job_type=x", "unknown key logger.wandb.job_type: choose logger.wandb.entity, "),
    ("train noise=physical noise.i0=3", "unknown key noise.i0: choose noise.electronic_sigma, "),
    ("plan device=A100", "choose A100-40, A100-80, or give a size"),
    ("evaluate ~run", "run has no value: give one with run=…"),
    ("evaluate runs/x", "runs/x is not KEY=VALUE: write run=runs/x"),
    ("evaluate ckpt_path=a.ckpt", "ckpt_path is not known here: use run=RUN_FOLDER, or run=FILE.ckpt"),
    ("reconstruct ckpt_path=a.ckpt", "ckpt_path is not known here: use run=RUN_FOLDER, or run=FILE.ckpt"),
    ("evaluate resume=runs/x", "resume is not known here: use run=RUN_FOLDER"),
    ("evaluate gpus=1", "gpus is not known here: use accelerator=gpu"),
    (
        "train experiment=demo optimizer._target_=torch.optim.NAdam",
        "optimizer.adamw_lr belongs to the option of optimizer before optimizer._target_=torch.optim.NAdam: write "
        "optimizer=custom optimizer._target_=torch.optim.NAdam",
    ),
    (
        "train experiment=demo model._target_=qnmixer.models.LEARN",
        "model.patch_size belongs to the option of model before model._target_=qnmixer.models.LEARN: write model=",
    ),
    (
        f"train {SEARCH_PATH} experiment=second_order model=tv data.sources.slices.root=.",
        "only: ~model.channels leaves it out",
    ),
    (
        "train experiment=mine",
        "; or add --config-dir my_conf",
    ),
    ("evaluate trainer.accelerator=cpu", "trainer.accelerator is of training: write accelerator=…"),
    ("train strategy.name=dpp", "strategy.name=dpp is not known: choose one of ddp, fsdp, pipeline, single"),
]


@pytest.mark.parametrize(("words", "line"), every_third(HABITS))
def test_habits_get_a_line_with_what_works(start: Start, tmp_path: Path, words: str, line: str) -> None:
    (tmp_path / "my_conf" / "experiment").mkdir(parents=True)
    (tmp_path / "my_conf" / "experiment" / "mine.yaml").touch()
    assert line in start(*words.split()).line


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


def test_a_project_that_wandb_refuses_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "my/proj")
    assert start("train").line.endswith("which W&B refuses: write logger.wandb.entity=my logger.wandb.project=proj")


def test_every_argument_of_lightning_has_an_answer() -> None:
    for name in {*inspect.signature(L.Trainer).parameters} - {*TrainerConfig.model_fields}:
        assert (answer(f"trainer.{name}") or "").startswith(f"trainer.{name} is not known here: ")


@pytest.mark.parametrize("words", ["foo.bar=1", "memory.recompute=true", "hydra.run.dirr=a", "model.batch_size=2"])
def test_a_plus_is_offered_only_where_it_is_taken(start: Start, words: str) -> None:
    assert "plus" not in start("train", words).line


def test_an_experiment_of_ones_own_whose_option_does_not_exist(start: Start, tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    mine = tmp_path / "conf" / "experiment" / "mine.yaml"
    mine.write_text("# @package _global_\ndefaults:\n  - override /model: learnn\n", encoding="utf-8")
    line = start("train", "--config-dir=conf", "experiment=mine").line
    assert line == "model=learnn does not exist: did you mean learn?"


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
    "defaults: [odd]\n": ("or the defaults of a config file name that file again",),
    "defaults: [3]\n": ("Unsupported type in defaults : int",),
    "- 1\n- 2\n": ("noise=[1, 2] is not a group of keys: choose one of its options by name",),
    "hello\n": ("noise has no _target_",),
    "# @package a.b\nx: 1\n": ("unknown key a",),
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


def test_out_of_memory_names_what_the_command_takes() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    lines = {name: explain(error, name) for name in ("train", "evaluate", "compare", "reconstruct")}
    assert lines.pop("train").endswith(
        "GiB): lower data.batch_size, model.n_iterations or model.channels, or set trainer.precision=16-mixed"
    )
    assert {*lines.values()} == {"out of memory (CUDA out of memory. Tried to allocate 2 GiB): set accelerator=cpu"}


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
        ("-mm --info defaults", "-mm is not an option: write -m"),
        ("-rm", "-rm is not an option: write -r"),
        ("--conf x", "--conf is not an option"),
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


@pytest.mark.parametrize(("name", "words"), [("train", []), ("evaluate", ["run=a"]), ("evaluate", ["run=a,b", "-m"])])
def test_commands_of_one_time_get_folders_of_their_own(
    start: Start, tmp_path: Path, name: str, words: list[str]
) -> None:
    """The time here is a year, so all of them have the same."""
    kind = "sweep" if "-m" in words else "run"
    (tmp_path / "mine" / "place").mkdir(parents=True)
    text = f"# @package _global_\nhydra: {{{kind}: {{dir: 'out/${{now:%Y}}'}}}}\n"
    (tmp_path / "mine" / "place" / "here.yaml").write_text(text)
    folders: list[Path] = []

    def task(_: DictConfig) -> None:
        folders.append(Path(HydraConfig.get().runtime.output_dir))

    for _ in range(3):
        outcome = start(name, f"--config-dir={tmp_path}/mine", "+place=here", *words, task=task)
        assert outcome.code == 0, outcome.stderr
    first, *_ = sorted(
        path.name for path in (folders[0].parent.parent if kind == "sweep" else folders[0].parent).iterdir()
    )
    placed = [folder.parent if kind == "sweep" else folder for folder in folders]
    assert sorted({folder.name for folder in placed}) == [first, f"{first}_1", f"{first}_2"]


def test_a_chosen_folder_is_taken_as_it_is(start: Start, tmp_path: Path) -> None:
    (tmp_path / "chosen").mkdir()
    found: list[str] = []
    outcome = start(
        "train", f"hydra.run.dir={tmp_path}/chosen", task=lambda _: found.append(HydraConfig.get().runtime.output_dir)
    )
    assert (outcome.code, found) == (0, [str(tmp_path / "chosen")])
