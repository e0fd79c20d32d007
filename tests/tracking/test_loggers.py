import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wandb

from qnmixer.engine.config import Config, parse
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import parse_file
from qnmixer.engine.tracking import loggers as room
from qnmixer.engine.tracking.loggers import DONE, FAILED, INTERRUPTED, build_loggers, close_loggers, log_checkpoint
from qnmixer.engine.tracking.metrics_file import MetricsFile, read_metrics
from qnmixer.engine.tracking.results import PACKAGES, git_commit
from qnmixer.engine.tracking.sweep_file import SWEEP
from qnmixer.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_wandb")
OfflineRuns = Callable[[Path], list[Any]]
CPU = ["trainer.accelerator=cpu", "trainer.devices=1"]


def config_of(*overrides: str) -> Config:
    return parse(compose("train", [*CPU, *overrides]))


OFFLINE = config_of()


def run_in(folder: Path, *steps: int, config: Config = OFFLINE, exit_code: int = DONE, **options: Any) -> None:
    """A run, or a part of one, that logs its folder's name and does nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for_each = build_loggers(config, folder, options.pop("overrides", []), **options)
    for step in steps:
        for logger in for_each:
            logger.log_metrics({f"of/{folder.name}": step}, step)
    close_loggers(config.logger, exit_code)
    assert wandb.run is None


@pytest.mark.parametrize("overrides", [["logger=csv"], ["logger.wandb.mode=disabled"]], ids=" ".join)
def test_without_wandb_there_is_metrics_csv(tmp_path: Path, overrides: list[str]) -> None:
    (logger,) = build_loggers(config_of(*overrides), tmp_path, [])
    assert isinstance(logger, MetricsFile)
    assert not list(tmp_path.iterdir())
    close_loggers(config_of(*overrides).logger, DONE)


def test_other_ranks_have_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert [type(logger) for logger in build_loggers(OFFLINE, tmp_path, [])] == [MetricsFile]
    assert wandb.run is None
    assert not list(tmp_path.iterdir())


def test_jobs_of_a_sweep_are_runs_of_one_group(tmp_path: Path, offline_runs: OfflineRuns) -> None:
    """One process, one job after the other; what one logs is in no other."""
    sweep = tmp_path / "12-00-00-sweep"
    sweep.mkdir()
    varied = ["optimizer.lr=1,2,3", "seed=1"]
    said = {"overrides": varied, "varying": ["optimizer.lr"], "git_commit": None, "jobs": None}
    (sweep / SWEEP).write_text(json.dumps(said))
    codes = (DONE, FAILED, INTERRUPTED)
    for k, code in enumerate(codes):
        overrides = ["seed=1", f"optimizer.lr={k + 1}"]
        run_in(sweep / str(k), 1, 2, config=config_of(*overrides), overrides=overrides, exit_code=code)
    runs = offline_runs(tmp_path)
    assert len({run.id for run in runs}) == len(runs) == 3
    assert [run.name for run in runs] == [f"optimizer.lr={k + 1}" for k in range(3)]
    assert {run.group for run in runs} == {"12-00-00-sweep"}
    assert [run.exit_code for run in runs] == list(codes)
    for k, run in enumerate(runs):
        assert run.metrics == {f"of/{k}", "trainer/global_step"}
        assert [(row["_step"], row[f"of/{k}"]) for row in run.history] == [(1, 1), (2, 2)]
        assert run.config["optimizer"]["lr"] == k + 1
        assert run.config["effective_batch"] == run.config["data"]["batch_size"]
        assert run.config["git_commit"] == git_commit()
        assert set(run.config["versions"]) == {"python", *PACKAGES}
        assert run.config["n_devices"] == 1
        assert len(run.config["device"]) > 2


def test_names_that_are_given_come_first_and_a_run_by_itself_has_its_time(
    tmp_path: Path, offline_runs: OfflineRuns
) -> None:
    run_in(tmp_path / "2026-01-31" / "12-00-00", 1)
    run_in(tmp_path / "anna" / "time2", 1, config=config_of("logger.wandb.run_name=mine", "logger.wandb.group=ours"))
    first, second = offline_runs(tmp_path)
    assert (first.name, first.group) == ("qn_mixer-phantoms-32views-seed42-2026-01-31/12-00-00", None)
    assert (second.name, second.group) == ("mine", "ours")


def test_tags_say_what_a_run_is(tmp_path: Path, offline_runs: OfflineRuns) -> None:
    """The user's own first, none twice; a word of a class of the user's own may be too long for W&B."""
    overrides = ["experiment=demo", "tags=[mine,demo]", f"model._target_={'m' * 70}.Net", "data=numpy", "data.root=/ct"]
    config = config_of(*(it for it in overrides if "_target_" not in it))
    config.model._target_ = overrides[2].partition("=")[2]
    words = room._tags(config, overrides)
    assert words == ["mine", "demo", "m" * 64, "numpy", "single"]
    run_in(tmp_path / "a", 1, config=config_of("model=learn"), overrides=["model=learn", "experiment=null"])
    (run,) = offline_runs(tmp_path)
    assert run.tags == ["learn", "phantoms", "single"]
    assert run.config["method"] == "LEARN"


def test_a_resumed_run_is_the_same_wandb_run_and_logs_nothing_twice(tmp_path: Path, offline_runs: OfflineRuns) -> None:
    """Steps 3 and 4 were done after the checkpoint, and are done again."""
    run_in(tmp_path / "a", 1, 2, 3, 4, exit_code=INTERRUPTED)
    time.sleep(1)  # wandb names folders by the second
    run_in(tmp_path / "a", 3, resumed_at=2, exit_code=INTERRUPTED)
    time.sleep(1)
    run_in(tmp_path / "a", 3, 4, 5, resumed_at=2)
    first, between, second = offline_runs(tmp_path)
    assert not between.history
    assert first.id == second.id
    assert [row["_step"] for row in first.history] == [1, 2, 3, 4]
    assert [row["_step"] for row in second.history] == [5]
    assert [row["step"] for row in read_metrics(tmp_path / "a" / "metrics.csv")] == ["1", "2", "3", "4", "5"]


_KILLED = """
import os, signal, sys, time
from pathlib import Path
from qnmixer.engine.config import parse
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import parse_file
from qnmixer.engine.tracking.loggers import build_loggers
config = parse(compose("train", ["trainer.accelerator=cpu", "trainer.devices=1"]))
loggers = build_loggers(config, Path(sys.argv[1]), [])
for step in range(1, 5):
    for logger in loggers:
        logger.log_metrics({"of/a": step}, step)
