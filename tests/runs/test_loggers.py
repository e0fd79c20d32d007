import json
import time
from pathlib import Path
from typing import Any

import pytest
import wandb

from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.fit import fit
from qnmixer.reconstruction.weights import find_checkpoint
from qnmixer.runs import loggers as room
from qnmixer.runs.loggers import (
    FAILURE,
    INTERRUPTION,
    SUCCESS,
    MetricsFile,
    build_loggers,
    close_loggers,
    without_folders,
)
from qnmixer.runs.records import SWEEP, read_metrics
from qnmixer.runs.run import Run, resume_overrides
from qnmixer.settings.compose import compose, values_of
from qnmixer.settings.error_lines import explain
from qnmixer.settings.run import Config, parse, parse_file

from ..conftest import offline_runs, tiny_config

pytestmark = pytest.mark.usefixtures("no_wandb")
CPU = ["trainer.accelerator=cpu", "trainer.devices=1"]


def config_of(*overrides: str) -> Config:
    return parse(compose("train", [*CPU, *overrides]))


OFFLINE = config_of()


def run_in(folder: Path, *steps: int, config: Config = OFFLINE, exit_code: int = SUCCESS, **options: Any) -> None:
    """A run, or a part of one, that logs its folder's name and does nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for_each = build_loggers(config, folder, options.pop("overrides", []), **options)
    for step in steps:
        for logger in for_each:
            logger.log_metrics({f"of/{folder.name}": step}, step)
    close_loggers(exit_code)
    assert wandb.run is None


@pytest.mark.parametrize("overrides", [["logger=csv"], ["logger.wandb.mode=disabled"], []], ids=str)
def test_without_wandb_and_on_other_ranks_there_is_metrics_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    if not overrides:
        for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
    config = config_of(*overrides)
    (logger,) = build_loggers(config, tmp_path, [])
    assert isinstance(logger, MetricsFile)
    close_loggers(SUCCESS)
    assert not list(tmp_path.iterdir())
    assert wandb.run is None


def test_a_sweep_is_one_group(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One process, one job after the other; what one logs is in no other. W&B says nothing."""
    sweep = tmp_path / "12-00-00-sweep"
    sweep.mkdir()
    said = {"overrides": [], "varying": ["optimizer.lr"], "jobs": None}
    (sweep / SWEEP).write_text(json.dumps(said))
    codes = (SUCCESS, FAILURE, INTERRUPTION)
    for k, code in enumerate(codes):
        overrides = ["seed=1", f"optimizer.lr={k + 1}"]
        run_in(sweep / str(k), 1, 2, config=config_of(*overrides), overrides=overrides, exit_code=code)
    assert capfd.readouterr() == ("", "")
    runs = offline_runs(tmp_path)
    assert [run.name for run in runs] == [f"optimizer.lr={k + 1}" for k in range(3)]
    assert {run.group for run in runs} == {"12-00-00-sweep"}
    assert [run.exit_code for run in runs] == list(codes)
    preempted = [any(record["type"] == "preempting" for record in run.records) for run in runs]
    assert preempted == [code == INTERRUPTION for code in codes]  # it can resume: W&B must not call it failed
    for k, run in enumerate(runs):
        assert run.metrics == {f"of/{k}", "trainer/global_step"}
        assert [(row["_step"], row[f"of/{k}"]) for row in run.history] == [(1, 1), (2, 2)]
        assert run.config["optimizer"]["lr"] == k + 1
        assert {"git_commit", "versions", "device"} <= run.config.keys()


