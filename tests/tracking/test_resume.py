import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qnmixer.engine.config.compose import compose, quoted, values_of
from qnmixer.engine.tracking.resume import latest, resume_hint, resume_overrides
from qnmixer.engine.tracking.run import Run, run_lock
from qnmixer.engine.tracking.signature import signed
from qnmixer.errors import CheckpointError, ConfigError, PluginError

Make = Callable[..., Path]
NEXT = "hydra.output_subdir=.hydra.next"
IN_A = ["resume=runs/a", NEXT, "hydra.run.dir=runs/a"]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make(name, *overrides, age=…, checkpoint=…, **results): a run folder under runs/ of the working directory."""
    monkeypatch.chdir(tmp_path)

    def run(
        name: str, *overrides: str, age: float = 0, checkpoint: bool = True, mine: bool = True, **results: Any
    ) -> Path:
        folder = Path("runs") / name
        (folder / "checkpoints").mkdir(parents=True)
        paths = [folder / "results.json"]
        record = {"status": "interrupted"} | (signed([*overrides]) if mine else {"overrides": overrides})
        paths[0].write_text(json.dumps(record | results))
        if checkpoint:
            paths += [folder / "checkpoints" / "last.ckpt", folder / "checkpoints" / "best.ckpt"]
        for path in paths:
            path.touch()
            os.utime(path, (1e9 - age, 1e9 - age))
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


@pytest.mark.parametrize(
    ("override", "value"),
    [("seed=1", "1"), ("+a.b='x y'", "x y"), ('a.b="x=y"', "x=y"), (r"a.b='it\'s'", "it's"), ("a.b=", "")],
)
def test_values_are_those_that_hydra_reads(override: str, value: str) -> None:
    assert [*values_of([override]).values()] == [value]


def test_any_path_is_taken_by_hydra_as_it_is(tmp_path: Path) -> None:
    for name in ("a b", "lr=0.1,seed=2", "it's", 'a "b" c', "ü{1}", "日本", "a\\b"):
        override = f"resume={quoted(tmp_path / name)}"
        assert compose("train", [override]).resume == values_of([override])["resume"] == str(tmp_path / name)


@pytest.mark.parametrize("how", [["resume=runs/a", "hydra.run.dir=runs/b"], ["resume=runs/a/checkpoints/best.ckpt"]])
def test_elsewhere_it_is_a_new_run_that_begins_there(make: Make, how: list[str]) -> None:
    make("a", "seed=1", "finetune=runs/base", "resume=runs/before", status="done", steps=9)
    assert resume_overrides(how) == ["seed=1", *how[1:], how[0]]


def test_a_branch_resumes_and_is_recorded_as_a_branch(make: Make) -> None:
    """The command of a run that begins at another one's checkpoint, given twice."""
    make("a", "seed=1")
    command = ["resume=runs/a", "hydra.run.dir=runs/b"]
    make("b", *record("runs/b", resume_overrides(command)))
    now = resume_overrides(command)
    assert now == ["seed=1", "hydra.run.dir=runs/b", "resume=runs/b", NEXT]
    assert record("runs/b", now) == ["resume=runs/a", "seed=1"]


def test_finetune_is_not_read_again_but_still_recorded(make: Make) -> None:
    make("a", "finetune=runs/base", "seed=1")
    now = resume_overrides(["resume=runs/a"])
    assert now == ["seed=1", *IN_A]
    assert record("runs/a", now) == ["finetune=runs/base", "seed=1"]
    make("b", "finetune=runs/base", "seed=1", checkpoint=False)  # it begins again
    assert resume_overrides(["resume=runs/b"]) == ["finetune=runs/base", "seed=1", "hydra.run.dir=runs/b"]


def test_one_that_was_killed_before_it_had_results_is_known_by_its_config(make: Make, tmp_path: Path) -> None:
    (tmp_path / "runs" / "a" / ".hydra").mkdir(parents=True)
    (tmp_path / "runs" / "a" / ".hydra" / "overrides.yaml").write_text("- seed=1\n")
    assert resume_overrides(["resume=latest"]) == ["seed=1", "hydra.run.dir=runs/a"]


def test_the_same_command_resumes_the_run_in_its_folder(make: Make, tmp_path: Path) -> None:
    """As resume= does; also by another name of the folder, and with the same overrides in another order."""
    make("1", "finetune=runs/base", "seed=1", status="running")
    folders = ["runs/1", "'runs/1'", "runs/../runs/1", str(tmp_path / "runs" / "1")]
    folders += ["runs/${seed}", "${hydra:runtime.cwd}/runs/1"]
    for folder in folders:
        got = resume_overrides(["seed=1", f"hydra.run.dir={folder}", "finetune=runs/base"])
        assert got[:2] == ["seed=1", f"hydra.run.dir={folder}"]
        assert (Path(values_of(got)["resume"]).resolve(), got[3:]) == (tmp_path / "runs" / "1", [NEXT])


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


