import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.runs.records import signed
from qnmixer.runs.run import Run, into_new_folder, latest, resume_hint, resume_overrides
from qnmixer.settings.compose import values_of

from ..conftest import lock_of_another

Make = Callable[..., Path]
NEXT = "hydra.output_subdir=.hydra.next"
IN_A = ["resume=runs/a", NEXT, "hydra.run.dir=runs/a"]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make(name, *overrides, checkpoint=…, mine=…, **results): a run folder under runs/ of the working directory."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *overrides: str, checkpoint: bool = True, mine: bool = True, **results: Any) -> Path:
        folder = Path("runs") / name
        (folder / "checkpoints").mkdir(parents=True)
        record = {"status": "interrupted"} | (signed([*overrides]) if mine else {"overrides": overrides})
        (folder / "results.json").write_text(json.dumps(record | results))
        if checkpoint:
            (folder / "checkpoints" / "last.ckpt").touch()
        return folder

    return run


def record(run: str, overrides: list[str]) -> list[str]:
    """What results.json gets of a command that Hydra has read."""
    of_task = [it for it in overrides if not it.startswith("hydra.")]
    return Run(Path(run), of_task, values_of(of_task).get("resume")).overrides


@pytest.mark.parametrize("overrides", [["seed=1"], ["-m", "resume=latest"], ["resume=a", "--help"]])
def test_without_resume_nothing_changes(overrides: list[str]) -> None:
    assert resume_overrides(overrides) == overrides


@pytest.mark.parametrize(("before", "given", "after"), [
    (["seed=1", "trainer.max_steps=9"], ["trainer.max_steps=20"], ["seed=1", "trainer.max_steps=20"]),
    (["seed=1", "seed=2"], ["seed=3", "seed=4"], ["seed=3", "seed=4"]),
    # Another choice of a group takes the keys of the one before along; so does another length.
    (["strategy=pipeline", "strategy.schedule=sequential"], ["strategy=ddp"], ["strategy=ddp"]),
    (["trainer.max_epochs=9", "trainer.max_steps=-1"], ["trainer.max_steps=20"], ["trainer.max_steps=20"]),
    # A run has no word on Hydra, which could make it run code.
    (["seed=1", "++hydra={job:{env_set:{PYTHONPATH:/evil}}}"], [], ["seed=1"]),
    (["seed=1", "+callbacks@hydra.callbacks.x=custom"], [], ["seed=1"]),
])  # fmt: skip
def test_a_run_resumes_with_its_overrides(make: Make, before: list[str], given: list[str], after: list[str]) -> None:
    make("a", *before)
    assert resume_overrides(["resume=runs/a", *given]) == [*after, *IN_A]
    assert record("runs/a", [*after, *IN_A]) == after


def test_elsewhere_it_does_not_go_on(make: Make) -> None:
    make("a", "seed=1")
    with pytest.raises(ConfigError, match=r"resume=runs/a continues that run in its folder: leave out hydra.run.dir"):
        resume_overrides(["resume=runs/a", "hydra.run.dir=runs/b"])
    with pytest.raises(CheckpointError, match=r"a checkpoint alone starts a new run by finetune="):
        resume_overrides(["resume=runs/a/checkpoints/best.ckpt"])


def test_finetune_is_not_read_again_but_still_recorded(make: Make) -> None:
    make("a", "finetune=runs/base", "seed=1")
    now = resume_overrides(["resume=runs/a"])
    assert now == ["seed=1", *IN_A]
    assert record("runs/a", now) == ["finetune=runs/base", "seed=1"]
    make("b", "finetune=runs/base", "seed=1", checkpoint=False)  # it begins again
    assert resume_overrides(["resume=runs/b"]) == ["finetune=runs/base", "seed=1", "hydra.run.dir=runs/b"]


def test_lightnings_word_for_it(make: Make) -> None:
    make("a")
    expected = resume_overrides(["resume=runs/a", "seed=1"])
    for path in ("runs/a", "runs/a/checkpoints/last.ckpt", "last"):
        assert resume_overrides([f"ckpt_path={path}", "seed=1"]) == resume_overrides(["seed=1", "resume=runs/a"])
    assert {*expected} == {*resume_overrides(["ckpt_path=runs/a", "seed=1"])}
    assert into_new_folder("evaluate", ["ckpt_path=runs/a/best.ckpt"]) == ["run=runs/a/best.ckpt"]
    assert resume_overrides(["ckpt_path=null", "seed=1"]) == ["seed=1"]
    for words in (["ckpt_path=runs/a/checkpoints/best.ckpt"], ["ckpt_path=runs/a", "resume=runs/a"]):
        with pytest.raises(ConfigError, match="ckpt_path="):
            resume_overrides(words)


def test_the_same_command_resumes_the_run_in_its_folder(make: Make, tmp_path: Path) -> None:
    """As resume= does; also by another name of the folder, and with the same overrides in another order."""
    make("1", "finetune=runs/base", "seed=1", status="running")
    folders = ["runs/1", "'runs/1'", "runs/../runs/1", str(tmp_path / "runs" / "1")]
    folders += ["runs/${seed}", "${hydra:runtime.cwd}/runs/1"]
    for folder in folders:
        got = resume_overrides(["seed=1", f"hydra.run.dir={folder}", "finetune=runs/base"])
        assert got[:2] == ["seed=1", f"hydra.run.dir={folder}"]
        assert (Path(values_of(got)["resume"]).resolve(), got[3:]) == (tmp_path / "runs" / "1", [NEXT])
    # Hydra would merge a group of keys with what the record has before it.
    words = ["+data={a: 1}", "hydra.run.dir=runs/2"]
    make("2", "+data={b: 2}", words[0], mine=False)
    assert resume_overrides([*words]) == [*words, "resume=runs/2", NEXT]