time.sleep(1.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_lacks_no_row_in_wandb(tmp_path: Path, offline_runs: OfflineRuns) -> None:
    """Its checkpoint is of its last step, which the resumed run does not repeat."""
    folder = tmp_path / "a"
    folder.mkdir()
    alone = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(folder)], env=alone, check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    run_in(folder, 5, resumed_at=4)
    first, second = offline_runs(tmp_path)
    rows = {row["_step"]: row["of/a"] for row in [*first.history, *second.history]}
    assert rows == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}


def test_a_resumed_run_that_ends_earlier_has_its_test_in_wandb(tmp_path: Path, offline_runs: OfflineRuns) -> None:
    """W&B knows step 3 already, but not of a last validation and a test."""
    run_in(tmp_path / "a", 1, 2, 3, 4, exit_code=INTERRUPTED)
    time.sleep(1)
    loggers = build_loggers(OFFLINE, tmp_path / "a", [], resumed_at=2)
    for logger in loggers:
        logger.log_metrics({"of/a": 3}, 3)
        logger.finalize("success")  # by Lightning, when training has ended
        logger.log_metrics({"val/psnr_best": 30.0}, 3)
        logger.log_metrics({"test/psnr": 31.0}, 3)
    close_loggers(OFFLINE.logger, DONE)
    second = offline_runs(tmp_path)[1]
    assert second.summary["test/psnr"] == 31.0
    assert second.summary["val/psnr_best"] == 30.0
    assert [(row["_step"], row["trainer/global_step"]) for row in second.history] == [(6, 3)]


def test_a_resumed_run_can_start_to_use_wandb(tmp_path: Path, offline_runs: OfflineRuns) -> None:
    run_in(tmp_path / "a", 1, 2, 3, config=config_of("logger=csv"))
    run_in(tmp_path / "a", 2, 3, 4, resumed_at=1)
    (run,) = offline_runs(tmp_path)
    assert [row["_step"] for row in run.history] == [2, 3, 4]


def test_a_new_run_in_an_old_folder_is_another(tmp_path: Path, offline_runs: OfflineRuns) -> None:
    run_in(tmp_path / "a", 1)
    time.sleep(1)
    run_in(tmp_path / "a", 1)
    first, second = offline_runs(tmp_path)
    assert first.id != second.id