def test_where_nothing_was_kept_any_run_may_begin(make: Make) -> None:
    make("a", "seed=1", status="running", checkpoint=False)
    for seed in ("seed=1", "seed=2"):
        assert resume_overrides([seed, "hydra.run.dir=runs/a"]) == [seed, "hydra.run.dir=runs/a"]


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


def test_ranks_decide_alike_when_the_first_has_gone_ahead(make: Make) -> None:
    """It has written its overrides, first as Hydra does, then to results.json."""
    for name, checkpoint in (("new", False), ("old", True)):
        command = ["seed=1", f"hydra.run.dir=runs/{name}"]
        folder = make(name, "seed=1") if checkpoint else Path("runs") / name
        first = resume_overrides(command)
        (folder / ".hydra").mkdir(parents=True)
        of_task = [override for override in first if not override.startswith("hydra.")]
        (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {override}\n" for override in of_task))
        assert resume_overrides(command) == first
        results = {"status": "running", "overrides": record(str(folder), of_task)}
        (folder / "results.json").write_text(json.dumps(results))
        assert resume_overrides(command) == first


def test_latest_is_the_one_in_which_something_happened_last(make: Make, tmp_path: Path) -> None:
    make("2026-01-01/old", age=50)
    job = make("sweep/0", age=20)
    make("sweep/1", age=30, status="done")
    (tmp_path / "runs" / "sweep" / "sweep.json").write_text("{}")
    assert latest() == job
    make("evaluation", "data=dicom", "run=runs/begun-earlier", age=-9, checkpoint=False, status="done")
    assert latest() == job
    last = make("begun-earlier", age=60) / "checkpoints" / "last.ckpt"
    os.utime(last, (1e9, 1e9))
    assert latest() == Path("runs/begun-earlier")


def test_a_copy_of_an_old_run_is_not_the_latest(make: Make) -> None:
    """Its files are newer, and its record is not."""
    make("copy", age=0, started="2026-01-01T10:00:00+0000")
    again = {"step": 3, "at": "2026-01-03T10:00:00+0200"}
    new = make("new", age=50, started="2025-12-31T10:00:00+0000", resumed=[again | {"at": "2026-01-02"}, again])
    make("between", age=10, started="2026-01-03T07:59:00+0000")
    assert latest() == new


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


@pytest.fixture
def own_configs(make: Make, tmp_path: Path) -> Path:
    """A folder with a loss of the user's own; the run runs/a was started with it."""
    folder = tmp_path / "my_conf"
    (folder / "loss").mkdir(parents=True)
    (folder / "loss" / "mine.yaml").write_text("defaults: [custom]\n_target_: evil.loss\n")
    (folder / "experiment").mkdir()
    make("a", f"hydra.searchpath=[file://{folder}]", "loss=mine")
    return folder


def test_configs_of_the_users_own_are_found_again(own_configs: Path) -> None:
    where = f"hydra.searchpath=[file://{own_configs}]"
    assert resume_overrides(["resume=runs/a", "trust=evil"]) == [where, "loss=mine", *IN_A]
    assert sorted(resume_overrides([where, "resume=runs/a"])) == sorted([where, "loss=mine", *IN_A])
    assert {where, "loss=mine", "resume=runs/a"} < {*resume_overrides([where, "loss=mine", "hydra.run.dir=runs/a"])}


@pytest.mark.parametrize("branch", [[], ["hydra.run.dir=runs/b"]])
def test_what_they_name_is_not_run_on_a_runs_own_word(own_configs: Path, branch: list[str]) -> None:
    with pytest.raises(PluginError, match=r"^a config of runs/a names loss._target_=evil.loss, .* add trust=evil$"):
        resume_overrides(["resume=runs/a", *branch])
    with pytest.raises(ConfigError, match=r"has a run with hydra.searchpath=\S+, not without"):
        resume_overrides(["loss=mine", "hydra.run.dir=runs/a"])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("hydra: {callbacks: {x: {_target_: evil.Hook}}}", "sets hydra.callbacks, which runs code"),
        ("hydra: {job: {env_set: {A: 1}}}", "sets hydra.job.env_set, which runs code"),
        (
            "hydra: {job_logging: '${hydra.runtime.choices.zz}', runtime: {choices: {zz: {handlers: {h: 1}}}}}",
            "sets hydra.job_logging, which runs code",
        ),
        ("logger: {wandb: {project: '${oc.env:SECRET}'}}", r"has logger.wandb.project=\$\{oc.env:SECRET}, which"),
    ],
)
def test_configs_run_and_read_nothing_on_a_runs_own_word(own_configs: Path, make: Make, values: str, said: str) -> None:
    (own_configs / "experiment" / "evil.yaml").write_text(f"# @package _global_\n{values}\n")
    where = f"hydra.searchpath=[file://{own_configs}]"
    make("b", where, "experiment=evil")
    with pytest.raises(ConfigError, match=f"^a config of runs/b {said}.* by --config-dir=FOLDER$"):
        resume_overrides(["resume=runs/b", "trust=evil"])
    assert where in resume_overrides([where, "resume=runs/b"])


