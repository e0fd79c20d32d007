"""Text is taken as typed. What has become a number before it is seen is refused."""

from pathlib import Path

import pytest

from qnmixer.engine.cli.texts import _keys_of_texts, with_texts
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.files import CONF
from qnmixer.engine.config.run import Config, parse
from qnmixer.errors import ConfigError

from ..schemas import SCHEMAS

DICOM = ["data=dicom", "data.root=/ct", "data.split=explicit"]


@pytest.mark.parametrize(
    ("typed", "patients"),
    [
        ("[1.10]", ["1.10"]),
        ("[1_000, 007,2.0,P1]", ["1_000", "007", "2.0", "P1"]),
        ("[+5,1e3,nan,true,2]", ["+5", "1e3", "nan", "true", "2"]),
        ('["1.10",a]', ["1.10", "a"]),
    ],
)
def test_patients_are_those_that_were_typed(typed: str, patients: list[str]) -> None:
    config = parse(compose("train", with_texts([*DICOM, f"data.val_patients={typed}"], Config)))
    assert config.plain()["data"]["val_patients"] == patients
    mixed = ["data=mixed", "data.sources.slices.root=/ct", "data.sources.slices.split=explicit"]
    config = parse(compose("train", with_texts([*mixed, f"data.sources.slices.val_patients={typed}"], Config)))
    assert config.plain()["data"]["sources"]["slices"]["val_patients"] == patients


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (
            "train",
            "data.root data.include data.cache_dir tags monitor finetune resume logger.wandb.project hydra.run.dir",
        ),
        ("plan", "data.root tags device"),
        ("doctor", "data.root"),
        ("evaluate", "run trust data.root"),
        ("robustness", "run noises logger.wandb.entity"),
        ("compare", "sweep output"),
        ("reconstruct", "run input output"),
        ("export", "run output"),
        ("calibrate", "input output air"),
    ],
)
def test_every_key_of_text(command: str, keys: str) -> None:
    assert {*keys.split()} <= _keys_of_texts(SCHEMAS[command]).keys()
    assert with_texts([f"{key}=1.10" for key in keys.split()], SCHEMAS[command]) == [
        f'{key}="1.10"' for key in keys.split()
    ]


def test_every_command_has_a_class() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} - {"wandb_sweep"} == SCHEMAS.keys()


def test_other_words_stay() -> None:
    words = ["~data.root", "model.channels=1.10", "tags=[a b]"]
    assert with_texts(words, Config) == words


@pytest.mark.parametrize(
    "word",
    ["data.root=1.1", "data.val_patients=[1.1]", "data.include=2.0", "tags=[1.1]", "logger.wandb.name=1.1",
     "geometry.name=1.5", "monitor=1.5", "resume=1.5", "finetune=1.5"],
)  # fmt: skip
def test_a_number_in_place_of_text_is_refused(word: str) -> None:
    """As from a file of the user's, in which quotes are missing."""
    with pytest.raises(
        ConfigError, match=rf"^{word.lstrip('+').partition('=')[0]}=.* should be text, .* put quotes around"
    ):
        parse(compose("train", [*DICOM, word]))


def test_an_argument_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_loss.py").write_text("def loss(image, truth, name: str, names: list[str] | None = None): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = ["loss=custom", "loss._target_=named_loss.loss"]
    for word in ("+loss.name=1.10", "+loss.name=a +loss.names=[1.10]"):
        with pytest.raises(ConfigError, match="should be text, but was read as a number: put quotes around it"):
            parse(compose("train", [*mine, *word.split()]))
