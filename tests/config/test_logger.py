"""Loggers as the command line names them, tags, and settings of this machine."""

import shutil
from pathlib import Path

import pytest

from qnmixer.engine.config import compose as composing
from qnmixer.engine.config import parse, to_plain
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.named import LoggerConfig, check_loggers
from qnmixer.engine.config.search_path import CONF
from qnmixer.errors import ConfigError

MINE = ["logger._target_=collections.Counter", "+logger.key=3"]
COUNTER = LoggerConfig(_target_="collections.Counter", arguments={"key": 3})


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["logger=csv"], ["csv"]),
        (["logger=[wandb,mlflow]"], ["wandb", "mlflow"]),
        (["logger=[wandb,custom]", *MINE], ["wandb", "custom"]),
        (["+logger.mine._target_=collections.Counter"], ["wandb", "mine"]),
        (["logger=[csv,wandb]", "~logger.wandb"], ["csv"]),
        (["logger=[]"], []),
        (["~logger"], []),
    ],
)
def test_loggers_have_names(overrides: list[str], names: list[str]) -> None:
    config = parse(compose("train", overrides))
    assert [*config.logger] == names
    assert parse(to_plain(config)) == config


def test_a_logger_is_a_class_and_its_arguments() -> None:
    named = ["+logger.mine._target_=collections.Counter", "+logger.mine.key=3"]
    assert parse(compose("train", ["logger=custom", *MINE])).logger == {"custom": COUNTER}
    assert parse(compose("train", ["logger=csv", *named])).logger["mine"] == COUNTER


@pytest.mark.parametrize("override", ["+logger.mine.key=3", "+logger.key=3", "+logger.a.b.c=1"])
def test_a_logger_without_a_class_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"^logger\.\w+ names no class: give \+logger\.\w+\._target_=my_file"):
        parse(compose("train", override.split()))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qnmixer.engine.config.named.find_spec", lambda name: None)
    for name in ("tensorboard", "mlflow"):
        with pytest.raises(ConfigError, match=f"^logger={name} needs a package .*: pip install {name}$"):
            check_loggers(parse(compose("train", [f"logger=[csv,{name}]"])).logger)
    check_loggers(parse(compose("train", [])).logger)


def test_tags_are_words() -> None:
    assert parse(compose("train", ["tags=[paper,noise]"])).tags == ["paper", "noise"]
    plain = to_plain(parse(compose("train", [])))
    del plain["tags"]
    assert parse(plain).tags == []


def test_what_is_this_machines_is_under_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf, ignore=shutil.ignore_patterns("local"))
    monkeypatch.setattr(composing, "CONF", conf)
    (conf / "local").mkdir()
    (conf / "local" / "default.yaml").write_text("# @package _global_\nseed: 7\nlogger: {wandb: {entity: us}}\n")
    config = parse(compose("train", []))
    assert (config.seed, to_plain(config)["logger"]["wandb"]["entity"]) == (7, "us")
    assert [*parse(compose("train", ["logger=csv"])).logger] == ["csv"]
    assert parse(compose("train", ["seed=8"])).seed == 8
