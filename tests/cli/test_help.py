import pytest

from qnmixer.engine.cli.help import usage
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.keys import flat_keys
from qnmixer.engine.config.search_path import CONF

COMMANDS = {
    "train": [],
    "evaluate": ["run=x"],
    "reconstruct": ["run=x", "input=y", "output=z"],
    "export": ["run=x", "output=y.safetensors"],
    "plan": [],
    "doctor": [],
}


def help_of(name: str, *overrides: str) -> list[str]:
    return usage(compose(name, list(overrides), with_hydra=True), CONF, name).splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_key_is_there_and_how_to_begin_comes_first(name: str) -> None:
    lines = help_of(name, *COMMANDS[name])
    assert any(line.startswith(f"python -m qnmixer.{name} ") for line in lines[:5])
    shown = {line.split("=")[0].strip() for line in lines[lines.index("") :] if "=" in line}
    values = compose(name, COMMANDS[name])
    leaves = {key for key in flat_keys(dict(values)) if "." in key and not key.endswith((".name", "._target_"))}
    assert leaves <= shown


def test_what_a_key_means_is_said_beside_it() -> None:
    lines = help_of("train", "data=dicom", "data.root=/ct", "trainer.devices=1")
    (split,) = [line for line in lines if line.startswith("  data.split=random ")]
    assert "by patient" in split
    (devices,) = [line for line in lines if line.startswith("  trainer.devices=1 ")]
    assert "null: all GPUs" in devices


def test_options_say_what_they_trade_and_which_is_chosen() -> None:
    lines = help_of("train", "memory=recompute")
    (chosen,) = [line for line in lines if line.startswith("  memory=recompute *")]
    assert "memory hardly grows with T" in chosen
    assert [line for line in lines if line.startswith("  memory=keep  ")]
    assert not [line for line in lines if "as_trained" in line or "data=_" in line]
    assert [line for line in help_of("evaluate", "run=x") if line.startswith("  data=as_trained *")]


def test_each_option_has_one_sentence_that_is_not_cut() -> None:
    lines = help_of("train")
    start = lines.index("GROUPS (* is the current choice)") + 1
    options = lines[start : lines.index("", start)]
    assert len(options) > 40
    for line in options:
        assert len(line) <= 120, line
        assert line[35:], line
        assert not line.endswith("…"), line
    (unet,) = [line for line in options if line.startswith("  model=fbpconvnet ")]
    assert "(Jin et al. 2017): a residual U-Net on FBP" in unet
