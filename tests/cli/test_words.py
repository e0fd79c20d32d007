"""What people type, and what they get: it works, or its one line says what works, and that is typed here too."""

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import lightning
import pytest
import sqlalchemy
from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.cli import command
from qnmixer.engine.cli.errors import explain
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.files import CONF
from qnmixer.engine.config.run import parse
from qnmixer.errors import ConfigError
from qnmixer.new import TEMPLATE
from qnmixer.train import check

from ..conftest import every_third
from ..schemas import SCHEMAS

CHECKS: dict[str, Callable[..., Any]] = {
    "train": check,
    "evaluate": SCHEMAS["evaluate"].parse,
    "reconstruct": SCHEMAS["reconstruct"].parse,
    "export": SCHEMAS["export"].parse,
    "compare": SCHEMAS["compare"].parse,
    "plan": SCHEMAS["plan"].parse,
}


@dataclass
class Outcome:
    """What a command left: exit code, standard error, and the config that its check gave."""

    code: int = 0
    stderr: str = ""
    config: Any = field(default=None)

    @property
    def line(self) -> str:
        """The one line of a refused command."""
        assert self.code == 1, self
        (line,) = self.stderr.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")


class Checked(BaseException):
    """Ends a command after its check, before Hydra composes once more for the task."""


Typed = Callable[..., Outcome]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """typed(name, *words): a whole command line in this process, up to its task; with `runs` the task too."""
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_SWEEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def run(name: str, *words: str, check: Callable[..., Any] | None = None, runs: bool = False) -> Outcome:
        checked: list[Any] = []

        def checking(config: Any) -> Any:
            checked.append((check or CHECKS[name])(config))
            return checked[-1]

        def task(_: Any) -> None:
            if not runs:
                raise Checked

        monkeypatch.setattr(sys, "argv", [name, *words])
        monkeypatch.delenv(command.TRACEBACK, raising=False)
        capsys.readouterr()
        code = 0
        try:
            command.run(task, checking, SCHEMAS[name])
        except Checked:
            pass
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Outcome(code, capsys.readouterr().err, checked[-1] if checked else None)

    return run


def advised(line: str, words: list[str], value: str = "3") -> list[str]:
    """The words that the line of a refused command says to type instead of its last ones."""
    if left_out := re.search(r"leave out (\S+)$", line):
        return [word for word in words if left_out[1] not in (word, key_of(word))]
    if way := re.search(r"write (--.*), or", line):
        return shlex.split(way[1])
    if way := re.search(r"(?:write|use|choose one with|Or add|or add) (.+?)(?:[,;:] .*)?$", line):
        return [word.replace("…", value) for word in shlex.split(way[1]) if "=" in word or word[0] in "~-"]
    assert line.endswith("leave it out"), line
    return []