@pytest.mark.parametrize(
    "override",
    [
        "logger.wandb.project=${oc.env:SECRET}", "logger.wandb.project='${oc.env:SECRET}'",
        r"logger.wandb.project=$\{oc.env\:SECRET\}", "+model={a:[${oc.env:SECRET}]}",
        "experiment=[../../../downloads/evil]", "loss=../evil", "+finetune@callbacks=../evil",
        "hydra.searchpath=[pkg://evil]", r"hydra.searchpath=[pkg\://evil]",
    ],
)  # fmt: skip
def test_a_run_looks_nothing_up_on_its_own_word(make: Make, override: str) -> None:
    make("a", "data.seed=${seed}", "finetune=../b", override)
    with pytest.raises(ConfigError, match=f"^runs/a was started with {re.escape(override)}, which reads other values"):
        resume_overrides(["resume=runs/a"])
    assert override in resume_overrides([override, "resume=runs/a"])


@pytest.mark.parametrize(
    "override",
    [
        "+logger.w._target_=lightning.pytorch.loggers.WandbLogger", "+logger.w={base_url:http://evil,api_key:x}",
        "logger.wandb.mode=online", "logger.wandb.entity=evil", "logger.mlflow.tracking_uri=http://evil",
        "logger=custom", "logger=[csv,mine]", "logger={wandb:{mode:online}}", "+callbacks@logger=ema",
        "+logger.csv.save_dir=/home", "+callbacks.c._target_=lightning.pytorch.callbacks.ModelCheckpoint",
        "+callbacks.c.dirpath=/home", "callbacks.pictures._target_=lightning.pytorch.callbacks.ModelCheckpoint",
        "callbacks={c:{dirpath:/home}}", "data.cache_dir=/home", "+data={cache_dir:/home}",
        "+data={cache\\_dir:/home}", "hydra.searchpath=[file:///home]",
    ],
)  # fmt: skip
def test_loggers_callbacks_and_folders_of_a_stranger_are_the_users_to_name(make: Make, override: str) -> None:
    """Of a run of the user's own they stay."""
    if "searchpath" not in override:
        make("a", override)
        assert override in resume_overrides(["resume=runs/a"])
    make("b", override, mine=False)
    make("c", "seed=1", override, mine=False, signature=signed([override])["signature"])  # of another run
    for run in ("runs/b", "runs/c", "runs/b/checkpoints/last.ckpt"):
        with pytest.raises(ConfigError, match=r"^runs/[bc] was not started by you here, .*repeat what you trust of "):
            resume_overrides([f"resume={run}"])
    with pytest.raises(ConfigError, match=r"^runs/b was not started by you"):
        resume_overrides(["resume=runs/b", "hydra.run.dir=runs/new"])
    make("d", mine=False)
    Path("runs/d/results.json").write_text(json.dumps({"status": "failed", "signature": signed([])["signature"]}))
    Path("runs/d/.hydra").mkdir()
    Path("runs/d/.hydra/overrides.yaml").write_text(json.dumps([override]))
    with pytest.raises(ConfigError, match=r"^runs/d was not started by you"):  # a signature of no overrides
        resume_overrides(["resume=runs/d"])
    if "searchpath" not in override:
        assert override in resume_overrides(["resume=runs/b", override])


@pytest.mark.parametrize(
    "override",
    [
        "logger=wandb", "logger=[csv,tensorboard]", "callbacks=[default,ema]", "callbacks.ema.decay=0.9",
        "~callbacks.pictures", "callbacks.pictures=null", "logger.wandb.mode=disabled", "data.root=/data/logger",
        "+trainer.profiler=simple", "experiment=demo",
    ],
)  # fmt: skip
def test_what_conf_has_is_taken_from_any_run(make: Make, override: str) -> None:
    make("a", override, mine=False)
    assert resume_overrides(["resume=runs/a"]) == [override, *IN_A]


@pytest.mark.parametrize("override", ["model={regularizer:evil.Net}", "model.regularizer=${tags}"])
def test_a_part_of_a_network_is_code_too(make: Make, override: str) -> None:
    make("a", override)
    with pytest.raises(PluginError, match=r"^runs/a names model.*, which is not part of qnmixer"):
        resume_overrides(["resume=runs/a"])


def test_the_line_for_who_stops_names_the_code(make: Make) -> None:
    composed = make("a", "seed=1") / ".hydra" / "config.yaml"
    composed.parent.mkdir()
    composed.write_text(
        "optimizer: {_target_: torch.optim.AdamW}\nloss: {_target_: evil.loss}\nlogger: {_target_: qnmixer.B}\n"
    )
    assert resume_hint(Path("runs/a")).endswith("resume=runs/a trust=evil")
    composed.unlink()
    assert resume_hint(Path("runs/a").rename("a b")).endswith("""python -m qnmixer.train 'resume="a b"'""")
