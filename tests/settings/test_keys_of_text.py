"""Text is taken as typed. What has become a number before it is seen is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from qnmixer.commands import command
from qnmixer.errors import ConfigError
from qnmixer.settings.compose import compose, key_of
from qnmixer.settings.options import CONF, flat
from qnmixer.settings.run import Config, parse
from qnmixer.settings.typed_text import _keys_of_texts, with_texts

from ..conftest import config_of
from ..schemas import EXTRAS, SCHEMAS
from ..typed import Typed
from .conftest import refusal

DICOM = ["data=dicom", "data.root=/ct", "data.split=explicit"]


@pytest.mark.parametrize(("typed", "patients"), [
    ("[1.10]", ["1.10"]),
    ("[1_000, 007,2.0,P1]", ["1_000", "007", "2.0", "P1"]),
    ("[+5,1e3,nan,true,2]", ["+5", "1e3", "nan", "true", "2"]),
    ('["1.10",a]', ["1.10", "a"]),
    ("[1,22]", ["1", "22"]),
])  # fmt: skip
def test_patients_are_those_that_were_typed(typed: str, patients: list[str]) -> None:
    config = config_of(*with_texts([*DICOM, f"data.val_patients={typed}"], Config))
    assert config.plain()["data"]["val_patients"] == patients
    mixed = ["data=mixed", "data.sources.slices.root=/ct", "data.sources.slices.split=explicit"]
    config = config_of(*with_texts([*mixed, f"data.sources.slices.val_patients={typed}"], Config))
    assert config.plain()["data"]["sources"]["slices"]["val_patients"] == patients


@pytest.mark.parametrize(("command", "keys"), [
    ("train", "data.root data.include data.cache_dir tags monitor finetune resume logger.wandb.project hydra.run.dir"),
    ("plan", "data.root tags device"), ("doctor", "data.root"), ("evaluate", "run trust data.root"),
    ("reconstruct", "run input output"),
    *(pytest.param(*case, marks=pytest.mark.extras) for case in (
        ("robustness", "run noises logger.wandb.entity"), ("compare", "sweep runs output"), ("export", "run output"),
        ("calibrate", "input output air"),
    )),
])  # fmt: skip
def test_every_key_of_text(command: str, keys: str) -> None:
    assert {*keys.split()} <= _keys_of_texts(SCHEMAS[command]).keys()
    texts = with_texts([f"{key}=1.10" for key in keys.split()], SCHEMAS[command])
    assert texts == [f'{key}="1.10"' for key in keys.split()]


@pytest.mark.extras
def test_every_command_has_a_class() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} - {"wandb_sweep"} == SCHEMAS.keys()


def test_other_words_stay() -> None:
    words = ["~data.root", "model.channels=1.10", "tags=[a b]"]
    assert with_texts(words, Config) == words


@pytest.mark.parametrize(
    "word", ["data.root=1.1", "data.val_patients=[1.1]", "tags=[1.1]", "logger.wandb.name=1.1", "monitor=1.5"]
)
def test_a_number_in_place_of_text_is_refused(word: str) -> None:
    """As from a file of the user's, in which quotes are missing."""
    assert re.match(rf"{key_of(word)}=.* should be text, .* put quotes around", refusal(*DICOM, word))


def test_an_argument_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_loss.py").write_text("def loss(image, truth, name: str, names: list[str] | None = None): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = ["loss=custom", "loss._target_=named_loss.loss"]
    for word in ("+loss.name=1.10", "+loss.name=a +loss.names=[1.10]"):
        assert "should be text, not a number: put quotes around it" in refusal(*mine, *word.split())


TEXT_OF = {
    "": [],
    "dicom": ["data=dicom", "data.root=/ct", "data.split=explicit"],
    "pairs": ["data=two_detect", "data.root=/ct", "geometry=two_detect"],
    "mixed": ["data=mixed", "data.sources.slices.root=/ct", "data.sources.slices.split=explicit"],
    "loggers": ["logger=[wandb,tensorboard,csv]", "+logger.wandb.notes=about"],
    "time": ["+trainer.max_time=00:01:00:00"],
}


