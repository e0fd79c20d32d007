from pathlib import Path

import pytest

from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.search_path import CONF, with_search_path
from qnmixer.errors import ConfigError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my conf, 1" / "loss").mkdir(parents=True)
    (tmp_path / "other").mkdir()
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
def test_every_way_is_one_override(here: Path, arguments: list[str]) -> None:
    found = with_search_path(arguments)
    assert found == [f'hydra.searchpath=["file://{here}/my conf, 1"]', "seed=1"]
    assert with_search_path(found) == found


def test_hydra_finds_what_is_there(here: Path) -> None:
    (here / "my conf, 1" / "loss" / "mine.yaml").write_text("name: mine\nweight: 0.25\n")
    (here / "other" / "schedule").mkdir()
    (here / "other" / "schedule" / "slow.yaml").write_text("name: slow\n")
    overrides = with_search_path(
        ["--config-dir", "other", "loss=mine", "schedule=slow", "hydra.searchpath=['my conf, 1']"]
    )
    config = compose("train", overrides)
    assert (config.loss.weight, config.schedule.name) == (0.25, "slow")


def test_without_there_is_none() -> None:
    assert with_search_path(["seed=1", "-m"]) == ["seed=1", "-m"]


def test_packages_are_distinguished_from_folders() -> None:
    overrides = with_search_path(["hydra.searchpath=[pkg://a.b/c]"])
    assert overrides == ["hydra.searchpath=[pkg://a.b/c]"]


@pytest.mark.parametrize("word", ["--config-dir=nowhere", "hydra.searchpath=[nowhere]", "--config-dir"])
def test_a_folder_that_is_missing_is_named(word: str) -> None:
    with pytest.raises(ConfigError, match=r"^no config folder at \S+: give it as --config-dir FOLDER"):
        with_search_path([word])


def test_a_file_with_the_name_of_one_of_ours_is_refused(here: Path) -> None:
    """Hydra takes the first that it finds, which is ours."""
    (here / "other" / "loss").mkdir()
    (here / "other" / "loss" / "mse.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=r"^other/loss/mse.yaml has the name of a file of qnmixer"):
        with_search_path(["--config-dir=other"])
    assert with_search_path([f"--config-dir={CONF}"])


def test_a_value_that_is_no_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^hydra.searchpath=a is no list"):
        with_search_path(["hydra.searchpath=a"])
