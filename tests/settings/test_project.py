"""A command in the folder of a project takes its options and its experiment."""

import re
import shutil
from pathlib import Path

import pytest

from qnmixer.new import TEMPLATE
from qnmixer.settings.options import CONF

from ..typed import Typed


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
    assert outcome.code == 0 if table == "tool = 3" else "tool.qnmixer=3 should be a valid dict" in outcome.line


def test_a_project_has_an_example_of_each_group(typed: Typed, project: Path) -> None:
    """Of each with arguments of one's own. All are chosen at once, and each begins with what it is for."""
    groups = {path.name for path in CONF.iterdir() if path.is_dir()} - {"debug", "hydra", "memory"}
    files = [*(project / "conf").rglob("*.yaml")]
    assert {file.parent.name for file in files} == groups
    assert all(re.match(r"(# @package .*\n)?# .{20}", file.read_text()) for file in files)
    chosen = [f"{group}=mine" for group in sorted(groups - {"data", "experiment"})]
    outcome = typed("train", *chosen, "trainer.devices=2", "data.batch_size=4")
    assert outcome.stderr == ""
    assert (outcome.config.optimizer.target, outcome.config.optimizer.lr) == ("torch.optim.NAdam", 3e-3)
    assert outcome.config.schedule.warmup == 0
