"""Callbacks, loggers and metrics as the command line names them, and settings of this machine."""

import shutil
from pathlib import Path

import pytest

from qnmixer.engine.config import compose as composing
from qnmixer.engine.config import parse, to_plain, without_places
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.named import CallbackConfig, LoggerConfig, MetricConfig, modes_of
from qnmixer.engine.config.run import parse_file
from qnmixer.engine.config.search_path import CONF
from qnmixer.errors import ConfigError

METRIC, CALLBACK = "+metrics.mine._target_=collections.Counter", "+callbacks.mine._target_=collections.Counter"
LOGGER = ["logger._target_=collections.Counter", "+logger.key=3"]


@pytest.mark.parametrize(
    ("group", "overrides", "names"),
    [
        ("callbacks", [], ["pictures"]),
        ("callbacks", ["callbacks=[early_stopping,lr_monitor]"], ["early_stopping", "lr_monitor", "pictures"]),
        ("callbacks", ["~callbacks.pictures"], []),
        ("callbacks", ["callbacks=none"], []),
        ("callbacks", ["callbacks.pictures=null"], []),
        ("metrics", ["metrics=[default,rmse_hu]"], ["psnr", "rmse_hu", "ssim"]),
        ("metrics", ["~metrics.ssim"], ["psnr"]),
        ("metrics", [METRIC, "experiment=demo"], ["mine", "psnr", "ssim"]),
        ("logger", ["logger=[wandb,mlflow]"], ["mlflow", "wandb"]),
        ("logger", ["logger=[wandb,custom]", *LOGGER], ["custom", "wandb"]),
        ("logger", ["+logger.mine._target_=collections.Counter"], ["mine", "wandb"]),
        ("logger", ["logger=[csv,wandb]", "~logger.wandb"], ["csv"]),
        ("logger", ["logger=[]"], []),
        ("logger", ["~logger"], []),
    ],
)
def test_they_are_chosen_added_and_dropped(group: str, overrides: list[str], names: list[str]) -> None:
    config = parse(compose("train", overrides))
    assert sorted(getattr(config, group)) == names
    assert parse(to_plain(config)) == config


def test_arguments_stand_beside_our_keys() -> None:
    of_metric = [METRIC, "+metrics.mine.mode=min", "+metrics.mine.in_hu=true", "+metrics.mine.width=5"]
    config = parse(compose("train", [*of_metric, "monitor=val/mine", CALLBACK, "+callbacks.mine.every=5",
                                     "logger=custom", *LOGGER]))  # fmt: skip
    counter = "collections.Counter"
    assert config.metrics["mine"] == MetricConfig(_target_=counter, mode="min", in_hu=True, arguments={"width": 5})
    assert config.callbacks["mine"] == CallbackConfig(_target_=counter, arguments={"every": 5})
    assert config.logger == {"custom": LoggerConfig(_target_=counter, arguments={"key": 3})}
    assert parse(to_plain(config)) == config
    assert modes_of(config.metrics) == {"val/psnr": "max", "val/ssim": "max", "val/mine": "min", "val/loss": "min"}
    shared = parse_file(to_plain(without_places(config)))  # needs nothing of the user's own
    assert ([*shared.metrics], shared.callbacks, shared.logger) == (["psnr", "ssim"], {}, {})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("+callbacks.mine.every=5", "callbacks.mine names no class: give +callbacks.mine._target_=my_file.MyClass"),
        ("+callbacks.mine=5", "callbacks.mine names no class"),
        ("+callbacks.mine._target_=my_fil.Mine", "there is no module my_fil: put my_fil.py into the folder"),
        ("+callbacks.pictures._args_=[1]", "callbacks.pictures._args_ is not known"),
        ("+logger.mine.key=3", "logger.mine names no class: give +logger.mine._target_=my_file"),
        ("+logger.key=3", "logger.key names no class: give +logger.key._target_=my_file"),
        (
            "monitor=val/rmse",
            "val/psnr, val/ssim, val/loss, or add a metric: +metrics.rmse._target_=my_file.rmse",
        ),
        ("monitor=val/rmse metrics=rmse_hu", "monitor=val/rmse is not known: did you mean val/rmse_hu?"),
        ("~metrics.psnr", "monitor=val/psnr is not known: choose val/ssim, val/loss"),
        ("+metrics.mine.width=5", "metrics.mine names no metric: give +metrics.mine._target_=my_file.my_metric"),
        ("+metrics.loss._target_=a.b", "metrics.loss: there is a column loss already"),
        (f"{METRIC} +metrics.mine.mode=mini", "metrics.mine.mode=mini is not known: did you mean min?"),
        (f"{METRIC} +metrics.mine.in_hu=3.5", "metrics.mine.in_hu=3.5 is neither true nor false"),
    ],
)
def test_what_cannot_be_is_one_line(
    overrides: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        parse(compose("train", overrides.split()))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_what_is_this_machines_is_under_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf, ignore=shutil.ignore_patterns("local"))
    monkeypatch.setattr(composing, "CONF", conf)
    (conf / "local").mkdir()
    (conf / "local" / "default.yaml").write_text("# @package _global_\nseed: 7\nlogger: {wandb: {entity: us}}\n")
    config = parse(compose("train", []))
    assert (config.seed, to_plain(config)["logger"]["wandb"]["entity"]) == (7, "us")
    assert [*parse(compose("train", ["logger=csv"])).logger] == ["csv"]  # its settings of another logger
