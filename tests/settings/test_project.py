"""A command in the folder of a project takes its options and its experiment."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from qnmixer import train
from qnmixer.new import TEMPLATE
from qnmixer.settings.options import CONF
from qnmixer.settings.project import NO_PROJECT

from ..typed import Typed

CONF_OF_PROJECT = "src/my_ct/conf"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the code and the pyproject.toml that `new` writes."""
    shutil.copytree(TEMPLATE / "src" / "my_ct" / "conf", tmp_path / CONF_OF_PROJECT)
    shutil.copy(TEMPLATE / "pyproject.toml", tmp_path)
    monkeypatch.syspath_prepend(TEMPLATE / "src")
    return tmp_path


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_command_finds_the_options_and_the_experiment_of_a_project(command: str, typed: Typed, project: Path) -> None:
    for words, source in (([], "my_ct.data.Bodies"), (["experiment=demo", "loss=mine"], "phantoms")):
        outcome = typed(command, *words)
        assert outcome.stderr == ""
        assert getattr(outcome.config, "run", outcome.config).data.name == source


@pytest.mark.parametrize("words", [["--config-dir", "more"], ["hydra.searchpath=[more]"], ["hydra.searchpath=[]"]])
def test_a_folder_that_is_typed_is_added_to_the_projects(words: list[str], typed: Typed, project: Path) -> None:
    """And comes before it. So it is for a project's own command, from any folder."""
    (project / "more" / "loss").mkdir(parents=True)
    (project / "more" / "loss" / "mine.yaml").write_text("_target_: qnmixer.losses.l1\n")
    outcome = typed("train", *words)
    typed.monkeypatch.chdir(project / "more")
    elsewhere = [word.replace("more", "../more") for word in words]
    for config in (outcome.config, typed("train", *elsewhere, project=project).config):
        assert config.model.target == "my_ct.network.MyNetwork"
        assert config.loss.target == ("qnmixer.losses.l1" if "more" in str(words) else "my_ct.losses.charbonnier")


def test_a_projects_command_trains_it_whatever_the_current_folder_is(typed: Typed, project: Path) -> None:
    """Also beside another project, by each folder that projects have given to `main`."""
    other = project / "other"
    other.mkdir()
    (other / "pyproject.toml").write_text('[tool.qnmixer]\nexperiment = "demo"\n')
    typed.monkeypatch.chdir(other)
    for place in (project, project / CONF_OF_PROJECT):
        assert typed("train", project=place).config.model.target == "my_ct.network.MyNetwork"
    typed.monkeypatch.setenv(NO_PROJECT, "1")  # a job of its sweep
    assert typed("train").config.model.T == 14


def test_without_pyproject_the_only_experiment_is_meant(typed: Typed, project: Path) -> None:
    """As in a wheel."""
    (project / "pyproject.toml").unlink()
    conf = project / CONF_OF_PROJECT
    assert typed("train", project=conf).config.model.target == "my_ct.network.MyNetwork"
    shutil.copy(conf / "experiment" / "mine.yaml", conf / "experiment" / "second.yaml")
    refused = typed("train", "seed=2", project=conf)
    assert refused.line == f"{conf} has several experiments: add experiment=mine or second"
    assert typed("train", "experiment=second", project=conf).code == 0


@pytest.mark.parametrize("words", [[], ["--config-dir", "."], ["experiment=demo"]])
def test_a_projects_command_without_its_project_is_one_line(
    words: list[str], project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (project / "empty").mkdir()
    (project / "empty" / "pyproject.toml").write_text("[project]\n")
    for place, line in (
        (Path("/nonexistent"), "/nonexistent has neither pyproject.toml nor experiment/*.yaml: give main(…) the"),
        (project / "src", f"{project / 'src'} has neither pyproject.toml nor"),  # site-packages, for older projects
        (project / "empty", f"{project / 'empty' / 'pyproject.toml'} has no [tool.qnmixer]: write conf and"),
    ):
        monkeypatch.setattr(sys, "argv", ["train", *words])
        with pytest.raises(SystemExit, match="1"):
            train.main(place)
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(f"error: {line}")


@pytest.mark.parametrize(("text", "line"), [
    ('[tool.qnmixer]\nconf = "nowhere"', 'pyproject.toml: no folder nowhere: write conf = "FOLDER" in [tool.qnmixer]'),
    ('[tool.qnmixer]\ncnf = "conf"', "unknown key tool.qnmixer.cnf: did you mean tool.qnmixer.conf?"),
    ("[tool]\nqnmixer = 3", "tool.qnmixer=3 should be a valid dict"),
    ("[tool.qnmixer]\nconf = ", "pyproject.toml cannot be read"),
])  # fmt: skip
def test_a_wrong_table_of_a_project_is_one_line(text: str, line: str, typed: Typed, project: Path) -> None:
    """Also for the command of the project."""
    (project / "pyproject.toml").write_text(text)
    assert line in typed("plan").line
    for place in (project, project / CONF_OF_PROJECT):
        assert line in typed("train", project=place).line


def test_a_project_without_options_of_its_own_has_an_experiment(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.qnmixer]\nexperiment = "demo"\n')
    assert typed("train").config.model.T == 6
    assert typed("train", "~experiment").config.model.T == 14
    assert typed("evaluate", "run=.").code == 0


def test_a_table_of_other_tools_is_theirs(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("tool = 3")
    assert typed("plan").code == 0


def test_a_project_has_an_example_of_each_group(typed: Typed, project: Path) -> None:
    """Of each with arguments of one's own. All are chosen at once, and each begins with what it is for."""
    groups = {path.name for path in CONF.iterdir() if path.is_dir()} - {"debug", "hydra", "memory"}
    files = [*(project / CONF_OF_PROJECT).rglob("*.yaml")]
    assert {file.parent.name for file in files} == groups
    assert all(re.match(r"(# @package .*\n)?# .{20}", file.read_text()) for file in files)
    chosen = [f"{group}=mine" for group in sorted(groups - {"data", "experiment"})]
    outcome = typed("train", *chosen, "trainer.devices=2", "data.batch_size=4")
    assert outcome.stderr == ""
    assert (outcome.config.optimizer.target, outcome.config.optimizer.lr) == ("torch.optim.NAdam", 3e-3)
    assert outcome.config.schedule.warmup == 0