def _at(config: Config, key: str) -> Any:
    return OmegaConf.select(OmegaConf.create(config.plain()), key)


def _taken(composed: DictConfig, key: str, value: Any) -> Any:
    """The value of a key after the check; None if the check refuses it."""
    changed = composed.copy()
    OmegaConf.update(changed, key, value)
    try:
        return _at(parse(changed), key)
    except ConfigError:
        return None


@pytest.mark.long  # a config for each of two hundred keys
def test_every_key_of_text_gets_what_was_typed() -> None:
    """Those are keys whose check takes any text as it is, and no number as a number."""
    tried, of_text = set(), set()
    for words in TEXT_OF.values() if EXTRAS else (TEXT_OF[name] for name in TEXT_OF if name != "pairs"):
        composed = compose("train", words)
        plain: Any = OmegaConf.to_container(composed)
        for key, value in flat(plain):
            is_list = isinstance(value, list)
            sample = (value or [""])[0] if is_list else value
            if key in tried or key.endswith("_target_") or not (sample is None or isinstance(sample, str)):
                continue
            tried.add(key)
            text, number = (["1.10"], [1.1]) if is_list else ("1.10", 1.1)
            if _taken(composed, key, text) != text or _taken(composed, key, number) == number:
                continue
            of_text.add(key)
            plus = "+" if key.endswith(("notes", "max_time")) else ""
            others = [word for word in words if key_of(word) != key]
            typed = with_texts([*others, f"{plus}{key}=[1.10]" if is_list else f"{plus}{key}=1.10"], Config)
            assert _at(config_of(*typed), key) == text, key
    assert {"tags", "data.root", "data.val_patients", "logger.wandb.project", "data.sources.slices.root"} <= of_text


def test_inside_a_group_of_keys(typed: Typed) -> None:
    group = "data.sources.slices={{split: explicit, name: dicom, root: /ct, share: 0.80, val_patients: [{}]}}"
    assert "put quotes" in typed("train", "data=mixed", group.format("1.10"), check=parse).line
    assert typed("train", "data=mixed", group.format('"1.10"'), check=parse).code == 0
    assert "put quotes" in typed("train", "data=mixed", group.format("5"), check=parse).line


@pytest.mark.parametrize("spelling", ["1.10", "001", "12:30"])
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
    assert typed("train", *words, check=parse).config.data.val_patients == [spelling]


@pytest.mark.parametrize("words", ["seed=1,2 tags=[1.10]", "logger.wandb.name=1,2.10", "tags=[1_0],[2]"])
def test_in_a_sweep(words: str, typed: Typed) -> None:
    """A sweep without its launcher writes no sweep.json: it got that far."""
    outcome = typed("train", "-m", *words.split(), check=parse)
    assert outcome.code == 0 or "sweep.json" in outcome.stderr, outcome


def test_folders_of_hydra(typed: Typed, tmp_path: Path) -> None:
    assert typed("train", "hydra.run.dir=1.10", check=parse).code == 0
    assert (tmp_path / "1.10" / ".hydra").is_dir()


@pytest.mark.parametrize(("key", "text"), [
    ("data.root", "~/ct/a=1"), ("data.root", "/ct/josé, a"), ("data.root", "/ct/1,2[3] (4)"),
    ("data.include", "!x#*.dcm"), ("tags", "[a=1, é b ,1.10,'c']"), ("metrics.psnr.title", "12"),
])  # fmt: skip
def test_signs_that_hydra_does_not_take(key: str, text: str, typed: Typed) -> None:
    words = [word for word in TEXT_OF["dicom"] if key_of(word) != key]
    taken = _at(typed("train", *words, f"{key}={text}", check=parse).config, key)
    assert taken == (["a=1", "é b", "1.10", "c"] if key == "tags" else text)


def test_from_a_program() -> None:
    words = command.completed(["experiment=demo", "tags=[1.10]"], SCHEMAS["train"])
    assert config_of(*words).tags == ["1.10"]
