import os
import signal
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from qnmixer.commands import command
from qnmixer.errors import DataError, Stopped
from qnmixer.settings.run import Config

from ..conftest import PYTHONS_LOADER
from ..typed import Typed


def test_a_good_config_reaches_the_task_whose_warnings_are_one_line(typed: Typed) -> None:
    forms: list[str] = []
    outcome = typed.train(task=lambda _: forms.append(warnings.formatwarning("few\x1b\n", UserWarning, "a.py", 1)))
    assert (outcome.code, forms, command.TRACEBACK in os.environ) == (0, ["warning: few\\x1b\\n\n"], False)
    assert (typed.folder / ".hydra" / "overrides.yaml").is_file()


LINES = {
    # keys, by the options that are chosen
    "train callbacks=early_stopping callbacks.early_stopping.patiense=3": "mean callbacks.early_stopping.patience?",
    "train data.root=/ct": "unknown key data.root: data=phantoms has image_size, batch_size, ",
    "train optimizer=custom optimizer._target_=torch.optim.NAdam optimizer.betas=[0.9,0.9]": (
        "unknown key optimizer.betas: optimizer=custom has _target_, lr, weight_decay, step_size_lr_factor; "
        "+optimizer.betas=… names another argument of its class"
    ),
    "train trainer={a:1}": "unknown key trainer.a: trainer=default has ",
    "train hydra.run.dirr=a": "unknown key hydra.run.dirr: did you mean hydra.run.dir?",
    "evaluate lr=3": "unknown key lr: evaluate has ",
    "evaluate run=pretrained data.n_test=3": (  # it has no class of its own, whose arguments there might be
        "unknown key data.n_test: data=as_trained has _target_, root, simulation_factor, disc"
    ),
    "train seed=${nope}": "Interpolation key 'nope' not found full_key: seed",
    # options
    "train data=as_trained": "data=as_trained is for evaluate, not for train: choose deeplesion, ",
    "train loss=[mse,l1]": "loss=[mse,l1]: loss takes one option: l1, mse, ssim_mix",
    "train memory=null": "memory=null: memory takes one option: keep, ",
    "train experiment=demo model=true": "experiment=demo model=true cannot be read (Config group override must be ",
    "train logger=csv +logger.wandb.notes=a": "+logger.wandb.notes=a: logger=csv does not have it",
    # values
    "reconstruct run=x input=a output=b formats=[]": "formats=[] would write nothing",
    "reconstruct run=x input=a output=b window=[240,-160]": "window=[240.0, -160.0] is not [low, high]",
    "reconstruct run=x input=a output=b water_attenuation=0": "water_attenuation=0 should be greater than 0",
    # words that Hydra would ignore
    "train -m seed=1,2 hydra.run.dir=x": "hydra.run.dir=x is for one run: write hydra.sweep.dir=x",
    "train hydra/launcher=slurm": "is for a sweep: add -m, or leave hydra/launcher=slurm out",
    "train -m experiment=glob(nope*)": "experiment=glob(nope*) has no value: give at least one",
    "train -m optimizer.lr=interval(1e-4,1)": "is for a search: add hydra/sweeper=search, or give values",
    # here is no sweep, as of plan and doctor
    "train -m hydra/sweeper=search seed=1,2": "a search needs the score of a training",
    # what no parser can bear
    f"train {'x' * 300}": "…xxxxxxxxxxxxxxxxxxxx cannot be read as KEY=VALUE (missing EQUAL at '<EOF>')",
    f"train seed={'1' * 5000}": "…11111111111111111111 cannot be read (Exceeds the limit",
    f"train tags={'[' * 400}": "cannot be read",
    # a part with a target where a rule computes with a number
    "train model.patch_size={_target_:os.system}": "model.patch_size={'_target_': 'os.system'} should be a valid int",
    "train model.codec={_target_:torch.nn.Identity}": "should be 'orthonormal' or 'strided'",
    # flags
    "train --optimizer.lr 3": "--optimizer.lr is not known: write KEY=VALUE, or a flag that --hydra-help lists",
    "train --experimental-rerun=x": "--experimental-rerun=x of Hydra would leave out train.yaml: choose",
    "train --multi": "--multi is not known",
    "train --config-name=mine": "--config-name=mine of Hydra would leave out train.yaml",
    "train --": "-- is not known",
    "train --info --cfg job": "--info --cfg job does not work (Only one of ",
    "train --cfg jb": "--cfg jb does not work (argument --cfg/-c: invalid choice: 'jb' (choose from ",
    "plan -sc trainer.max_steps=[": "-sc does not work (while parsing a flow node)",
    "train -sc install=tcsh": "-sc does not work (No completion plugin for 'tcsh'",
}


