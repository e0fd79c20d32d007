import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.tracking.runs import continued, held, latest, quoted, recorded

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
        assert continued(overrides) == overrides


def test_a_run_goes_on_where_it_is_with_its_own_overrides(make: Make) -> None:
    make("a", "seed=1", "trainer.max_steps=9")
    for path in ("runs/a", "runs/a/checkpoints/last.ckpt"):
        assert continued([f"resume={path}", "trainer.max_steps=20", "memory=recompute"]) == [
            "seed=1", "trainer.max_steps=20", "memory=recompute", f"resume={path}", "hydra.run.dir=runs/a",
        ]  # fmt: skip


def test_the_last_of_two_values_counts(make: Make) -> None:
    make("a", "seed=1", "seed=2")
    got = continued(["resume=runs/a", "seed=3", "seed=4"])
    assert [override for override in got if override.startswith("seed")][-1] == "seed=4"
    assert recorded(Path("runs/a"), continued(["resume=runs/a"])[:-1]) == ["seed=1", "seed=2"]


def test_another_choice_of_a_group_takes_the_keys_of_the_one_before_along(make: Make) -> None:
    make("a", "strategy=pipeline", "strategy.schedule=gpipe", "+trainer.devices=2")
    got = continued(["resume=runs/a", "strategy=ddp", "trainer.devices=4"])
    assert got[:2] == ["strategy=ddp", "trainer.devices=4"]


@pytest.mark.parametrize("how", [["resume=runs/a", "hydra.run.dir=runs/b"], ["resume=runs/a/checkpoints/best.ckpt"]])
def test_elsewhere_it_is_a_new_run_that_begins_there(make: Make, how: list[str]) -> None:
    make("a", "seed=1", "finetune=runs/base", "resume=runs/before", status="done", steps=9)
    assert continued(how) == ["seed=1", *how[1:], how[0]]


def test_what_it_was_finetuned_from_is_not_read_again_but_still_told(make: Make) -> None:
    folder = make("a", "finetune=runs/base", "seed=1")
    now = continued(["resume=runs/a"])
    assert now == ["finetune=null", "seed=1", "resume=runs/a", "hydra.run.dir=runs/a"]
    assert recorded(folder, now[:-1]) == ["finetune=runs/base", "seed=1"]


def test_a_run_without_a_checkpoint_begins_again(make: Make) -> None:
    make("a", "finetune=runs/base", "seed=1", checkpoint=False)
    assert continued(["resume=runs/a"]) == ["finetune=runs/base", "seed=1", "hydra.run.dir=runs/a"]


def test_one_that_was_killed_before_it_had_results_is_known_by_its_config(make: Make, tmp_path: Path) -> None:
    (tmp_path / "runs" / "a" / ".hydra").mkdir(parents=True)
    (tmp_path / "runs" / "a" / ".hydra" / "overrides.yaml").write_text("- seed=1\n")
    assert continued(["resume=latest"]) == ["seed=1", "hydra.run.dir=runs/a"]


def test_latest_is_the_one_in_which_something_happened_last(make: Make, tmp_path: Path) -> None:
    make("2026-01-01/old", age=50)
    job = make("sweep/0", age=20)
    make("sweep/1", age=30, status="done")
    (tmp_path / "runs" / "sweep" / "sweep.json").write_text("{}")
    assert latest() == job
    last = make("begun-earlier", age=60) / "checkpoints" / "last.ckpt"
    os.utime(last, (1e9, 1e9))
    assert latest() == Path("runs/begun-earlier")


def test_what_is_done_is_not_gone_on_with_unless_for_longer(make: Make) -> None:
    make("a", age=10)
    make("b", status="done", steps=9)
    with pytest.raises(CheckpointError) as error:
        continued(["resume=latest"])
    assert str(error.value) == (
        "runs/b is done (9 steps): give a larger trainer.max_steps to go on, or resume=runs/a, which is not done"
    )
    with pytest.raises(CheckpointError, match="runs/b is done"):
        continued(["resume=runs/b", "trainer.max_steps=9"])
    assert "trainer.max_steps=10" in continued(["resume=runs/b", "trainer.max_steps=10"])


@pytest.mark.parametrize(("path", "words"), [("latest", "there is no run under"), ("runs/a", "no run folder at")])
def test_what_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        continued([f"resume={path}"])


def test_only_one_process_trains_in_a_folder_and_a_killed_one_lets_go(make: Make, tmp_path: Path) -> None:
    """Also where it has forked a child, as data workers are, that outlives it."""
    folder = make("a")
    code = """
import os, sys, time
from pathlib import Path
from qnmixer.tracking.runs import held
with held(Path("runs/a")):
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
    with pytest.raises(ConfigError, match=f"process {process.pid} on .* trains in runs/a"), held(folder):
        pass
    with pytest.raises(ConfigError, match="trains in runs/a"):
        continued(["resume=runs/a"])
    process.kill()
    process.wait()
    with held(folder):
        (folder / ".lock").read_text()
    process.stdin.close()  # ends the child
    process.stdout.close()


def test_any_path_is_taken_by_hydra_as_it_is(tmp_path: Path) -> None:
    from qnmixer.cli import compose

    for name in ("a", "a b", "lr=0.1,seed=2", "it's", "ü{1}", "a\\b"):
        assert compose("train", [f"resume={quoted(tmp_path / name)}"]).resume == str(tmp_path / name)
