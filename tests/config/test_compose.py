"""An experiment together with options that it does not choose itself, and config folders of the user's own."""

from pathlib import Path

import pytest

from qnmixer.engine.config.compose import compose, compose_as_given, compose_sweep, fitted, with_search_path
from qnmixer.engine.config.files import CONF
from qnmixer.engine.config.run import parse
from qnmixer.errors import ConfigError

ROOT = "data.root=/ct"


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        ("experiment=demo model=tv", "model.n_iterations=5000 ~model.channels"),
        ("experiment=demo model=tv model.n_iterations=7 ~model.channels", ""),  # completed before
        ("experiment=demo model=qn_mixer optimizer=muon geometry=paper", ""),  # its own choices
        ("experiment=demo optimizer=sgd logger=[wandb,tensorboard]", ""),
        (
            "experiment=pretrained optimizer=adamw data.sources.slices.root=/ct",
            "optimizer.lr=0.001 ~optimizer.adamw_lr optimizer.step_size_lr_factor=",
        ),
        ("experiment=demo geometry=htc2022", "geometry.n_detectors=560 geometry.detector_pitch=0.2"),
        (f"experiment=measured data=numpy {ROOT}", "~data.n_val ~data.n_test ~data.anatomy_share"),
        (f"experiment=pretrained data=dicom {ROOT}", "~data.sources"),
        ("experiment=compare_small experiment/small=learn model=fbp",
         "~model.n_iterations ~model.channels ~model.data_term"),
        ("model=tv geometry=htc2022", ""),
        ("experiment=demo ~logger", ""),
    ],
)  # fmt: skip
def test_an_option_keeps_its_own_values(overrides: str, more: str) -> None:
    """An experiment's sizes are those of its own network, scanner and optimizer; the setting stays."""
    words = overrides.split()
    completed = fitted("train", words)
    added = sorted(completed[len(words) :])
    assert completed[: len(words)] == words
    assert len(added) == len(more.split())
    for found, word in zip(added, sorted(more.split()), strict=True):
        assert found.startswith(word)
    parse(compose_as_given("train", completed))


def test_the_setting_stays_and_typed_keys_still_fail() -> None:
    config = compose("plan", ["experiment=demo", "model=learn", "geometry=ge_lightspeed"])
    assert (config.data.image_size, config.geometry.n_views, config.geometry.n_detectors) == (64, 16, 888)
    assert (config.model.n_iterations, config.trainer.max_steps) == (50, 700)
    with pytest.raises(ConfigError, match=r"^model\.channels works with model=\S+ or .* only"):
        parse(compose("train", ["experiment=demo", "model=tv", "model.channels=3"]))


def test_each_job_of_a_sweep_is_fitted() -> None:
    first = compose_sweep("train", ["experiment=demo", "model=fbp,qn_mixer"])
    assert "channels" not in first.model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my conf, 1" / "loss").mkdir(parents=True)
    (tmp_path / "my conf, 1" / "loss" / "mine.yaml").write_text("name: mine\nweight: 0.25\n")
    (tmp_path / "other" / "schedule").mkdir(parents=True)
    (tmp_path / "other" / "schedule" / "slow.yaml").write_text("name: slow\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config-dir", "my conf, 1", "seed=1"],
        ["seed=1", "--config-dir=my conf, 1"],
        ["-cd", "my conf, 1", "seed=1"],
        ["hydra.searchpath=['my conf, 1']", "seed=1"],
        ["hydra.searchpath=['file://my conf, 1']", "seed=1"],
    ],
)
def test_every_way_to_a_folder_is_one_override(here: Path, arguments: list[str]) -> None:
    found = with_search_path(arguments)
    assert found == [f'hydra.searchpath=["file://{here}/my conf, 1"]', "seed=1"]
    assert with_search_path(found) == found


def test_hydra_finds_what_is_there(here: Path) -> None:
    overrides = with_search_path(
        ["--config-dir", "other", "loss=mine", "schedule=slow", "hydra.searchpath=['my conf, 1',pkg://a.b]"]
    )
    assert overrides[0].endswith(",pkg://a.b]")
    config = compose("train", [overrides[0].replace(",pkg://a.b", ""), *overrides[1:]])
    assert (config.loss.weight, config.schedule.name) == (0.25, "slow")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--config-dir=nowhere", r"^no config folder at nowhere: give it as --config-dir FOLDER"),
        ("--config-dir", r"^no config folder at \.: give it as --config-dir FOLDER"),
        ("--config-dir=~nobody_is_so", r"^no config folder at ~nobody_is_so: give it as --config-dir FOLDER"),
        ("hydra.searchpath=a", r"^hydra.searchpath=a is no list"),
        ("--config-dir=ours", r"^ours/loss/mse.yaml has the name of a file of qnmixer"),  # Hydra would take ours
    ],
)
def test_a_folder_that_cannot_be_used_is_named(here: Path, word: str, message: str) -> None:
    (here / "ours" / "loss").mkdir(parents=True)
    (here / "ours" / "loss" / "mse.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=message):
        with_search_path([word])
    assert with_search_path([f"--config-dir={CONF}"])
