import re
from pkgutil import resolve_name
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from qnmixer.settings.compose import compose
from qnmixer.settings.options import CONF, values_of_option
from qnmixer.settings.plugins import defaults_of, parameters_of
from qnmixer.settings.run import parse

from .conftest import every_third
from .pages import SEARCH_PATH, STUDIES

FILES = [*sorted(CONF.rglob("*.yaml")), *sorted(STUDIES.rglob("*.yaml"))]
TRAINING_GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "experiment")
OPTIONS = [
    (group, path.stem)
    for group in TRAINING_GROUPS
    for path in sorted((CONF / group).glob("*.yaml"))
    if not path.stem.startswith("_") and path.stem not in ("as_trained", "task", "uncertainty")
]
NEEDS = {
    ("strategy", "pipeline"): ["trainer.devices=2"],
    ("data", "lodopab"): ["geometry=lodopab"],
    ("data", "two_detect"): ["geometry=two_detect"],
    ("trainer", "torchrun"): ["strategy=ddp"],
    ("trainer", "slurm"): ["strategy=ddp"],
    ("model", "custom"): ["model._target_=qnmixer.models.LEARN"],
    ("loss", "custom"): ["loss._target_=qnmixer.losses.l1"],
    ("optimizer", "custom"): ["optimizer._target_=torch.optim.NAdam"],
    ("schedule", "custom"): ["schedule._target_=qnmixer.schedules.constant"],
    ("noise", "custom"): ["noise._target_=qnmixer.physics.NoNoise"],
    **{(group, "custom"): [f"{group}._target_=collections.Counter"] for group in ("data", "logger")},
}
VARIANTS = "custom", "qn_mixer_paper", "qn_mixer_small", "physical_lodopab"
OTHER = {"_target_", "variance", "hu_max", "electronic_sigma", "lr", "adamw_lr", "weight_decay", "step_size_lr_factor"}
"""Arguments that come from the run, or for which a program takes what its scanner or network needs."""
EXPERIMENTS = sorted(path.stem for folder in (CONF, STUDIES) for path in (folder / "experiment").glob("*.yaml"))


def composed(overrides: list[str]) -> DictConfig:
    """The config of a training run, with a root for every folder of its data that has none."""
    found = compose("train", overrides)
    for key in OmegaConf.missing_keys(found):
        if key.endswith(".root"):
            OmegaConf.update(found, key, "/ct")
    return found


def test_files_are_short_and_say_what_they_are() -> None:
    for path in FILES:
        lines = path.read_text().splitlines()
        opening = lines[1] if lines[0].startswith("# @package") else lines[0]
        assert re.match("# .{19}", opening), path
        assert len(lines) < (45 if path.parent == CONF else 25), path


SETS = "lodopab", "two_detect", "helix2fan"
"""Public data sets, which are extras."""


def of_extras(*names: str, is_in: bool) -> Any:
    """The parameters of a test, which is skipped in a copy without extras if it is in them."""
    return pytest.param(*names, marks=[pytest.mark.extras] * is_in)


@pytest.mark.parametrize(
    ("group", "option"),
    [of_extras(*names, is_in=names[0] == "data" and names[1] in SETS) for names in OPTIONS],
    ids=str,
)
def test_every_option_composes_and_parses(group: str, option: str) -> None:
    values = composed([f"{group}={option}", *NEEDS.get((group, option), [])])
    if option == "mlflow":
        pytest.importorskip("mlflow", reason="qnmixer[mlflow] is large, and in no environment of ours")
    assert parse(values).trainer.max_steps > 0


@pytest.mark.parametrize("experiment", [of_extras(name, is_in=name in SETS) for name in EXPERIMENTS])
def test_every_experiment_composes(experiment: str) -> None:
    parse(composed([SEARCH_PATH, f"experiment={experiment}"]))


@pytest.mark.parametrize("experiment", every_third(EXPERIMENTS))
def test_the_command_line_wins_over_an_experiment(experiment: str) -> None:
    alone = composed([SEARCH_PATH, f"experiment={experiment}"])
    values = composed(
        [SEARCH_PATH, f"experiment={experiment}", "trainer.max_steps=3", "seed=5", "logger=csv", "noise=physical"]
    )
    assert (values.trainer.max_steps, values.seed, list(values.logger)) == (3, 5, ["csv"])
    assert values.noise._target_ == "qnmixer.physics.PhysicalNoise"
    if experiment in ("compare_real", "second_order"):  # a seed that splits the patients anew is compared on others
        assert values.data.seed == alone.data.seed


@pytest.mark.parametrize(("group", "option"), [
    ("optimizer", "muon"), *(it for it in OPTIONS if it[0] in ("model", "noise") and it[1] not in VARIANTS),
])  # fmt: skip
def test_what_a_program_builds_is_what_the_command_builds(group: str, option: str) -> None:
    values = values_of_option(group, option)
    defaults = defaults_of(parameters_of(resolve_name(str(values["_target_"]))) or ())
    program, command = (OmegaConf.create({key: it[key] for key in it.keys() - OTHER}) for it in (defaults, values))
    assert program == command
