import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.overrides import quoted, values_of
from qnmixer.engine.tracking.resume import latest, recorded_overrides, resume_hint, resume_overrides, resumes_in_place
from qnmixer.engine.tracking.run_folder import clean, run_lock
from qnmixer.errors import CheckpointError, ConfigError, PluginError

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make(name, *overrides, age=…, checkpoint=…, **results): a run folder under runs/ of the working directory."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *overrides: str, age: float = 0, checkpoint: bool = True, **results: Any) -> Path:
        folder = Path("runs") / name
        (folder / "checkpoints").mkdir(parents=True)
        paths = [folder / "results.json"]
        paths[0].write_text(json.dumps({"status": "interrupted", "overrides": overrides} | results))
        if checkpoint:
            paths += [folder / "checkpoints" / "last.ckpt", folder / "checkpoints" / "best.ckpt"]
        for path in paths:
            path.touch()
            os.utime(path, (1e9 - age, 1e9 - age))
        return folder

    return run


def test_without_resume_nothing_changes() -> None:
    for overrides in (["seed=1"], ["resume=null"], ["-m", "resume=latest"], ["resume=runs/a", "--help"]):
        assert resume_overrides(overrides) == overrides


def test_a_run_resumes_in_its_folder_with_its_own_overrides(make: Make) -> None:
    make("a", "seed=1", "trainer.max_steps=9")
    for path in ("runs/a", "runs/a/checkpoints/last.ckpt"):
        assert resume_overrides([f"resume={path}", "trainer.max_steps=20", "memory=recompute"]) == [
            "seed=1", "trainer.max_steps=20", "memory=recompute", f"resume={path}", "hydra.run.dir=runs/a",
        ]  # fmt: skip


def test_shipped_weights_are_no_run_to_go_on_with_but_a_folder_of_their_name_is(make: Make) -> None:
    with pytest.raises(CheckpointError, match=r"resume=pretrained names weights.* finetune=pretrained"):
        resume_overrides(["resume=pretrained"])
    make("a", "seed=1").rename("pretrained")
    assert resume_overrides(["resume=./pretrained"]) == ["seed=1", "resume=pretrained", "hydra.run.dir=pretrained"]


@pytest.mark.parametrize(
    ("override", "value"),
    [("seed=1", "1"), ("+a.b='x y'", "x y"), ('a.b="x=y"', "x=y"), (r"a.b='it\'s'", "it's"), ("a.b=", "")],
)
def test_values_are_those_that_hydra_reads(override: str, value: str) -> None:
    assert [*values_of([override]).values()] == [value]


def test_the_last_of_two_values_counts(make: Make) -> None:
    make("a", "seed=1", "seed=2")
    got = resume_overrides(["resume=runs/a", "seed=3", "seed=4"])
    assert [override for override in got if override.startswith("seed")][-1] == "seed=4"
    assert recorded_overrides(Path("runs/a"), resume_overrides(["resume=runs/a"])[:-1]) == ["seed=1", "seed=2"]


def test_another_choice_of_a_group_takes_the_keys_of_the_one_before_along(make: Make) -> None:
    make("a", "strategy=pipeline", "strategy.schedule=gpipe", "+trainer.devices=2")
    got = resume_overrides(["resume=runs/a", "strategy=ddp", "trainer.devices=4"])
    assert got[:2] == ["strategy=ddp", "trainer.devices=4"]


@pytest.mark.parametrize("how", [["resume=runs/a", "hydra.run.dir=runs/b"], ["resume=runs/a/checkpoints/best.ckpt"]])
def test_elsewhere_it_is_a_new_run_that_begins_there(make: Make, how: list[str]) -> None:
    make("a", "seed=1", "finetune=runs/base", "resume=runs/before", status="done", steps=9)
    assert resume_overrides(how) == ["seed=1", *how[1:], how[0]]


def test_finetune_is_not_read_again_but_still_recorded(make: Make) -> None:
    folder = make("a", "finetune=runs/base", "seed=1")
    now = resume_overrides(["resume=runs/a"])
    assert now == ["finetune=null", "seed=1", "resume=runs/a", "hydra.run.dir=runs/a"]
    assert recorded_overrides(folder, now[:-1]) == ["finetune=runs/base", "seed=1"]