@pytest.mark.parametrize("words", LINES, ids=lambda it: it[:40])
def test_a_wrong_word_is_one_short_line(typed: Typed, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.delenv("COMP_LINE", raising=False)
    line = typed(*words.split()).line
    assert LINES[words] in line
    assert len(line) < 1000


@pytest.mark.parametrize("words", ["plan format=json", "train --cfg job", "train --help -c job", "doctor"])
def test_a_rank_without_a_folder_needs_no_name(words: str, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert typed(*words.split()).code == 0
    assert "evaluate works in one process: start it without torchrun or srun" in typed("evaluate", "run=x").line


BROKEN_FILES = {
    "a: !!python/object/apply:os.system [ls]\n": ("could not determine a constructor for the tag", "line 1"),
    "a: 1\nb: [1,\n": ("expected the node content", "line 3"),
    "a: 1\na: 2\n": ("found duplicate key a", "odd.yaml", "line 2"),
    "a: 1\nb: \0\n": ("special characters are not allowed", "odd.yaml"),
    b"a: 1\nb: \xe9\n": ("invalid continuation byte", "odd.yaml"),
    "3\n": ("Invalid loaded object type: int", "odd.yaml"),
    "null: 2\n": ("Incompatible key type 'NoneType'", "odd.yaml"),
    "a: &a [*a]\n": ("maximum recursion depth exceeded", "odd.yaml"),
    "defaults: [3]\n": ("Unsupported type in defaults : int",),
}
"""The text of a group file of one's own, and parts of its line."""


@pytest.mark.parametrize(("text", "parts"), BROKEN_FILES.items(), ids=lambda text: ascii(text)[:30])
def test_a_group_file_of_ones_own_that_cannot_be_read_is_named(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | bytes, parts: tuple[str, ...]
) -> None:
    """With an experiment; by an experiment of one's own; and for another command."""
    monkeypatch.setattr(yaml, "SafeLoader", PYTHONS_LOADER)
    for folder in ("conf/noise", "conf/experiment"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "conf/noise/an_odd_one.yaml").write_text("a: 1\nb: 2\na: 3\n")  # not asked for, and read before
    (tmp_path / "conf/noise/odd.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    mine = "# @package _global_\ndefaults: [{override /noise: odd}]\n"
    (tmp_path / "conf/experiment/mine.yaml").write_text(mine, encoding="utf-8")
    for words in ("train experiment=demo noise=odd", "evaluate run=a noise=odd", "train experiment=mine"):
        line = typed(*words.split(), "--config-dir=conf").line
        assert all(part in line for part in parts), line
        assert "an_odd_one" not in line
    if len(parts) > 1:  # a config is shown, not checked
        for flags in (["--cfg", "job"], ["--help"]):
            assert parts[0] in typed("train", "noise=odd", "--config-dir=conf", *flags).line


def test_home_is_the_users(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(typed.folder))
    quoted = f"{typed.folder}/a b"
    assert command.completed(['hydra.run.dir="~/a b"'], Config) == [f'hydra.run.dir="{quoted}"']
    assert command.completed(['hydra.sweep.dir="~/a b"', "-m"], Config) == ["-m", f'hydra.sweep.dir="{quoted}"']
    assert typed("train", "++hydra.run.dir=~/runs/a=1").ran
    assert (typed.folder / "runs" / "a=1" / ".hydra").is_dir()


def test_flags_and_overrides_stand_in_any_order_and_none_is_null(typed: Typed) -> None:
    """None is as `wandb agent` and people who write Python have it."""
    words = command.completed(["finetune=None", "--trainer.gradient_clip_val=None", 'monitor="None"'], Config)
    assert words == ["finetune=null", "trainer.gradient_clip_val=null", 'monitor="None"']
    given = ["experiment=demo", "--cfg", "job", "model=regformer", "trainer.max_epochs=2"]
    own = ["model=regformer", "trainer.max_steps=-1"]
    completed = command.completed(given, Config)
    assert completed[-2:] == ["--cfg", "job"]
    assert {*completed[:-2]} == {given[0], given[4], *own}
    outcome = typed("train", "--cfg", "job")
    assert (outcome.code, outcome.ran) == (0, False)


@pytest.mark.parametrize(
    ("epochs", "limit"), [("2", ["trainer.max_steps=-1"]), ("2,3", ["trainer.max_steps=-1"]), ("2,null", [])]
)
def test_a_sweep_has_one_limit_with_any_launcher(epochs: str, limit: list[str]) -> None:
    words = ["-m", "hydra/launcher=slurm", f"trainer.max_epochs={epochs}"]
    assert command.completed(words, Config) == [*words, *limit]


def test_a_bug_of_ours_keeps_its_traceback(typed: Typed) -> None:
    with pytest.raises(RuntimeError, match="a bug under srun"):
        typed.train(task=Mock(side_effect=RuntimeError("a bug under srun")))


@pytest.mark.parametrize(
    ("stop", "code"), [(KeyboardInterrupt(), 130), (Stopped(signal.SIGINT), 130), (Stopped(signal.SIGTERM), 143)]
)
def test_interruption_has_its_exit_code(typed: Typed, stop: KeyboardInterrupt, code: int) -> None:
    outcome = typed.train(task=Mock(side_effect=stop))
    assert (outcome.code, outcome.stderr) == (code, "interrupted\n")


def test_a_sweep_of_another_command_runs_every_job_and_fails_when_one_did(typed: Typed) -> None:
    seen: list[str] = []

    def task(cfg: DictConfig) -> None:
        seen.append(cfg.run)
        if cfg.run == "b":
            raise DataError("second is bad: fix it")

    outcome = typed("evaluate", "run=a,b,c", "-m", task=task)
    assert seen == ["a", "b", "c"]
    assert outcome.line == "second is bad: fix it"


@pytest.mark.parametrize(("name", "words"), [("train", []), ("evaluate", ["run=a"]), ("evaluate", ["run=a,b", "-m"])])
def test_commands_of_one_time_get_own_folders(typed: Typed, tmp_path: Path, name: str, words: list[str]) -> None:
    """The time here is a year, so all of them have the same."""
    kind = "sweep" if "-m" in words else "run"
    (tmp_path / "mine" / "place").mkdir(parents=True)
    text = f"# @package _global_\nhydra: {{{kind}: {{dir: 'out/${{now:%Y}}'}}}}\n"
    (tmp_path / "mine" / "place" / "here.yaml").write_text(text)
    folders: set[str] = set()

    def task(_: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        folders.add(folder.parent.name if kind == "sweep" else folder.name)

    for _ in range(3):
        outcome = typed(name, f"--config-dir={tmp_path}/mine", "+place=here", *words, task=task)
        assert outcome.code == 0, outcome.stderr
    year = min(folders)
    assert folders == {year, f"{year}_1", f"{year}_2"}
