from dataclasses import MISSING, fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from qnmixer.config import GROUPS, parse, parse_evaluate, parse_reconstruct
from qnmixer.config.compose import CONF, compose
from qnmixer.config.data import AsTrained, CustomData, DeepLesionData, DicomData, NumpyData, PhantomData

FILES = sorted(CONF.rglob("*.yaml"))
ONLY_FOR_EVALUATE = {"as_trained"}
ONLY_INCLUDED = {("data", "_folder"), ("data", "_common")}
TRAINING_GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "experiment")
OPTIONS = [
    (group, path.stem)
    for group in TRAINING_GROUPS
    for path in sorted((CONF / group).glob("*.yaml"))
    if path.stem not in ONLY_FOR_EVALUATE and (group, path.stem) not in ONLY_INCLUDED
]
OF_ONES_OWN = ("data", "loss", "optimizer", "schedule", "noise", "logger")
NEEDS = {
    ("strategy", "pipeline"): ["trainer.devices=2"],
    ("data", "mixed"): ["data.sources.slices.root=/ct"],
    ("trainer", "torchrun"): ["strategy=ddp"],
    ("trainer", "slurm"): ["strategy=ddp"],
    ("model", "custom"): ["model._target_=collections.Counter"],  # whether it is a network is seen when it is built
    **{(group, "custom"): [f"{group}._target_=collections.Counter"] for group in OF_ONES_OWN},
}
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


def relative(path: Path) -> str:
    return str(path.relative_to(CONF))


def with_root(overrides: list[str]) -> list[str]:
    """Give `data.root` where the data that these overrides choose has none."""
    missing = OmegaConf.is_missing(compose("train", overrides).data, "root")
    return [*overrides, "data.root=/ct"] if missing else overrides


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_are_short_and_say_what_they_are(path: Path) -> None:
    lines = path.read_text().splitlines()
    opening = lines[1] if lines[0].startswith("# @package") else lines[0]
    assert opening.startswith("# ")
    assert len(opening) > 20
    limit = 45 if path.parent == CONF else 25
    assert len(lines) < limit


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=str)
def test_every_option_composes_and_parses(group: str, option: str) -> None:
    config = parse(compose("train", with_root([f"{group}={option}", *NEEDS.get((group, option), [])])))
    assert config.trainer.max_steps > 0


def test_experiments_are_there() -> None:
    assert "demo" in EXPERIMENTS
    assert any(name.startswith("paper_") for name in EXPERIMENTS)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_parses(experiment: str) -> None:
    parse(compose("train", with_root([f"experiment={experiment}"])))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_command_line_wins_over_an_experiment(experiment: str) -> None:
    overrides = with_root([f"experiment={experiment}", "trainer.max_steps=3", "seed=5", "logger=csv", "noise=physical"])
    values = compose("train", overrides)
    assert (values.trainer.max_steps, values.seed, values.logger.name, values.noise.name) == (3, 5, "csv", "physical")


def test_every_schema_can_be_chosen() -> None:
    files = {(group, option): OmegaConf.load(CONF / group / f"{option}.yaml") for group, option in OPTIONS}
    chosen = {(group, values.get("name") or values.get(group, {}).get("name")) for (group, _), values in files.items()}
    schemas = {(group, name) for group, names in GROUPS.items() for name in names}
    assert {pair for pair in chosen if pair[0] in GROUPS and pair[1]} == schemas


@pytest.mark.parametrize(
    "schema", [PhantomData, DicomData, DeepLesionData, NumpyData, CustomData], ids=lambda s: s.__name__
)
def test_data_files_repeat_the_defaults_of_the_dataclasses(schema: Any) -> None:
    name = schema.name
    values = OmegaConf.to_container(compose("train", with_root([f"data={name}"])).data, throw_on_missing=False)
    assert isinstance(values, dict)
    assert set(values) == {field.name for field in fields(schema)} - {"arguments"}
    for field in fields(schema):
        if field.name in ("root", "seed", "_target_", "arguments"):
            continue
        default = field.default_factory() if field.default is MISSING else field.default  # type: ignore[misc]  # has one
        assert values[field.name] == default, f"{name}.{field.name}"
        assert type(values[field.name]) is type(default), f"{name}.{field.name}"


@pytest.mark.parametrize(("data", "noise"), list(product(["as_trained", "phantoms", "dicom"], ["as_trained", "field"])))
def test_evaluate_composes_with_other_data_and_noise(data: str, noise: str) -> None:
    root = ["data.root=/ct"] if data == "dicom" else []
    config = parse_evaluate(compose("evaluate", ["run=runs/x", f"data={data}", f"noise={noise}", *root]))
    assert isinstance(config.data, AsTrained) == (data == "as_trained")
    assert (config.noise is None) == (noise == "as_trained")


def test_reconstruct_composes() -> None:
    assert parse_reconstruct(compose("reconstruct", ["run=a", "input=b", "output=c"])).kind == "auto"
