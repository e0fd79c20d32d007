"""Metrics as the command line names them."""

from pathlib import Path

import pytest

from qnmixer.engine.config import parse, to_plain, without_places
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.named import MetricConfig, modes_of
from qnmixer.engine.config.run import parse_file
from qnmixer.errors import ConfigError

MINE = "+metrics.mine._target_=collections.Counter"


def named(*overrides: str) -> dict[str, MetricConfig]:
    return parse(compose("train", list(overrides))).metrics


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], ["psnr", "ssim"]),
        (["metrics=rmse_hu"], ["psnr", "ssim", "rmse_hu"]),
        (["metrics=[default,rmse_hu]"], ["psnr", "ssim", "rmse_hu"]),
        (["~metrics.ssim"], ["psnr"]),
        (["metrics.ssim=null"], ["psnr"]),
        ([MINE, "experiment=demo"], ["psnr", "ssim", "mine"]),
    ],
)
def test_metrics_are_chosen_added_and_dropped(overrides: list[str], names: list[str]) -> None:
    assert [*named(*overrides)] == names


def test_arguments_stand_beside_our_keys_and_survive() -> None:
    words = [MINE, "+metrics.mine.mode=min", "+metrics.mine.in_hu=true", "+metrics.mine.width=5", "monitor=val/mine"]
    config = parse(compose("train", words))
    assert config.metrics["mine"] == MetricConfig(
        _target_="collections.Counter", mode="min", in_hu=True, arguments={"width": 5}
    )
    assert parse(to_plain(config)) == config
    assert modes_of(config.metrics) == {"val/psnr": "max", "val/ssim": "max", "val/mine": "min", "val/loss": "min"}


def test_a_config_for_sharing_needs_no_metric_of_ones_own() -> None:
    shared = without_places(parse(compose("train", [MINE, "monitor=val/mine", "metrics=rmse_hu"])))
    assert [*parse_file(to_plain(shared)).metrics] == ["psnr", "ssim", "rmse_hu"]


def test_configs_from_before_there_were_metrics_have_psnr_and_ssim() -> None:
    plain = to_plain(parse(compose("train", ["monitor=val/ssim"])))
    del plain["metrics"]
    assert parse(plain).metrics == named()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["monitor=val/rmse"],
            "choose val/psnr, val/ssim, val/loss, or add a metric: +metrics.rmse._target_=my_file.rmse",
        ),
        (["monitor=val/rmse", "metrics=rmse_hu"], "monitor=val/rmse is not known: did you mean val/rmse_hu?"),
        (["~metrics.psnr"], "monitor=val/psnr is not known: choose val/ssim, val/loss"),
        (["+metrics.mine.width=5"], "metrics.mine names no metric: give +metrics.mine._target_=my_file.my_metric"),
        (["+metrics.mine=5"], "metrics.mine names no metric"),
        (["+metrics.loss._target_=a.b"], "metrics.loss: there is a column loss already"),
        (["+metrics.mine._target_=my_fil.mine"], "there is no module my_fil: put my_fil.py into the folder"),
        ([MINE, "+metrics.mine._args_=[1]"], "metrics.mine._args_ is not known"),
        ([MINE, "+metrics.mine.mode=mini"], "metrics.mine.mode=mini is not known: did you mean min?"),
        ([MINE, "+metrics.mine.in_hu=3.5"], "metrics.mine.in_hu=3.5 is neither true nor false"),
    ],
)
def test_a_metric_that_cannot_be_is_one_line(
    overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        named(*overrides)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1
