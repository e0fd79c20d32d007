"""An experiment together with options that it does not choose itself, and config folders of the user's own."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from qnmixer.errors import ConfigError
from qnmixer.settings.compose import compose, compose_sweep, quoted, values_of, with_search_path
from qnmixer.settings.options import CONF

from ..conftest import config_of
from ..pages import SEARCH_PATH
from .conftest import refusal

ROOT, SLICES = "data.root=/ct", "data.sources.slices.root=/ct"


@pytest.mark.parametrize(("overrides", "values"), [
    ("experiment=demo", {"model.n_iterations": 6, "model.channels": 32, "geometry.n_detectors": 128}),
    ("experiment=demo model=tv", {"model.n_iterations": 5000, "geometry.n_views": 16}),
    ("experiment=demo model=tv model.n_iterations=7", {"model.n_iterations": 7}),
    ("experiment=demo model=qn_mixer", {"model.n_iterations": 14, "model.channels": 96}),
    ("experiment=demo optimizer=sgd logger=[wandb,tensorboard]", {"optimizer.lr": 0.1}),
    (f"experiment=pretrained optimizer=adamw {SLICES}", {"optimizer.lr": 0.001, "optimizer.step_size_lr_factor": 10}),
    ("experiment=demo geometry=htc2022", {"geometry.n_detectors": 560, "geometry.n_views": 16}),
    (f"{SEARCH_PATH} experiment=measured data=numpy {ROOT}", {"data.simulation_factor": 2, "data.split": "random"}),
    (f"experiment=pretrained data=dicom {ROOT}", {"data.augment": True, "geometry.n_views": 64}),
    (f"{SEARCH_PATH} experiment=compare_small experiment/small=learn model=fbp", {"data.image_size": 128}),
    (f"{SEARCH_PATH} experiment=compare_small optimizer=adamw", {"optimizer.lr": 0.001}),
    pytest.param(f"experiment=lodopab model=learn {ROOT}", {"model.n_iterations": 50}, marks=pytest.mark.extras),
    ("experiment=paper_aapm data=phantoms", {"data.scaling": "minmax", "data.n_val": 32}),
    ("experiment=demo ~logger", {"logger": {}}),
    ("logger=csv ~logger", {"logger": {}}),
    ("callbacks=ema ~callbacks", {"callbacks": {}}),
])  # fmt: skip
def test_an_option_keeps_its_own_values(overrides: str, values: dict[str, Any]) -> None:
    """An experiment's sizes are those of its own network, scanner and optimizer; the setting stays."""
    config = OmegaConf.create(config_of(*overrides.split()).plain())
    assert {key: OmegaConf.select(config, key) for key in values} == values


def test_the_setting_stays_and_typed_keys_still_fail() -> None:
    config = compose("plan", ["experiment=demo", "model=learn", "geometry=ge_lightspeed"])
    assert (config.data.image_size, config.geometry.n_views, config.geometry.n_detectors) == (64, 16, 888)
    assert (config.model.n_iterations, config.trainer.max_steps) == (50, 700)
    assert refusal("experiment=demo", "model=tv", "+model.channels=3").startswith("unknown key model.channels")


@pytest.mark.parametrize("text", [
    "a b", "a  b", " a", "a ", "1.10", "a@b$c*d?|%+", 'a"b', "a\\", 'a\\"', '"', '\\\\"', "it's", 'a="b"', "é~=#",
])  # fmt: skip
def test_a_path_is_quoted_for_hydra(text: str) -> None:
    word = f"key={quoted(text)}"
    (parsed,) = OverridesParser.create().parse_overrides([word])
    assert str(getattr(parsed.value(), "text", parsed.value())) == values_of([word])["key"] == text


def test_the_first_job_of_a_sweep() -> None:
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


@pytest.mark.parametrize("arguments", [
    ["--config-dir", "my conf, 1", "seed=1"], ["seed=1", "--config-dir=my conf, 1"], ["-cd", "my conf, 1", "seed=1"],
    ["hydra.searchpath=['my conf, 1']", "seed=1"], ["hydra.searchpath=['file://my conf, 1']", "seed=1"],
])  # fmt: skip
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


@pytest.mark.parametrize(("word", "message"), [
    ("--config-dir=nowhere", r"^no config folder at nowhere: give it as --config-dir FOLDER"),
    ("--config-dir", r"^--config-dir has no value: write --config-dir FOLDER"),
    ("--config-dir=~nobody_is_so", r"^no config folder at ~nobody_is_so: give it as --config-dir FOLDER"),
    ("hydra.searchpath=a", r"^hydra.searchpath=a is no list"),
    ("--config-dir=ours", r"^ours/loss/mse.yaml has the name of a file of qnmixer"),  # Hydra would take ours
])  # fmt: skip
def test_a_folder_that_cannot_be_used_is_named(here: Path, word: str, message: str) -> None:
    (here / "ours" / "loss").mkdir(parents=True)
    (here / "ours" / "loss" / "mse.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=message):
        with_search_path([word])
    assert with_search_path([f"--config-dir={CONF}"])


def laughs(head: str, line: str, last: str) -> str:
    lines = (line.format(i=i, j=i - 1) for i in range(1, 30))
    return head + "".join(lines) + last


BOMBS = {
    "experiment/x.yaml": laughs("a0: &a0 [1, 1]\n", "a{i}: &a{i} [*a{j}, *a{j}]\n", ""),
    "loss/merged.yaml": laughs("a0: &a0 {b: 1}\n", "a{i}: &a{i} {{<<: [*a{j}, *a{j}]}}\n", ""),
    "own_group/deeper/x.yml": laughs("- &a0 {x: 1}\n", "- &a{i} {{x: *a{j}, y: *a{j}}}\n", ""),
    "loss/long.yaml": "a: 1\n" + "# long\n" * 40_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_config_that_would_be_read_for_minutes_is_refused(here: Path, name: str) -> None:
    path = here / "other" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(BOMBS[name])
    start = time.process_time()
    with pytest.raises(ConfigError, match=rf"{path.name} has more than "):
        with_search_path(["--config-dir=other"])
    assert time.process_time() - start < 1


def test_aliases_and_files_that_are_no_yaml_are_left_to_hydra(here: Path) -> None:
    loss = here / "other" / "loss"
    loss.mkdir()
    (loss / "again.yaml").write_text("name: &n mine\nother: *n\nweights: &w [1, 2]\nsame: *w\n")
    (loss / "broken.yaml").write_text("a: [*b, &c\n")
    os.mkfifo(loss / "pipe.yaml")
    (words,) = with_search_path(["--config-dir=other"])
    assert compose("train", [words, "loss=again"]).loss == {
        "name": "mine", "other": "mine", "weights": [1, 2], "same": [1, 2]
    }  # fmt: skip