def test_words_beat_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of WandbLogger and wandb.init, and W&B's variables, in the file that W&B writes."""
    place, there = tmp_path / "runs", tmp_path / "there"
    run_in(place / "2026-01-31" / "12-00-00", 1)
    variables = {"DIR": str(tmp_path / "wandb's"), "PROJECT": "mine", "NAME": "by hand", "TAGS": "paper, noise"}
    for name, value in (variables | {"ENTITY": "", "RUN_GROUP": "theirs", "NOTES": "because"}).items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    run_in(place / "a", 1, config=config_of("tags=[b]"), exit_code=INTERRUPTION)
    words = (
        "project=theirs name=typed group=ours job_type=check notes=why id=abc tags=[one,two] offline=true mode=online"
    )
    given = [f"logger.wandb.{word}" for word in [*words.split(), f"save_dir={there}"]]
    run_in(place / "b", 1, config=config_of(*given))
    assert [path.parents[2].name for path in place.rglob("*.wandb")] == ["12-00-00"]
    assert (there / "wandb").is_dir()
    alone, one, other = offline_runs(tmp_path)
    kept = [next(record["run"] for record in run.records if "run" in record) for run in (alone, one, other)]
    assert alone.name == "qn_mixer-phantoms-32views-seed42-2026-01-31/12-00-00"  # by itself it has its time as its name
    assert (alone.group, kept[0].get("notes")) == (None, None)
    assert (one.name, one.group, kept[1]["project"], kept[1]["notes"]) == ("by hand", "theirs", "mine", "because")
    assert one.tags[:4] == ["b", "paper", "noise", "qn_mixer"]
    keys = "project", "display_name", "run_group", "job_type", "notes", "run_id"
    assert [kept[2][key] for key in keys] == ["theirs", "typed", "ours", "check", "why", "abc"]
    assert other.tags[:2] == ["one", "two"]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    modes = [config_of(*words).logger["wandb"].mode for words in ([], ["logger.wandb.mode=online"])]
    assert modes == ["disabled", "online"]
    monkeypatch.setenv("WANDB_DISABLED", "true")
    assert [type(logger) for logger in build_loggers(config_of(*given), tmp_path / "c", [])] == [MetricsFile]


