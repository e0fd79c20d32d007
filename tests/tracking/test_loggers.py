import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from qnmixer.config import LoggerConfig, WandbConfig
from qnmixer.tracking.loggers import build_loggers, close_loggers


def offline(**options: Any) -> WandbConfig:
    return WandbConfig(
        **({"name": "wandb", "mode": "offline", "project": "p", "entity": None, "run_name": None} | options)
    )


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_metrics_csv_is_there_for_every_logger(tmp_path: Path) -> None:
    for config, kinds in ((LoggerConfig(name="csv"), [CSVLogger]), (offline(), [CSVLogger, WandbLogger])):
        loggers = build_loggers(config, tmp_path, {})
        assert [type(logger) for logger in loggers] == kinds
        assert Path(str(loggers[0].log_dir)) == tmp_path


def test_building_starts_no_run(tmp_path: Path) -> None:
    build_loggers(offline(), tmp_path, {})
    assert wandb.run is None
    assert not list(tmp_path.iterdir())


def test_closing_without_a_run_is_fine() -> None:
    close_loggers(LoggerConfig(name="csv"), 0)
    close_loggers(offline(), 1)


def inspect(folder: Path, *options: str) -> str:
    (run,) = folder.glob("wandb/offline-run-*/*.wandb")
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", *options, "--json", str(run)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_closed_run_says_how_it_ended_and_the_next_one_is_its_own(tmp_path: Path, exit_code: int) -> None:
    for number in (1, 2):
        folder = tmp_path / f"job{number}"
        folder.mkdir()
        loggers = build_loggers(offline(), folder, {"model": {"channels": 8 * number}})
        loggers[1].log_metrics({"train/loss": 0.5 * number}, step=1)
        close_loggers(offline(), exit_code)
        assert wandb.run is None
    for number in (1, 2):
        records = [json.loads(line) for line in inspect(tmp_path / f"job{number}").splitlines()]
        (ended,) = [record["exit"] for record in records if record["type"] == "exit"]
        assert ended.get("exit_code", 0) == exit_code
        history = json.dumps([record for record in records if record["type"] == "history"])
        assert "train/loss" in history
        summary = json.loads(inspect(tmp_path / f"job{number}", "--summary"))
        assert summary["config"]["model"]["channels"] == 8 * number
