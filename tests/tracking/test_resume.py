import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qnmixer.engine.config.compose import values_of
from qnmixer.engine.tracking.records import signed
from qnmixer.engine.tracking.run import Run, latest, resume_hint, resume_overrides, run_lock
from qnmixer.errors import CheckpointError, ConfigError

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


@pytest.mark.parametrize("overrides", [["seed=1"], ["resume=null"], ["-m", "resume=latest"], ["resume=a", "--help"]])
def test_without_resume_nothing_changes(overrides: list[str]) -> None:
    assert resume_overrides(overrides) == overrides


@pytest.mark.parametrize(
    ("before", "given", "after"),
    [
        (["seed=1", "trainer.max_steps=9"], ["trainer.max_steps=20"], ["seed=1", "trainer.max_steps=20"]),
        (["seed=1", "seed=2"], ["seed=3", "seed=4"], ["seed=3", "seed=4"]),
        # Another choice of a group takes the keys of the one before along; so does another length.
        (["strategy=pipeline", "strategy.schedule=gpipe"], ["strategy=ddp"], ["strategy=ddp"]),
        (["+trainer.devices=2"], ["trainer.devices=4"], ["trainer.devices=4"]),
        (["trainer.max_epochs=9", "trainer.max_steps=-1"], ["trainer.max_steps=20"], ["trainer.max_steps=20"]),
        # A run has no word on Hydra, which could make it run code.
        (["seed=1", "++hydra={job:{env_set:{PYTHONPATH:/evil}}}"], [], ["seed=1"]),
        (["seed=1", "hydra.job.env_set.PYTHONPATH=/evil", "hydra/job_logging=evil"], [], ["seed=1"]),
        (["seed=1", "+callbacks@hydra.callbacks.x=custom"], [], ["seed=1"]),
        (["seed=1", "+hydra={callbacks:{x:{_target_:evil.Hook}}}"], [], ["seed=1"]),
    ],
)
def test_a_run_resumes_in_its_folder_with_its_own_overrides(
    make: Make, before: list[str], given: list[str], after: list[str]
) -> None:
    make("a", *before)
    for path in ("runs/a", "runs/a/checkpoints/last.ckpt"):
        where = [f"resume={path}", NEXT, "hydra.run.dir=runs/a"]
        assert resume_overrides([f"resume={path}", *given]) == [*after, *where]
        assert record("runs/a", [*after, *where]) == after


def test_shipped_weights_are_no_run_to_go_on_with_but_a_folder_of_their_name_is(make: Make) -> None:
    with pytest.raises(CheckpointError, match=r"resume=pretrained names weights.* finetune=pretrained"):
        resume_overrides(["resume=pretrained"])
    make("a", "seed=1").rename("pretrained")
    found = resume_overrides(["resume=./pretrained"])
    assert found == ["seed=1", "resume=pretrained", NEXT, "hydra.run.dir=pretrained"]


@pytest.mark.parametrize("how", [["resume=runs/a", "hydra.run.dir=runs/b"], ["resume=runs/a/checkpoints/best.ckpt"]])
def test_elsewhere_it_is_a_new_run_that_begins_there(make: Make, how: list[str]) -> None:
    make("a", "seed=1", "finetune=runs/base", "resume=runs/before", status="done", steps=9)
    assert resume_overrides(how) == ["seed=1", *how[1:], how[0]]


def test_finetune_is_not_read_again_but_still_recorded(make: Make) -> None:
    make("a", "finetune=runs/base", "seed=1")
    now = resume_overrides(["resume=runs/a"])
    assert now == ["seed=1", *IN_A]
    assert record("runs/a", now) == ["finetune=runs/base", "seed=1"]
    make("b", "finetune=runs/base", "seed=1", checkpoint=False)  # it begins again
    assert resume_overrides(["resume=runs/b"]) == ["finetune=runs/base", "seed=1", "hydra.run.dir=runs/b"]


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
    assert resume_overrides(words) == [*words, "resume=runs/2", NEXT]


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
        (["seed=1", "model=qn_mixer", "loss=l1", "hydra.run.dir=runs/a"], "a run with no loss, not loss=l1: "),
        (
            ["seed=1", "hydra.run.dir=runs/done"],
            "that is done (9 steps): resume it with resume=runs/done trainer.max_steps=…, or",
        ),
        (["seed=2", "hydra.run.dir=runs/kept"], "runs/kept has a run with seed=1, not seed=2: "),
        (["resume=runs/a", "hydra.run.dir=runs/done"], "runs/done has a run with no model, not model=qn_mixer: "),
    ):
        with pytest.raises(ConfigError) as error:
            resume_overrides(overrides)
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
    folder = make("a", "seed=1")
    listen, say = os.pipe()
    wait, release = os.pipe()
    if (holder := os.fork()) == 0:
        os.close(release)
        with run_lock(folder):
            os.write(say, b"x")
            os.read(wait, 1)
        os._exit(0)
    os.read(listen, 1)
    for command in (["resume=runs/a"], ["seed=1", "hydra.run.dir=runs/a"]):
        with pytest.raises(ConfigError, match=f"process {holder} on .* writes to runs/a"):
            resume_overrides(command)
        with pytest.MonkeyPatch.context() as as_rank:
            for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
                as_rank.setenv(name, value)
            assert "resume=runs/a" in resume_overrides(command)
    os.close(release)
    os.waitpid(holder, 0)