# Wrong words after "|", and what the line says. What it advises is typed in their place.
WORDS = {
    # a group that is deleted or added
    "train | ~callbacks=ema": "~callbacks=… names another value than that of the config: write ~callbacks",
    "train | ++model=tv": "++model=tv is for keys, not for groups: write model=tv",
    "train | ~evaluation": "the config has no evaluation: choose one with evaluation=…",
    # several values
    "train | tags=a,é": "tags=a,é has several values: add -m for a run of each, or write tags=[a,é] for a list",
    "train | logger=wandb,csv": "write logger=[wandb,csv] for a list",
    # none of a group
    "train | logger=null": "logger=null chooses nothing: write logger=csv",
    "train | logger=none": "write logger=csv",
    "train | logger=false": "write logger=csv",
    "train | logger=": "write logger=csv",
    "train | callbacks=null": "write callbacks=none",
    "train | noise=off": "write noise=none",
    "train | debug=null": "write debug=off",
    "train | schedule=none": "write schedule=constant",
    "train | strategy=null": "write strategy=single",
    "train | experiment=none": "experiment=none chooses nothing: leave it out, or write ~experiment",
    "evaluate run=. | data=null": "data=null chooses nothing: write data=as_trained",
    "evaluate run=. | logger=null": "logger=null chooses nothing: leave it out, or write ~logger",
    "evaluate run=. | memory=null": "memory comes from the run and cannot change in evaluate: leave it out",
    # flags of other programs
    "train | --experiment demo": "--experiment is not an option: write experiment=demo",
    "train | --gpus 1": "--gpus is not an option: use trainer.devices=…",
    "train | --max_epochs 3": "--max_epochs is not an option: write trainer.max_epochs=3",
    "train | --max-epochs=3": "--max-epochs is not an option: write trainer.max_epochs=3",
    "train | --max-epochs 3": "write trainer.max_epochs=3",
    "train | --lr 1e-3": "--lr is not an option: use optimizer.lr=…",
    "train | -lr 1e-3": "-lr is not an option: use optimizer.lr=…",
    "train | --learning-rate=1e-3": "use optimizer.lr=…",
    "train | --batch-size 4": "write data.batch_size=4",
    "train | --seed 3": "write seed=3",
    "train | --optimizer.lr 3": "write optimizer.lr=3",
    "train | --devices 1": "write trainer.devices=1",
    "train | --geometry.first_angle -1": "write geometry.first_angle=-1",
    "train | --model tv": "write model=tv",
    "train | --multi": "--multi is not an option: write --multirun",
    "plan | --device V100-16": "write device=V100-16",
    "evaluate | --run runs/x": "runs/x is not KEY=VALUE: write run=runs/x",
    "evaluate run=. | --split val": "write split=val",
    "evaluate run=. | --batch-size 3": "batch_size comes from the run and cannot change in evaluate: leave it out",
    # keys of other commands
    "evaluate run=. | lr=3": "lr comes from the run and cannot change in evaluate: leave it out",
    "evaluate run=. | batch_size=3": "leave it out",
    "reconstruct run=. input=. output=o | n_iterations=3": "leave it out",
    "evaluate run=. | root=/x": "did you mean data.root?",
    "evaluate run=. | evaluation.photons=[1e5]": "evaluation.photons works with evaluation=task only",
    "train | evaluation.photons=[1e5]": "evaluation.photons is for evaluate with evaluation=task: leave it out",
    "evaluate run=. | --trainer.accelerator cpu": "write accelerator=…",
    "evaluate run=. | --optimizer.lr 3": "optimizer.lr comes from the run and cannot change in evaluate: leave it out",
    "evaluate run=. | n_slices=8": "callbacks.pictures.n_slices comes from the run",
    "evaluate run=. logger=wandb | logger.wandb.name=x": "use logger.wandb.run_name=…",
    "compare | run=x": "use sweep=FOLDER",
    "evaluate run=. | output=x": "use hydra.run.dir=…",
    # words without a key
    "reconstruct run=. output=o | 'Scan (1).npy'": "write 'input=Scan (1).npy'",
    "reconstruct run=. input=. | out": "write output=out",
    "train data=numpy | --data-root .": "write data.root=.",
    "train | conf/experiment/demo.yaml": "write experiment=demo",
    "train data=dicom | data.root:.": "write data.root=.",
    "train | 'optimizer.betas=(0.9,0.99)'": "write 'optimizer.betas=[0.9,0.99]'",
    "evaluate | pretrained": "pretrained is not KEY=VALUE: write run=pretrained",
    "compare | latest": "write sweep=latest",
    "evaluate run=. | task": "write evaluation=task",
    "evaluate | runs/x": "runs/x is not KEY=VALUE: write run=runs/x",
    "reconstruct input=. output=o | runs/x": "write run=runs/x",
    "reconstruct run=. output=o | ct/a.dcm": "write input=ct/a.dcm",
    "export run=. | a.safetensors": "write output=a.safetensors",
    "compare | runs/x": "write sweep=runs/x",
    "evaluate run=. | runs/x": "leave it out",
    "train | data.image_size": "write data.image_size=…",
    # a target whose option brought other keys
    "train experiment=demo | optimizer._target_=torch.optim.NAdam": "write optimizer=custom optimizer._target_=torch",
    "train optimizer=muon | optimizer._target_=torch.optim.Adam": "write optimizer=custom optimizer._target_=torch",
    # a logger that is not chosen
    "train logger=csv | +logger.wandb.notes=about": "logger.wandb.notes works with logger=wandb only: choose that, or",
    # names that W&B refuses
    "train | logger.wandb.project=my/proj": "write logger.wandb.entity=my logger.wandb.project=proj",
    "train | logger.wandb.project=a:b": "write logger.wandb.project=a-b",
    "train | 'logger.wandb.project=\"#1\"'": "write logger.wandb.project=-1",
}  # fmt: skip