def test_a_run_without_a_checkpoint_begins_again(make: Make) -> None:
    make("a", "finetune=runs/base", "seed=1", checkpoint=False)
    assert resume_overrides(["resume=runs/a"]) == ["finetune=runs/base", "seed=1", "hydra.run.dir=runs/a"]


def test_one_that_was_killed_before_it_had_results_is_known_by_its_config(make: Make, tmp_path: Path) -> None:
    (tmp_path / "runs" / "a" / ".hydra").mkdir(parents=True)
    (tmp_path / "runs" / "a" / ".hydra" / "overrides.yaml").write_text("- seed=1\n")
    assert resume_overrides(["resume=latest"]) == ["seed=1", "hydra.run.dir=runs/a"]


def test_the_same_command_resumes_the_run_in_its_folder(make: Make, tmp_path: Path) -> None:
    """As resume= does; also by another name of the folder, and with the same overrides in another order."""
    make("a", "finetune=runs/base", "seed=1", status="running")
    for folder in ("runs/a", "'runs/a'", "runs/../runs/a", str(tmp_path / "runs" / "a")):
        got = resume_overrides(["seed=1", f"hydra.run.dir={folder}", "finetune=runs/base"])
        assert got[:2] == ["finetune=null", "seed=1"]
        run = folder.strip("'")
        assert {*got[2:]} == {f"resume={quoted(Path(run))}", f"hydra.run.dir={folder}"}


@pytest.mark.parametrize("folder", ["runs/${seed}", "${hydra:runtime.cwd}/runs/7"])
def test_an_interpolated_folder_is_known_too(make: Make, folder: str) -> None:
    make("7", "seed=7")
    assert resume_overrides(["seed=7", f"hydra.run.dir={folder}"])[-1].endswith("runs/7")


def test_another_run_is_not_begun_where_one_is(make: Make) -> None:
    make("a", "seed=1", "model=qn_mixer")
    make("done", "seed=1", status="done", steps=9)
    make("kept", "seed=1", status="done", steps=9, checkpoint=False)  # its checkpoints have been removed
    for overrides, message in (
        (
            ["seed=2", "hydra.run.dir=runs/a"],
            "runs/a has a run with seed=1, not seed=2: resume it with resume=runs/a",
        ),
        (["seed=1", "hydra.run.dir=runs/a"], "runs/a has a run with model=qn_mixer, not without: "),
        (["seed=1", "model=qn_mixer", "loss=l1", "hydra.run.dir=runs/a"], "runs/a has a run without loss=l1: "),
        (
            ["seed=1", "hydra.run.dir=runs/done"],
            "that is done (9 steps): resume it with resume=runs/done trainer.max_steps=…, or",
        ),
        (["seed=2", "hydra.run.dir=runs/kept"], "runs/kept has a run with seed=1, not seed=2: "),
        (["resume=runs/a", "hydra.run.dir=runs/done"], "runs/done has a run without model=qn_mixer: "),
    ):
        with pytest.raises(ConfigError) as error:
            resume_overrides(overrides)
        assert message in str(error.value)
        assert str(error.value).endswith("or give another hydra.run.dir=FOLDER")


@pytest.mark.parametrize("status", ["failed", "running", "interrupted"])
def test_where_nothing_was_kept_any_run_may_begin(make: Make, status: str) -> None:
    make("a", "seed=1", status=status, checkpoint=False)
    for seed in ("seed=1", "seed=2"):
        assert resume_overrides([seed, "hydra.run.dir=runs/a"]) == [seed, "hydra.run.dir=runs/a"]