@pytest.mark.parametrize("value", ["TAGS=paper,", "TAGS=a,,b", "RESUME=bogus", "MODE=bogus", f"NAME={'n' * 129}"])
def test_a_variable_that_wandb_refuses_is_one_line_before_the_run(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, text = value.partition("=")
    monkeypatch.setenv(f"WANDB_{name}", text)
    with pytest.raises(ConfigError) as error:
        config_of()
    assert str(error.value).startswith(f"logger.wandb.{name.lower()}")


def test_a_variable_that_only_wandb_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb.teardown()  # it reads the environment once in a process
    monkeypatch.setenv("WANDB_CONSOLE", "bogus")
    with pytest.raises(ConfigError, match="W&B refuses WANDB_CONSOLE of the environment: Input should be 'auto'"):
        run_in(tmp_path / "a", 1)


def test_a_resumed_run_is_the_same_wandb_run_and_logs_nothing_twice(tmp_path: Path) -> None:
    """Step 4 was done after the checkpoint, and is done again. Another part ends at step 3, with its test.

    Then metrics.csv has no step above 3, but W&B has 4 and 5.
    """
    folder = tmp_path / "a"
    run_in(folder, 1, 2, 3, 4, config=config_of("logger=csv"), exit_code=INTERRUPTION)
    run_in(folder, 3, 4, resumed_at=2, exit_code=INTERRUPTION)  # W&B begins here
    time.sleep(1)  # wandb names folders by the second
    run_in(folder, 4, 5, resumed_at=3)
    time.sleep(1)
    loggers = build_loggers(OFFLINE, folder, [], resumed_at=2)
    for logger in loggers:
        logger.log_metrics({"of/a": 3}, 3)
        logger.log_metrics({"test/psnr": 31.0}, 3)
    close_loggers(SUCCESS)
    assert [row["step"] for row in read_metrics(folder / "metrics.csv")] == ["1", "2", "3", "3"]
    time.sleep(1)
    run_in(folder, 3, 4, 5, 6, resumed_at=2)
    time.sleep(1)
    run_in(folder, 1)  # a new run in an old folder
    first, second, third, fourth, new = offline_runs(tmp_path)
    assert {run.id for run in (second, third, fourth)} == {first.id} != {new.id}
    assert [[row["_step"] for row in run.history] for run in (first, second)] == [[3, 4], [4, 5]]
    assert [(row["_step"], row["test/psnr"]) for row in third.history] == [(5, 31.0)]
    assert [row["_step"] for row in fourth.history] == [5, 6]  # the last one may be missing after a kill


def test_a_logger_gets_nothing_of_the_machine_and_the_patients() -> None:
    words = [
        "data=numpy", "data.root=/home/anna/ct", "data.split=explicit", "data.test_patients=[anna]",
        "finetune=/home/anna/run", "noise=custom", "noise._target_=collections.Counter", "+noise.a=[/home/anna/b.pt]",
    ]  # fmt: skip
    told = room._described(parse_file(compose("train", [*CPU, *words])))
    assert "anna" not in str(told)
    assert told["noise"]["a"] == ["…/b.pt"]


def test_an_unreachable_server_makes_the_run_an_offline_one(
    tmp_path: Path, wandb_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb_server.leave()
    monkeypatch.setattr(room, "_SECONDS_TO_START", 1)
    start = time.monotonic()
    with pytest.warns(UserWarning, match="W&B cannot be reached.* continues offline.* wandb sync"):
        run_in(tmp_path, 1, config=config_of("logger.wandb.mode=online"))
    assert time.monotonic() - start < 8
    (run,) = offline_runs(tmp_path)
    assert (run.exit_code, [row["_step"] for row in run.history]) == (SUCCESS, [1])


def test_checkpoints_are_artifacts_from_which_runs_start(
    tmp_path: Path, wandb_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["logger=wandb", "logger.wandb.mode=online", "logger.wandb.log_model=true"]
    fit(tiny_config(*words), Run(Path("first")))
    artifact, *others = wandb_server.artifacts
    assert not others  # the last checkpoint is the best
    assert artifact.aliases == {"best", "latest"}
    name = f"me/p/{artifact.name}"
    first = (tmp_path / "first" / "checkpoints" / "best.ckpt").read_bytes()
    assert find_checkpoint(f"{name}:best").read_bytes() == first
    with pytest.raises(CheckpointError, match=r"me/p/model-x:best cannot be loaded from W&B .* after wandb login$"):
        find_checkpoint("me/p/model-x:best")

    fit(tiny_config(*words, f"finetune={name}:best"), Run(Path("second")))
    assert wandb_server.used == [0]
    overrides = resume_overrides([f"resume={name}:latest", "trainer.max_steps=6"])
    folder = Path(values_of(overrides)["hydra.run.dir"])
    assert folder.parent == Path("runs/wandb")
    fit(tiny_config(*words, "trainer.max_steps=6", f"resume={folder}"), Run(folder, resume=str(folder)))
    assert [int(row["step"]) for row in read_metrics(folder / "metrics.csv") if row["train/loss"]] == [1, 2, 3, 4, 5, 6]
    (steps, _) = ([row["_step"] for row in run["history"]] for run in wandb_server.runs.values())
    assert steps == [1, 2, 3, 4, 4, 5, 6]  # one run of W&B. The last row again, as it may be lost
    assert [artifact.aliases for artifact in wandb_server.artifacts[-1:]] == [{"best", "latest"}]


def test_each_checkpoint_is_an_artifact_offline_and_pictures_have_the_steps_of_the_run(tmp_path: Path) -> None:
    words = ["logger=wandb", "logger.wandb.log_model=all", "callbacks=default", "trainer.log_every_n_steps=3"]
    fit(tiny_config(*words), Run(tmp_path))
    (run,) = offline_runs(tmp_path)
    artifacts = [record["artifact"] for record in run.records if record["type"] == "artifact"]
    assert {artifact["name"] for artifact in artifacts} == {f"model-{run.id}"}
    assert [sorted(artifact["aliases"]) for artifact in artifacts][:1] == [["best", "latest"]]
    assert len(artifacts) >= 3  # two validations, and the end
    for artifact in artifacts:
        files = {file["path"]: Path(file["local_path"]) for file in artifact["manifest"]["contents"]}
        assert files.keys() == {"model.ckpt", "results.json", "metrics.csv"}
        assert all(path.is_relative_to(tmp_path) and path.is_file() for path in files.values())
    pictures = sorted(path.name for path in tmp_path.glob("wandb/offline-*/files/media/images/val/*.png"))
    assert [name.split("_")[1] for name in pictures] == ["2", "4"]


def test_a_missing_key_is_one_line(tmp_path: Path, wandb_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(wandb.errors.Error) as error:
        build_loggers(config_of("logger.wandb.mode=online"), tmp_path, [])
    assert str(explain(error.value, "train")).startswith("wandb: ")
    assert wandb.run is None


@pytest.mark.parametrize(("text", "shown"), [
    ("root: /home/anna/scans/mayo", "root: …/mayo"), ("data.root=/data/ct/a.dcm, x", "data.root=…/a.dcm, x"),
    ("/home/anna", "…/"), ("~anna/ct/mayo", "…/mayo"), ("C:\\Users\\anna\\ct\\mayo", "…/mayo"),
    ("file:///home/anna/mayo", "file://…/mayo"), ("and/or/not a/b/c.dcm 1/2", "and/or/not a/b/c.dcm 1/2"),
    ("</script><b>", "</script><b>"),
])  # fmt: skip
def test_paths_lose_their_folders(text: str, shown: str) -> None:
    assert without_folders(text) == shown