@pytest.mark.parametrize("words", every_third(WORDS))
def test_what_the_line_says_works(words: str, typed: Typed) -> None:
    context, wrong = (shlex.split(part) for part in words.split("|"))
    line = typed(*context, *wrong).line
    assert WORDS[words] in line
    if "did you mean " in line:
        right = [f"{line.rpartition('did you mean ')[2].rstrip('?')}=3"]
    else:
        right = advised(line, wrong, "64")
    outcome = typed(*context, *right, *(["seed=1"] if "--multirun" in right else []))
    if "_target_" in str(wrong):  # every keyword that the class has is its own
        assert outcome.config.optimizer.name == wrong[0].partition("=")[2]
    # A sweep without its launcher writes no sweep.json: it got that far.
    assert outcome.code == 0 or "sweep.json" in outcome.stderr, outcome


@pytest.mark.parametrize("key", every_third(["ckpt_path", "resume", "finetune", "--ckpt_path", "weights"]))
@pytest.mark.parametrize("context", ["evaluate", "reconstruct input=. output=o", "export output=a.safetensors"])
def test_other_commands_take_the_network_as_run(context: str, key: str, typed: Typed) -> None:
    words = shlex.split(context)
    line = typed(*words, f"{key}=runs/x").line
    assert "run=RUN_FOLDER" in line
    assert not re.search("resume=|finetune=(?!runs)", line.partition(":")[2])
    assert typed(*words, "run=runs/x").code == 0
    assert "sweep=FOLDER" in typed("compare", f"{key}=runs/x").line


