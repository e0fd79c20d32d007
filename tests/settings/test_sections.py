"""Callbacks, loggers and metrics as the command line names them, and settings of this machine."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from qnmixer.runs.public_config import without_places
from qnmixer.settings import compose as composing
from qnmixer.settings.options import CONF
from qnmixer.settings.parts import CallbackConfig, LoggerConfig, MetricConfig, OptimizerConfig, modes_of
from qnmixer.settings.run import parse, parse_file, section

from ..conftest import config_of

METRIC, CALLBACK = "+metrics.mine._target_=collections.Counter", "+callbacks.mine._target_=collections.Counter"
LOGGER = ["logger._target_=collections.Counter", "+logger.key=3"]


@pytest.mark.parametrize(("group", "overrides", "names"), [
    ("callbacks", ["callbacks=[early_stopping,lr_monitor]"], ["early_stopping", "lr_monitor", "pictures"]),
    ("callbacks", ["~callbacks.pictures"], []),
    ("callbacks", ["callbacks=none"], []),
    ("callbacks", ["callbacks.pictures=null"], []),
    ("metrics", ["metrics=[default,rmse_hu]"], ["psnr", "rmse_hu", "ssim"]),
    ("metrics", [METRIC, "~metrics.ssim", "experiment=demo"], ["mine", "psnr"]),
    ("logger", ["logger=[wandb,custom]", *LOGGER], ["custom", "wandb"]),
    ("logger", ["+logger.mine._target_=collections.Counter"], ["mine", "wandb"]),
    ("logger", ["logger=[csv,wandb]", "~logger.wandb"], ["csv"]),
    ("logger", ["~logger"], []),
])  # fmt: skip
def test_they_are_chosen_added_and_dropped(group: str, overrides: list[str], names: list[str]) -> None:
    config = config_of(*overrides)
    assert sorted(getattr(config, group)) == names
    assert parse(config.plain()) == config


def test_arguments_stand_beside_our_keys() -> None:
    of_metric = [METRIC, "+metrics.mine.mode=min", "+metrics.mine.in_hu=true", "+metrics.mine.width=5"]
    config = config_of(*of_metric, "monitor=val/mine", CALLBACK, "+callbacks.mine.every=5",
                                     "logger=custom", *LOGGER)  # fmt: skip
    counter = "collections.Counter"
    assert config.metrics["mine"] == MetricConfig(_target_=counter, mode="min", in_hu=True, width=5).at("metrics.mine")
    assert config.callbacks["mine"] == CallbackConfig(_target_=counter, every=5).at("callbacks.mine")
    assert config.logger == {"custom": LoggerConfig(_target_=counter, key=3).at("logger")}
    assert modes_of(config.metrics) == {"val/psnr": "max", "val/ssim": "max", "val/mine": "min", "val/loss": "min"} | {
        "val/residual": "min"
    }
    shared = parse_file(without_places(config).plain())  # needs nothing of the user's own
    assert ([*shared.metrics], shared.callbacks, shared.logger) == (["psnr", "ssim"], {}, {})


def test_what_is_this_machines_is_under_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf, ignore=shutil.ignore_patterns("local"))
    monkeypatch.setattr(composing, "CONF", conf)
    (conf / "local").mkdir()
    (conf / "local" / "default.yaml").write_text("# @package _global_\nseed: 7\nlogger: {wandb: {entity: us}}\n")
    config = config_of()
    assert (config.seed, config.plain()["logger"]["wandb"]["entity"]) == (7, "us")
    assert [*config_of("logger=csv").logger] == ["csv"]  # its settings of another logger


@pytest.mark.parametrize(("keys", "lr", "weight_decay"), [
    ({"_target_": "torch.optim.NAdam"}, 2e-3, 0.0),
    ({"_target_": "torch.optim.AdamW"}, 1e-3, 0.01),
    ({"_target_": "torch.optim.AdamW", "lr": 0.5, "weight_decay": 0.25}, 0.5, 0.25),
    ({"_target_": "qnmixer.muon.Muon"}, 1e-3, 0.0),  # its class has none
])  # fmt: skip
def test_an_optimizer_of_ones_own_has_the_defaults_of_its_class_then_of_the_group(
    keys: dict[str, Any], lr: float, weight_decay: float
) -> None:
    optimizer = OptimizerConfig.model_validate(keys).checked()
    assert (optimizer.lr, optimizer.weight_decay) == (lr, weight_decay)
    assert (
        optimizer.step_size_lr_factor == section("optimizer", "custom", _target_="torch.optim.SGD").step_size_lr_factor
    )
    assert OptimizerConfig.model_validate(optimizer.plain()).checked() == optimizer  # as from a checkpoint
