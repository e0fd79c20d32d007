"""Callbacks as the command line names them."""

from pathlib import Path

import pytest

from qnmixer.engine.config import parse, to_plain
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.named import CallbackConfig
from qnmixer.errors import ConfigError


def named(*overrides: str) -> dict[str, CallbackConfig]:
    return parse(compose("train", list(overrides))).callbacks


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], {"pictures"}),
        (["callbacks=early_stopping"], {"pictures", "early_stopping"}),
        (["callbacks=[early_stopping,lr_monitor]"], {"pictures", "early_stopping", "lr_monitor"}),
        (["~callbacks.pictures"], set()),
        (["callbacks=none"], set()),
        (["callbacks.pictures=null"], set()),
        (["+callbacks.mine._target_=collections.Counter"], {"pictures", "mine"}),
    ],
)
def test_callbacks_are_chosen_added_and_dropped(overrides: list[str], names: set[str]) -> None:
    assert named(*overrides).keys() == names


def test_arguments_stand_beside_the_class_and_survive() -> None:
    mine = ["+callbacks.mine._target_=collections.Counter", "+callbacks.mine.every=5"]
    assert named(*mine)["mine"] == CallbackConfig(_target_="collections.Counter", arguments={"every": 5})
    config = parse(compose("train", mine))
    assert parse(to_plain(config)) == config


def test_configs_from_before_there_were_callbacks_are_read() -> None:
    plain = to_plain(parse(compose("train", [])))
    del plain["callbacks"]
    assert parse(plain).callbacks == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+callbacks.mine.every=5", "callbacks.mine names no class: give +callbacks.mine._target_=my_file.MyClass"),
        ("+callbacks.mine=5", "callbacks.mine names no class"),
        ("+callbacks.mine._target_=my_fil.Mine", "there is no module my_fil: put my_fil.py into the folder"),
        ("+callbacks.pictures._args_=[1]", "callbacks.pictures._args_ is not known"),
    ],
)
def test_a_target_that_is_no_callback_is_refused_before_anything_is_loaded(
    override: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        named(override)
    assert message in str(error.value)