def test_a_branch_resumes_and_is_recorded_as_a_branch(make: Make) -> None:
    """The command of a run that begins at another one's checkpoint, given twice."""
    make("a", "seed=1")
    command = ["resume=runs/a", "hydra.run.dir=runs/b"]
    begun = resume_overrides(command)
    make("b", *begun[:1], *begun[2:])
    now = resume_overrides(command)
    assert now == ["seed=1", "hydra.run.dir=runs/b", "resume=runs/b"]
    assert recorded_overrides(Path("runs/b"), [now[0], now[2]]) == ["seed=1", "resume=runs/a"]


def test_ranks_decide_alike_when_the_first_has_gone_ahead(make: Make, tmp_path: Path) -> None:
    """It has written its overrides, first as Hydra does, then to results.json, and taken the lock."""
    for name, checkpoint in (("new", False), ("old", True)):
        command = ["seed=1", f"hydra.run.dir=runs/{name}"]
        folder = make(name, "seed=1", checkpoint=True) if checkpoint else Path("runs") / name
        first = resume_overrides(command)
        (folder / ".hydra").mkdir(parents=True)
        of_task = [override for override in first if not override.startswith("hydra.")]
        (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {override}\n" for override in of_task))
        assert resume_overrides(command) == first
        results = {"status": "running", "overrides": recorded_overrides(folder, of_task)}
        (folder / "results.json").write_text(json.dumps(results))
        assert resume_overrides(command) == first


def test_the_folder_in_which_a_run_resumes(make: Make) -> None:
    folder = make("a")
    for path in ("runs/a", "runs/a/checkpoints/last.ckpt", str(folder.absolute())):
        assert resumes_in_place(folder, path)
        assert not resumes_in_place(Path("runs/b"), path)
    assert not resumes_in_place(folder, None)


def test_what_a_killed_process_was_writing_is_removed(make: Make) -> None:
    folder = make("a")
    left, others = (folder / "checkpoints" / f".{name}.tmp" for name in (f"last.ckpt.{'0a' * 16}", "of_another"))
    left.touch()
    others.touch()
    with run_lock(folder):
        assert left.exists()  # it may be another machine's
    clean(folder)
    assert sorted(path.name for path in folder.rglob("*ckpt*")) == ["best.ckpt", "last.ckpt"]
    assert others.exists()


@pytest.mark.parametrize("name", ["metrics.csv", "code.diff", "results.json"])
def test_no_run_begins_in_a_folder_of_other_files(make: Make, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match=f"hydra.run.dir=mine contains {name} already: give a new folder"):
        resume_overrides(["seed=1", "hydra.run.dir=mine"])


def test_latest_is_the_one_in_which_something_happened_last(make: Make, tmp_path: Path) -> None:
    make("2026-01-01/old", age=50)
    job = make("sweep/0", age=20)
    make("sweep/1", age=30, status="done")
    (tmp_path / "runs" / "sweep" / "sweep.json").write_text("{}")
    assert latest() == job
    evaluation = make("evaluation", "run=runs/begun-earlier", age=-9, checkpoint=False, status="done") / ".hydra"
    evaluation.mkdir()
    (evaluation / "overrides.yaml").write_text("- data=dicom\n- run=runs/begun-earlier\n")
    assert latest() == job
    last = make("begun-earlier", age=60) / "checkpoints" / "last.ckpt"
    os.utime(last, (1e9, 1e9))
    assert latest() == Path("runs/begun-earlier")


def test_a_finished_run_resumes_only_for_longer(make: Make) -> None:
    make("a", age=10)
    make("b", status="done", steps=9)
    with pytest.raises(CheckpointError) as error:
        resume_overrides(["resume=latest"])
    assert str(error.value) == (
        "runs/b is done (9 steps): to train longer, raise trainer.max_steps, or resume=runs/a, which is not done"
    )
    with pytest.raises(CheckpointError, match="runs/b is done"):
        resume_overrides(["resume=runs/b", "trainer.max_steps=9"])
    assert "trainer.max_steps=10" in resume_overrides(["resume=runs/b", "trainer.max_steps=10"])


def test_a_new_length_takes_the_place_of_the_old_one(make: Make) -> None:
    make("a", "seed=1", "trainer.max_epochs=9", "trainer.max_steps=-1")
    assert resume_overrides(["resume=runs/a", "trainer.max_steps=20"])[:2] == ["seed=1", "trainer.max_steps=20"]
    assert "trainer.max_epochs=9" not in resume_overrides(["resume=runs/a", "trainer.max_steps=20"])


@pytest.mark.parametrize(("path", "words"), [("latest", "finds no run under"), ("runs/a", "no run folder at")])
def test_a_missing_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        resume_overrides([f"resume={path}"])


def test_an_empty_resume_is_refused() -> None:
    with pytest.raises(ConfigError, match="resume= names no run: give resume=latest"):
        resume_overrides(["resume="])


def test_one_process_holds_the_run_lock_and_a_killed_one_releases_it(make: Make, tmp_path: Path) -> None:
    """Also where it has forked a child, as data workers are, that outlives it."""
    folder = make("a")
    code = """
import os, sys, time
from pathlib import Path
from qnmixer.engine.tracking.run_folder import run_lock
with run_lock(Path("runs/a")):
    if os.fork():
        print("held", flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(ConfigError, match=f"process {process.pid} on .* writes to runs/a"), run_lock(folder):
        pass
    for command in (["resume=runs/a"], ["hydra.run.dir=runs/a"]):
        with pytest.raises(ConfigError, match="writes to runs/a"):
            resume_overrides(command)
    process.kill()
    process.wait()
    with run_lock(folder):
        (folder / ".lock").read_text()
    process.stdin.close()  # ends the child
    process.stdout.close()


def test_any_path_is_taken_by_hydra_as_it_is(tmp_path: Path) -> None:
    for name in ("a", "a b", "lr=0.1,seed=2", "it's", 'a "b" c', "ü{1}", "jürgen", "日本", "a\\b"):
        override = f"resume={quoted(tmp_path / name)}"
        assert compose("train", [override]).resume == values_of([override])["resume"] == str(tmp_path / name)


def test_a_path_with_spaces_is_readable_in_a_shell_command() -> None:
    assert shlex.join([f"resume={quoted('/a b')}"]) == """'resume="/a b"'"""


@pytest.fixture
def own_configs(make: Make, tmp_path: Path) -> Path:
    """A folder with a loss of the user's own; the run runs/a was started with it."""
    folder = tmp_path / "my_conf"
    (folder / "loss").mkdir(parents=True)
    (folder / "loss" / "mine.yaml").write_text("defaults: [custom]\n_target_: evil.loss\n")
    (folder / "experiment").mkdir()
    (folder / "experiment" / "hooks.yaml").write_text(
        "# @package _global_\nhydra: {callbacks: {x: {_target_: evil.Hook}}}\n"
    )
    make("a", f"hydra.searchpath=[file://{folder}]", "loss=mine")
    return folder


def test_configs_of_the_users_own_are_found_again(own_configs: Path) -> None:
    where = f"hydra.searchpath=[file://{own_configs}]"
    now = [where, "loss=mine", "resume=runs/a", "hydra.run.dir=runs/a"]
    assert resume_overrides(["resume=runs/a", "trust=evil"]) == now
    assert resume_overrides([where, "resume=runs/a"]) == now
    assert resume_overrides([where, "loss=mine", "hydra.run.dir=runs/a"])[:2] == now[:2]


@pytest.mark.parametrize("branch", [[], ["hydra.run.dir=runs/b"]])
def test_what_they_name_is_not_run_on_a_runs_own_word(own_configs: Path, branch: list[str]) -> None:
    with pytest.raises(PluginError, match=r"^a config of runs/a names loss._target_=evil.loss, .* add trust=evil$"):
        resume_overrides(["resume=runs/a", *branch])
    with pytest.raises(ConfigError, match=r"has a run with hydra.searchpath=\S+, not without"):
        resume_overrides(["loss=mine", "hydra.run.dir=runs/a"])


def test_hydra_runs_nothing_on_a_runs_own_word(own_configs: Path, make: Make) -> None:
    where = f"hydra.searchpath=[file://{own_configs}]"
    make("b", where, "experiment=hooks")
    with pytest.raises(
        ConfigError, match=r"^runs/b was started with configs that set hydra.callbacks: .* --config-dir"
    ):
        resume_overrides(["resume=runs/b", "trust=evil"])
    make("c", "+hydra.callbacks.x._target_=evil.Hook", "hydra/job_logging=evil", "hydra.searchpath=[pkg://evil]")
    with pytest.raises(PluginError, match=r"^runs/c names hydra.searchpath=evil.configs, .* add trust=evil$"):
        resume_overrides(["resume=runs/c"])
    make("d", "+hydra.callbacks.x._target_=evil.Hook", "hydra/job_logging=evil", "seed=1")
    assert resume_overrides(["resume=runs/d"]) == ["seed=1", "resume=runs/d", "hydra.run.dir=runs/d"]


def test_the_line_for_who_stops_names_the_code(own_configs: Path) -> None:
    composed = Path("runs/a/.hydra/config.yaml")
    composed.parent.mkdir()
    composed.write_text(
        "optimizer: {_target_: torch.optim.AdamW}\nloss: {_target_: evil.loss}\nlogger: {_target_: qnmixer.B}\n"
    )
    assert resume_hint(Path("runs/a")).endswith("resume=runs/a trust=evil")


@pytest.mark.parametrize(
    "override",
    [
        "++hydra={job:{env_set:{PYTHONPATH:/evil}}}", "hydra.job.env_set.PYTHONPATH=/evil",
        "+callbacks@hydra.callbacks.x=custom", "+hydra={callbacks:{x:{_target_:evil.Hook}}}",
    ],
)  # fmt: skip
def test_a_run_has_no_word_on_hydra(make: Make, override: str) -> None:
    make("a", "seed=1", override)
    assert resume_overrides(["resume=runs/a"]) == ["seed=1", "resume=runs/a", "hydra.run.dir=runs/a"]


@pytest.mark.parametrize(
    "override",
    [
        "logger.wandb.project=${oc.env:SECRET}", "logger.wandb.project='${oc.env:SECRET}'",
        r"logger.wandb.project=$\{oc.env\:SECRET\}", "+model={a:[${oc.env:SECRET}]}",
        "experiment=[../../../downloads/evil]", "loss=../evil", "+finetune@callbacks=../evil",
    ],
)  # fmt: skip
def test_a_run_looks_nothing_up_on_its_own_word(make: Make, override: str) -> None:
    make("a", "data.seed=${seed}", "finetune=../b", override)
    with pytest.raises(ConfigError, match=f"^runs/a was started with {re.escape(override)}, which reads other values"):
        resume_overrides(["resume=runs/a"])
    assert override in resume_overrides([override, "resume=runs/a"])


@pytest.mark.parametrize("override", ["model={regularizer:evil.Net}", "model.regularizer=${tags}"])
def test_a_part_of_a_network_is_code_too(make: Make, override: str) -> None:
    make("a", override)
    with pytest.raises(PluginError, match=r"^runs/a names model.*, which is not part of qnmixer"):
        resume_overrides(["resume=runs/a"])


def test_configs_look_nothing_up_on_a_runs_own_word(own_configs: Path, make: Make) -> None:
    (own_configs / "experiment" / "reads.yaml").write_text(
        "# @package _global_\nlogger: {wandb: {project: '${oc.env:SECRET}'}}\n"
    )
    (own_configs / "experiment" / "sets.yaml").write_text("# @package _global_\nhydra: {job: {env_set: {A: b}}}\n")
    where = f"hydra.searchpath=[file://{own_configs}]"
    make("b", where, "experiment=reads")
    with pytest.raises(ConfigError, match=r"^a config of runs/b has logger.wandb.project=\$\{oc.env:SECRET}, which"):
        resume_overrides(["resume=runs/b"])
    assert resume_overrides([where, "resume=runs/b"])[0] == where
    make("c", where, "experiment=sets")
    with pytest.raises(ConfigError, match=r"^runs/c was started with configs that set hydra.job.env_set: "):
        resume_overrides(["resume=runs/c"])