def test_a_finished_run_resumes_only_for_longer(make: Make) -> None:
    make("b", status="done", steps=9)
    for given in (["resume=latest"], ["resume=runs/b", "trainer.max_steps=9"]):
        with pytest.raises(CheckpointError, match=r"^runs/b is done \(9 steps\): to train longer, raise trainer.max_s"):
            resume_overrides(given)
    for longer in ("trainer.max_steps=10", "trainer.max_epochs=3"):
        assert longer in resume_overrides(["resume=runs/b", longer])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("latest", "finds no run under"),
        ("runs/a", "no run folder at"),
        ("", "resume= names no run: give resume=latest"),
    ],
)
def test_a_missing_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((CheckpointError, ConfigError), match=words):
        resume_overrides([f"resume={path}"])


def test_latest_is_the_one_that_began_or_resumed_last(make: Make, tmp_path: Path) -> None:
    """By its record: a copy of an old run has newer files. An evaluation is no run."""
    again = {"step": 3, "at": "2026-01-03T10:00:00+0200"}
    new = make("sweep/new", started="2025-12-31T10:00:00+0000", resumed=[again | {"at": "2026-01-02"}, again])
    make("between", started="2026-01-03T07:59:00+0000")
    make("evaluation", "data=dicom", "run=runs/between", checkpoint=False, started="2026-01-04T10:00:00+0000")
    make("of_another_version", started=3)
    assert latest() == new


STRANGE = [
    "logger.wandb.project='${oc.env:SECRET}'", r"logger.wandb.project=$\{oc.env\:SECRET\}", "tags=[${oc.env:SECRET}]",
    "+model={a:[${oc.env:SECRET}]}", "experiment=[../../../downloads/evil]", "loss=../evil", "seed=$\\{x}",
    "+finetune@callbacks=../evil", "+finetune@callbacks=ema", "hydra.searchpath=[pkg://evil]",
    "hydra.searchpath=[file:///home]", "finetune=hf://evil/net", "local=evil",
    "+logger.w._target_=lightning.pytorch.loggers.WandbLogger", "+logger.w={base_url:http://evil,api_key:x}",
    "logger.wandb.mode=online", "logger=custom", "logger=[csv,mine]", "logger={wandb:{mode:online}}",
    "+callbacks@logger=ema", "+callbacks.c.dirpath=/home", "callbacks={c:{dirpath:/home}}", "data.cache_dir=/home",
    "+data={cache_dir:/home}", "+data={cache\\_dir:/home}", "loss._target_=evil.loss", "model={regularizer:evil.Net}",
    "model.regularizer=evil.Net", "+model.x._target_=evil.Net",
]  # fmt: skip
PLAIN = [
    "logger=[csv,tensorboard]", "callbacks=[default,ema]", "~callbacks.pictures", "data.root=/data/logger",
    "+trainer.max_time=00:01:00:00", "experiment/small=qn_mixer", "seed=1", 'data.include="*/full dose/*"',
]  # fmt: skip


@pytest.mark.parametrize("override", STRANGE)
def test_code_loggers_callbacks_and_folders_of_a_stranger_are_the_users_to_name(make: Make, override: str) -> None:
    """Of a run of the user's own they stay. A signature is of its overrides."""
    folder = Path("runs") if "searchpath" in override else make("mine", override, checkpoint=False)
    if folder.name == "mine":
        assert override in resume_overrides(["resume=runs/mine"])
    make("b", "seed=1", override, mine=False, signature=signed(["seed=1"])["signature"], checkpoint=False)
    for more in ([], ["hydra.run.dir=runs/new"] * ("finetune=" not in override)):
        with pytest.raises(ConfigError, match=r"^runs/b was not started by you here, .*: repeat what you trust of "):
            resume_overrides(["resume=runs/b", *more])
    if folder.name == "mine":
        assert override in resume_overrides(["resume=runs/b", override])


@pytest.mark.parametrize("override", PLAIN)
def test_plain_values_are_taken_from_any_run(make: Make, override: str) -> None:
    make("a", override, mine=False)
    assert resume_overrides(["resume=runs/a"]) == [override, *IN_A]


def test_where_a_strangers_run_began_is_the_users_to_name(make: Make) -> None:
    make("a", "resume=${oc.env:SECRET}", mine=False, checkpoint=False)
    with pytest.raises(ConfigError, match=r"^runs/a was not started by you here"):
        resume_overrides(["resume=runs/a"])


def test_the_line_for_who_stops_is_one_for_a_shell(make: Make) -> None:
    folder = make("a", "seed=1", steps=7).rename("a b")
    assert resume_hint(folder) == """interrupted after step 7, to resume: python -m qnmixer.train 'resume="a b"'"""
