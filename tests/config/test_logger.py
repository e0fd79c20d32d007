"""Loggers as the command line names them, tags, and what is this machine's."""

import shutil
from pathlib import Path

import pytest

from qnmixer.config import LightningLoggerConfig, parse, to_plain
from qnmixer.config import compose as composing
from qnmixer.config.compose import CONF, compose
from qnmixer.config.logger import check_logger
from qnmixer.errors import ConfigError


def test_a_logger_is_a_class_and_its_arguments() -> None:
    config = parse(compose("train", ["logger=custom", "logger._target_=collections.Counter", "+logger.key=3"]))
    assert config.logger == LightningLoggerConfig(name="custom", _target_="collections.Counter", arguments={"key": 3})
    assert parse(to_plain(config)) == config


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qnmixer.config.logger.find_spec", lambda name: None)
    for name in ("tensorboard", "mlflow"):
        with pytest.raises(ConfigError, match=f"^logger={name} needs a package .*: pip install {name}$"):
            check_logger(parse(compose("train", [f"logger={name}"])).logger)
    check_logger(parse(compose("train", [])).logger)


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
    (conf / "local" / "default.yaml").write_text("# @package _global_\nseed: 7\nlogger: {entity: us}\n")
    config = parse(compose("train", []))
    assert (config.seed, to_plain(config)["logger"]["entity"]) == (7, "us")
    assert parse(compose("train", ["seed=8"])).seed == 8