@pytest.mark.parametrize(("words", "message"), [
    (["seed=2", "hydra.run.dir=runs/a"], "runs/a has a run with seed=1, not seed=2: resume it with resume=runs/a"),
    (["seed=1", "loss=l1", "hydra.run.dir=runs/a"], "runs/a has a run with no loss, not loss=l1: "),
    (["hydra.run.dir=runs/a"], "runs/a has a run with seed=1, not without: "),
    (["seed=1", "hydra.run.dir=runs/done"], "runs/done has a run that is done: resume it with resume=runs/done, or"),
])  # fmt: skip
def test_another_run_is_not_begun_where_one_is(make: Make, words: list[str], message: str) -> None:
    make("a", "seed=1")
    make("done", "seed=1", status="done", checkpoint=False)  # its checkpoints have been removed
    with pytest.raises(ConfigError) as error:
        resume_overrides(words)
    assert message in str(error.value)
    assert str(error.value).endswith("or give another hydra.run.dir=FOLDER")


@pytest.mark.parametrize("name", ["metrics.csv", "results.json"])
def test_no_run_begins_in_a_folder_of_other_files(make: Make, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match=f"hydra.run.dir=mine contains {name} already: give a new folder"):
        resume_overrides(["seed=1", "hydra.run.dir=mine"])


def test_no_command_begins_where_another_process_writes(make: Make) -> None:
    """The other ranks of a run may get here when rank 0 has the lock already."""
    with lock_of_another(make("a", "seed=1")) as holder:
        for command in (["resume=runs/a"], ["seed=1", "hydra.run.dir=runs/a"]):
            with pytest.raises(ConfigError, match=f"process {holder} on .* writes to runs/a"):
                resume_overrides(command)
            with pytest.MonkeyPatch.context() as as_rank:
                for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
                    as_rank.setenv(name, value)
                assert "resume=runs/a" in resume_overrides(command)


def test_a_finished_run_resumes_only_for_longer(make: Make) -> None:
    make("b", status="done", steps=9)
    with pytest.raises(
        CheckpointError,
        match=r"^runs/b is done \(9 steps\): to train longer, raise trainer.max_steps; the ",
    ):
        resume_overrides(["resume=latest"])
    for longer in ("trainer.max_steps=10", "trainer.max_epochs=3"):
        assert longer in resume_overrides(["resume=runs/b", longer])


@pytest.mark.parametrize(("path", "words"), [("latest", "finds no run under"), ("runs/a", "no run folder at")])
def test_a_missing_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        resume_overrides([f"resume={path}"])


def test_latest_is_the_newest_run(make: Make) -> None:
    """An evaluation is no run, and a folder of runs may be of a sweep."""
    for age, (name, words) in enumerate({"evaluation": ["run=runs/b"], "sweep/new": [], "old": []}.items()):
        record = make(name, *words, checkpoint=False) / "results.json"
        os.utime(record, (1e9 - age, 1e9 - age))
    assert latest() == Path("runs/sweep/new")


@pytest.mark.parametrize("override", [
    "tags=[${oc.env:SECRET}]", "loss._target_=evil.loss", "finetune=hf://evil/net", "hydra.searchpath=[file:///home]",
])  # fmt: skip
def test_what_a_stranger_has_set_is_the_users_to_repeat(make: Make, override: str) -> None:
    """It may run code, read variables, or send data. Of a run of the user's own it stays. A signature is of its
    overrides."""
    make("mine", override, checkpoint=False)
    assert override in resume_overrides(["resume=runs/mine"])
    theirs = ["seed=2", override]
    make("b", *theirs, mine=False, signature=signed(theirs[:1])["signature"], checkpoint=False)
    for given in ([], theirs[:1]):
        with pytest.raises(ConfigError, match=r"^runs/b was not started by you here, ") as error:
            resume_overrides(["resume=runs/b", *given])
        assert shlex.quote(override) in str(error.value)
    assert resume_overrides(["resume=runs/b", *theirs])[:2] == theirs


def test_config_folders_are_added_to_those_of_the_run_that_are_still_there(make: Make, tmp_path: Path) -> None:
    """The project of a run may have been moved."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "more").mkdir()
    mine, more = (f"file://{tmp_path / name}" for name in ("mine", "more"))
    make("a", f"hydra.searchpath=[{mine},file:///gone]", "seed=1")
    assert resume_overrides(["resume=runs/a", f"hydra.searchpath=[{more}]"])[:2] == [
        "seed=1", f"hydra.searchpath=[{more},{mine}]"
    ]  # fmt: skip


def test_the_line_for_who_stops_is_one_for_a_shell(make: Make) -> None:
    folder = make("a", "seed=1", steps=7).rename("a b")
    assert resume_hint(folder) == """interrupted after step 7, to resume: python -m qnmixer.train 'resume=a b'"""
