"""What tests compose faster is what Hydra composes."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra.core.utils
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig

from qnmixer.settings.compose import compose

from . import composing

pytestmark = pytest.mark.skipif(composing._choices is None, reason="Hydra 1.4 has other internals")


def nodes(config: Any, key: str = "") -> Iterator[tuple[Any, ...]]:
    """All that OmegaConf knows of a config."""
    known = {name: value for name, value in vars(config._metadata).items() if name != "resolver_cache"}
    yield key, type(config), known, config._value() if config._is_interpolation() else str(config)
    if isinstance(config, DictConfig) and not config._is_none():
        for name in config._content:
            yield from nodes(config._get_node(name), f"{key}.{name}")
    elif isinstance(config, ListConfig) and not config._is_none():
        for index in range(len(config)):
            yield from nodes(config._get_node(index), f"{key}.{index}")


@pytest.fixture
def plain() -> Iterator[None]:
    """Hydra's own way, until the test ends."""
    composing.compose_faster(False)
    yield
    composing.compose_faster()


def composed(words: list[str]) -> list[tuple[Any, ...]]:
    return [*nodes(compose("train", words, with_hydra=True))]


@pytest.mark.parametrize(
    "words", [[], ["experiment=demo", "model=learn", "noise=field", "logger=[csv,wandb]", "hydra/launcher=basic"]]
)
def test_it_is_what_hydra_composes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    faster = [composed(words) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.delattr(composing, "_merge")  # it is not merged again, else this tests nothing
        assert composed([*words, "seed=7"]) != faster[0]
    request.getfixturevalue("plain")
    assert len(faster[0]) > 200
    assert faster == [composed(words)] * 2


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "seeds").mkdir()
    file = tmp_path / "seeds" / "mine.yaml"
    words = [f"hydra.searchpath=[file://{tmp_path}]", "+seeds=mine"]
    for number in (1, 20, 300):
        file.write_text(f"first: {number}")
        for _ in range(2):
            config = compose("train", words)
            assert config.seeds.first == number
            config.seeds.first += 1  # of a copy
        assert compose("train", [*words, "noise=field"]).seeds.first == number  # where the file is merged anew


def test_each_run_has_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    for year in (2001, 2002):
        clock = SimpleNamespace(now=lambda year=year: datetime(year, 1, 1))
        monkeypatch.setattr(hydra.core.utils, "datetime", clock)
        folders.append(compose("train", [], with_hydra=True).hydra.run.dir)
    assert folders == [f"runs/{year}-01-01/00-00-00" for year in (2001, 2002)]


def test_a_word_has_a_copy_of_its_own() -> None:
    for _ in range(2):
        (word,) = OverridesParser.create().parse_overrides(["tags=[a]"])
        assert word.value() == ["a"]
        word.value().append("b")