def test_changes_of_the_code_and_the_checkpoint_go_with_the_run(tmp_path: Path, offline_runs: OfflineRuns) -> None:
    (tmp_path / "code.diff").write_text("+ a line\n")
    (tmp_path / "best.ckpt").write_bytes(b"weights")
    config = config_of("logger.wandb.log_checkpoint=true", "logger.wandb.log_code=true")
    loggers = build_loggers(config, tmp_path, [])
    log_checkpoint(loggers, tmp_path / "best.ckpt", {"val/psnr": 30.0})
    close_loggers(config.logger, DONE)
    (run,) = offline_runs(tmp_path)
    assert (run.folder / "files" / "code.diff").read_text() == "+ a line\n"
    (artifact,) = [record["artifact"] for record in run.records if record["type"] == "artifact"]
    assert artifact["name"] == f"model-{run.id}"
    assert artifact["manifest"]["contents"][0]["path"] == "best.ckpt"


def test_changes_of_the_code_stay_here_unless_asked_for(tmp_path: Path, offline_runs: OfflineRuns) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "code.diff").write_text("+ a line\n")
    run_in(tmp_path / "a", 1)
    (run,) = offline_runs(tmp_path)
    assert not [*run.folder.rglob("code.diff")]


def test_a_logger_gets_nothing_of_the_machine_and_the_patients() -> None:
    words = [
        "data=numpy", "data.root=/home/anna/ct", "data.split=explicit", "data.test_patients=[anna]",
        "finetune=/home/anna/run", "noise=custom", "noise._target_=collections.Counter", "+noise.a=[/home/anna/b.pt]",
    ]  # fmt: skip
    config = parse_file(compose("train", [*CPU, *words]))
    told = room._described(config)
    assert "anna" not in str(told)
    assert told["noise"]["a"] == ["…/b.pt"]


def test_wandb_says_nothing_and_leaves_the_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = set(os.environ)
    run_in(tmp_path / "a", 1, 2)
    assert set(os.environ) - before <= {"WANDB_SERVICE"}  # where its own process listens
    assert capfd.readouterr() == ("", "")


def online() -> Config:
    return config_of("logger.wandb.mode=online")


def test_online_shows_the_address_and_sends_everything(
    tmp_path: Path, wandb_server: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run_in(tmp_path / "d" / "a", 1, 2, 3, config=online(), exit_code=INTERRUPTED)
    ((run_id, run),) = wandb_server.runs.items()
    assert run["name"].endswith("-seed42-a")
    assert [row["of/a"] for row in run["history"]] == [1, 2, 3]
    assert run["exit_code"] == INTERRUPTED
    assert capfd.readouterr() == (f"W&B: {wandb_server.url}/me/p/runs/{run_id}\n", "")


def test_a_network_that_goes_is_a_warning(
    tmp_path: Path, wandb_server: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What had not arrived is in the run folder."""
    monkeypatch.setattr(room, "_SECONDS_TO_FINISH", 3)
    loggers = build_loggers(online(), tmp_path, [])
    loggers[1].log_metrics({"a": 1.0}, 1)
    wandb_server.leave()
    start = time.monotonic()
    for step in range(2, 200):
        loggers[1].log_metrics({"a": 1.0}, step)
    assert time.monotonic() - start < 1  # training does not wait
    with pytest.warns(UserWarning, match="did not get all data.* wandb sync --include-online ") as warned:
        close_loggers(online().logger, DONE)
    assert time.monotonic() - start < 8
    folder = Path(str(warned[0].message).split()[-1])
    tool = [str(Path(sys.executable).with_name("wandb")), *str(warned[0].message).split("wandb ")[-1].split()]
    told = subprocess.run([*tool, "--dry-run"], check=True, capture_output=True, text=True, timeout=60).stderr
    assert "Would sync 1 run" in told
    assert list(folder.glob("run-*.wandb"))
    assert wandb.run is None
    assert capfd.readouterr().err == ""


def test_an_unreachable_server_makes_the_run_an_offline_one(
    tmp_path: Path, wandb_server: Any, monkeypatch: pytest.MonkeyPatch, offline_runs: OfflineRuns
) -> None:
    wandb_server.leave()
    monkeypatch.setattr(room, "_SECONDS_TO_START", 2)
    start = time.monotonic()
    with pytest.warns(UserWarning, match="W&B cannot be reached.* continues offline.* wandb sync"):
        run_in(tmp_path, 1, config=online())
    assert time.monotonic() - start < 8
    (run,) = offline_runs(tmp_path)
    assert run.exit_code == DONE
    assert not list(tmp_path.glob("wandb/run-*/*.wandb"))


def test_a_missing_key_is_an_error_that_says_how_to_fix_it(
    tmp_path: Path, wandb_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(ConfigError, match=r"`wandb login` once, or work offline with logger"):
        build_loggers(online(), tmp_path, [])
    assert wandb.run is None