@pytest.mark.parametrize("group", ["experiment", "model", "optimizer"])
def test_an_option_of_ones_own_needs_its_folder(group: str, typed: Typed, tmp_path: Path) -> None:
    original = {"experiment": "demo", "model": "tv", "optimizer": "adamw"}[group]
    text = (CONF / group / f"{original}.yaml").read_text()
    (tmp_path / "my conf" / group).mkdir(parents=True)
    (tmp_path / "my conf" / group / "zzz.yaml").write_text(text)
    line = typed("train", f"{group}=zzz").line
    assert line.endswith("; or add --config-dir 'my conf'")
    assert typed("train", f"{group}=zzz", "--config-dir", "my conf").code == 0
    assert "--config-dir FOLDER, for FOLDER/experiment/mine.yaml" in typed("train", "experiment=mine").line


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the options and the pyproject.toml that `new` writes."""
    shutil.copytree(TEMPLATE / "conf", tmp_path / "conf")
    shutil.copy(TEMPLATE / "pyproject.toml", tmp_path)
    (tmp_path / "my_ct").symlink_to(TEMPLATE / "src" / "my_ct")
    return tmp_path


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_command_finds_the_options_and_the_experiment_of_a_project(command: str, typed: Typed, project: Path) -> None:
    for words, source in (([], "my_ct.data.Bodies"), (["experiment=demo", "loss=mine"], "phantoms")):
        outcome = typed(command, *words)
        assert outcome.stderr == ""
        assert getattr(outcome.config, "run", outcome.config).data.name == source


def test_the_options_of_a_project_are_among_those_to_choose(typed: Typed, project: Path) -> None:
    assert typed("train", "experiment=mien").line.endswith("did you mean mine?")
    assert typed("train", "loss=egdes").line.endswith("did you mean edges?")
    assert "choose custom, edges, l1, mine, mse, ssim_mix" in typed("train", "loss=zzz").line


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ('conf = "nowhere"', 'pyproject.toml: no folder nowhere: write conf = "FOLDER" in [tool.qnmixer]'),
        ('cnf = "conf"', "unknown key tool.qnmixer.cnf: did you mean tool.qnmixer.conf?"),
        ("conf = ", "pyproject.toml of this folder cannot be read"),
        ('name = "x"', "unknown key tool.qnmixer.name: choose tool.qnmixer.conf, tool.qnmixer.experiment"),
    ],
)
def test_a_wrong_table_of_a_project_is_one_line(table: str, line: str, typed: Typed, project: Path) -> None:
    (project / "pyproject.toml").write_text(f"[tool.qnmixer]\n{table}\n")
    assert line in typed("plan").line


def test_keys_of_the_options_of_a_project(typed: Typed, project: Path) -> None:
    line = "loss.weight works with loss=edges only: choose that, or leave loss.weight out"
    assert typed("train", "loss=mse", "loss.weight=2").line == line
    assert typed("train", "loss=edges", "loss.wieght=2").line.startswith("unknown key loss.wieght: did you mean loss.w")
    assert typed("train", "edges").line == "edges is not KEY=VALUE: write loss=edges"


def test_a_file_of_an_experiment_needs_its_first_line(typed: Typed, project: Path) -> None:
    file = project / "conf" / "experiment" / "mine.yaml"
    file.write_text("trainer: {max_steps: 3}\n")
    assert typed("train").line.endswith("begin it with # @package _global_")
    file.write_text("# @package _global_\ndefaults: [{/loss: edges}]\n")
    assert "write override /loss in the defaults of the config file" in typed("train").line


def test_a_project_without_options_of_its_own_has_an_experiment(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.qnmixer]\nexperiment = "demo"\n')
    assert typed("train").config.model.T == 6
    assert typed("train", "~experiment").config.model.T == 14
    assert typed("evaluate", "run=.").code == 0


@pytest.mark.parametrize("table", ["tool = 3", "[tool]\nqnmixer = 3"])
def test_a_table_that_is_none(table: str, typed: Typed, tmp_path: Path) -> None:
    """That of other tools is theirs."""
    (tmp_path / "pyproject.toml").write_text(table)
    outcome = typed("plan")
    assert outcome.code == 0 if table == "tool = 3" else "write [tool.qnmixer]" in outcome.line


# Arguments of Lightning's Trainer


@pytest.mark.long  # each value is a whole command line
@pytest.mark.parametrize("name", [name for name in signature(lightning.Trainer.__init__).parameters if name != "self"])
def test_every_argument_of_the_trainer_is_a_key_or_has_an_answer(name: str, typed: Typed) -> None:
    values = ["true", "3", "1.0", "simple", "norm", "00:00:01:00"]
    if f"trainer.{name}" in _leaves(OmegaConf.to_container(compose("train", []))):
        return
    lines = []
    for value in values:
        outcome = typed("train", f"+trainer.{name}={value}", check=parse)
        if outcome.code == 0:
            return
        lines.append(outcome.line)
        if "should be" not in outcome.line:
            break
    assert not re.search("no such argument|unknown key", lines[-1])
    assert re.search(r"leave it out|use .*=", lines[-1])
    if way := re.search(r"use ([\w.+]+)=([\w.]*)", lines[-1]):
        value = way[2] or {"logger": "csv", "callbacks": "ema", "trainer.precision": "32"}.get(way[1], "3")
        assert typed("train", f"{way[1]}={value}", check=parse).code == 0


# Weights & Biases


@pytest.mark.parametrize("project", every_third(["my/proj", "a#b", "x" * 129]))
def test_a_project_that_wandb_refuses(
    project: str, typed: Typed, monkeypatch: pytest.MonkeyPatch, no_wandb: None
) -> None:
    import wandb

    with pytest.raises(wandb.errors.UsageError) as refused:  # of W&B itself
        wandb.Settings(project=project)
    assert "login" not in str(explain(refused.value, "train"))
    monkeypatch.setenv("WANDB_PROJECT", project)
    line = typed("train").line
    assert f"logger.wandb.project={project} (or WANDB_PROJECT)" in line
    right = typed("train", *advised(line, []))
    wandb.Settings(project=right.config.logger["wandb"].project)
    assert typed("train", "logger=csv").code == 0


# Text as typed

SPELLINGS = ["1.10", "1e3", "1_000", "+5", "5", "007", "0x10", "2020-01-01", "12:30", "null", "true", "1.2.3", "01"]
TEXT_OF = {
    "": [],
    "dicom": ["data=dicom", "data.root=/ct", "data.split=explicit"],
    "pairs": ["data=two_detect", "data.root=/ct", "geometry=two_detect"],
    "mixed": ["data=mixed", "data.sources.slices.root=/ct", "data.sources.slices.split=explicit"],
    "loggers": ["logger=[wandb,tensorboard,csv]", "+logger.wandb.notes=about"],
    "time": ["+trainer.max_time=00:01:00:00"],
}


def _leaves(values: Any, key: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield f"{key}{name}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{key}{name}.")


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _taken(composed: DictConfig, key: str, value: Any) -> Any:
    """The value of a key after the check; None if the check refuses it."""
    changed = composed.copy()
    OmegaConf.update(changed, key, value)
    try:
        return _at(parse(changed).plain(), key)
    except ConfigError:
        return None


def text_keys() -> dict[str, tuple[list[str], bool]]:
    """The keys of type text: the words that choose their option, and whether each is a list.

    Their check takes any text as it is, and no number as a number.
    """
    keys: dict[str, tuple[list[str], bool]] = {}
    tried: set[str] = set()
    for words in TEXT_OF.values():
        composed = compose("train", words)
        plain = OmegaConf.to_container(composed)
        for key in _leaves(plain):
            value = _at(plain, key)
            is_list = isinstance(value, list)
            sample = value[0] if is_list and value else "" if is_list else value
            if key in tried or key.endswith("_target_") or not (sample is None or isinstance(sample, str)):
                continue
            tried.add(key)
            text: Any = ["1.10"] if is_list else "1.10"
            if _taken(composed, key, text) == text and _taken(composed, key, [1.1] if is_list else 1.1) not in (
                1.1,
                [1.1],
            ):
                keys[key] = words, is_list
    return keys


def spelled(key: str, token: str, is_list: bool) -> str:
    return f"{key}=[{token}]" if is_list else f"{key}={token}"


def assert_as_typed(typed: Typed, words: list[str], key: str, token: str, is_list: bool) -> None:
    plus = "+" if key.endswith(("notes", "max_time")) else ""
    words = [word for word in words if key_of(word) != key]
    outcome = typed("train", *words, plus + spelled(key, token, is_list), check=parse)
    text = [token] if is_list else token
    if outcome.code == 0:
        taken = _at(outcome.config.plain(), key)
        assert taken == text or (token == "null" and not is_list and taken is None)
        return
    assert "put quotes around it" in outcome.line or token == "null"  # no text, which the line says
    outcome = typed("train", *words, plus + spelled(key, f'"{token}"', is_list), check=parse)
    assert _at(outcome.config.plain(), key) == text


def key_of(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


@pytest.mark.long  # a command line for each of fifty keys
def test_every_key_of_text_gets_what_was_typed(typed: Typed) -> None:
    keys = text_keys()
    assert {"tags", "data.root", "data.val_patients", "logger.wandb.project", "data.sources.slices.root"} <= keys.keys()
    for key, (words, is_list) in keys.items():
        assert_as_typed(typed, words, key, "1.10", is_list)


@pytest.mark.long  # each value is a whole command line
@pytest.mark.parametrize("token", SPELLINGS)
def test_every_spelling(token: str, typed: Typed) -> None:
    assert_as_typed(typed, [], "tags", token, True)
    assert_as_typed(typed, [], "logger.wandb.run_name", token, False)


def test_numbers_that_are_spelled_as_the_text_are_taken(typed: Typed) -> None:
    """[1,2] names patients 1 and 2, without quotes."""
    outcome = typed("train", *TEXT_OF["dicom"], "data.val_patients=[1,22]", check=parse)
    assert _at(outcome.config.plain(), "data.val_patients") == ["1", "22"]
    assert typed("plan", "device=24").config.device == "24"


def test_a_list_with_other_words(typed: Typed) -> None:
    outcome = typed("train", *TEXT_OF["dicom"], "data.val_patients=[1.10,2,P3]", check=parse)
    assert _at(outcome.config.plain(), "data.val_patients") == ["1.10", "2", "P3"]


def test_inside_a_group_of_keys(typed: Typed) -> None:
    group = "data.sources.slices={{split: explicit, name: dicom, root: /ct, share: 0.80, val_patients: [{}]}}"
    assert "put quotes" in typed("train", "data=mixed", group.format("1.10"), check=parse).line
    assert typed("train", "data=mixed", group.format('"1.10"'), check=parse).code == 0
    assert "put quotes" in typed("train", "data=mixed", group.format("5"), check=parse).line


@pytest.mark.parametrize("spelling", every_third(["1.10", "001", "0x10", "12:30", "1_000"]))
def test_in_a_config_file_of_ones_own(spelling: str, typed: Typed, tmp_path: Path) -> None:
    """YAML reads 001 as 1, 0x10 as 16 and 12:30 as 750."""
    file = tmp_path / "conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    words = ["experiment=mine", "--config-dir", "conf"]
    text = "# @package _global_\ndefaults:\n  - override /data: dicom\n"
    text += "data:\n  root: /ct\n  split: explicit\n  val_patients: [{}]\n"
    file.write_text(text.format(spelling))
    assert "put quotes around it" in typed("train", *words, check=parse).line
    file.write_text(text.format(f'"{spelling}"'))
    assert _at(typed("train", *words, check=parse).config.plain(), "data.val_patients") == [spelling]


@pytest.mark.parametrize("words", ["seed=1,2 tags=[1.10]", "logger.wandb.run_name=1,2.10", "tags=[1_0],[2]"])
def test_in_a_sweep(words: str, typed: Typed) -> None:
    """A sweep without its launcher writes no sweep.json: it got that far."""
    outcome = typed("train", "-m", *words.split(), check=parse)
    assert outcome.code == 0 or "sweep.json" in outcome.stderr, outcome


def test_folders_of_hydra(typed: Typed, tmp_path: Path) -> None:
    assert typed("train", "hydra.run.dir=1.10", check=parse, runs=True).code == 0
    assert (tmp_path / "1.10" / ".hydra").is_dir()


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("data.root", "~/ct/a=1"),
        ("data.root", "/ct/josé, a"),
        ("data.root", "/ct/1,2[3] (4)"),
        ("data.include", "!x#*.dcm"),
        ("tags", "[a=1, é b ,1.10,'c']"),
        ("metrics.psnr.title", "12"),
    ],
)
def test_signs_that_hydra_does_not_take(key: str, text: str, typed: Typed) -> None:
    words = [word for word in TEXT_OF["dicom"] if key_of(word) != key]
    taken = _at(typed("train", *words, f"{key}={text}", check=parse).config.plain(), key)
    assert taken == (["a=1", "é b", "1.10", "c"] if key == "tags" else text)


def test_from_a_program() -> None:
    words = command.completed(["experiment=demo", "tags=[1.10]"], SCHEMAS["train"])
    assert parse(compose("train", words)).tags == ["1.10"]


def test_a_database_that_is_none() -> None:
    with pytest.raises(sqlalchemy.exc.ArgumentError) as refused:
        sqlalchemy.make_url("x")
    line = "hydra.sweeper.storage is no database (Could not parse SQLAlchemy URL"
    assert str(explain(refused.value, "train")).startswith(line)


def test_a_part_of_other_files_is_no_option(typed: Typed) -> None:
    """data=_folder has the keys of sources of files, and no class."""
    assert typed("train", "data=_folder", "data.root=.", check=parse).line.startswith("data has no _target_")
