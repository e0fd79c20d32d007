"""What tests compose faster is what Hydra composes."""

from pathlib import Path

import pytest
from hydra._internal import defaults_list
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from omegaconf import OmegaConf

from qnmixer.engine.config.compose import compose

from . import composing


@pytest.mark.parametrize("words", [[], ["experiment=demo", "model=learn", "noise=field", "logger=[csv,wandb]"]])
def test_it_is_what_hydra_composes(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    faster = [compose("train", words) for _ in range(2)]
    monkeypatch.setattr(FileConfigSource, "load_config", composing._load)
    monkeypatch.setattr(defaults_list, "_create_interpolation_map", composing._choices)
    plain = OmegaConf.to_container(compose("train", words))
    assert [OmegaConf.to_container(config) for config in faster] == [plain, plain]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    source, file = FileConfigSource("test", str(tmp_path)), tmp_path / "mine.yaml"
    for text in ("seed: 1", "seed: 20"):
        file.write_text(text)
        source.load_config("mine").config.seed += 1  # of a copy
        assert source.load_config("mine").config == OmegaConf.create(text)
