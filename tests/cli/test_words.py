"""What people type, and what they get: it works, or its one line says what works, and that is typed here too."""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.cli import command
from qnmixer.engine.config.compose import compose
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


# Wrong words after "|", and what the line says. What it advises is typed in their place.


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


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ('conf = "nowhere"', 'pyproject.toml: no folder nowhere: write conf = "FOLDER" in [tool.qnmixer]'),
        ('cnf = "conf"', "unknown key tool.qnmixer.cnf: did you mean tool.qnmixer.conf?"),
        ("conf = ", "pyproject.toml of this folder cannot be read"),
    ],
)
def test_a_wrong_table_of_a_project_is_one_line(table: str, line: str, typed: Typed, project: Path) -> None:
    (project / "pyproject.toml").write_text(f"[tool.qnmixer]\n{table}\n")
    assert line in typed("plan").line


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


# Weights & Biases


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
