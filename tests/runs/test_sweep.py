import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from qnmixer.errors import ConfigError, DataError, Stopped, SweepFailed
from qnmixer.runs.records import amend, name_of_job, sweep_of
from qnmixer.runs.sweeps import jobs_of, place_jobs, rows_of, sweep, write_report
from qnmixer.settings.compose import compose_sweep, values_of

from ..conftest import csv_rows

# rich would take the brackets for its markup
FAULT = "rank 1: [/gloo/pair.cc:544] no, | [rank0]"

JOBS = [
    ({"strategy": "ddp", "optimizer.lr": "0.001"}, {"status": "done", "best": {"val/psnr": 30.25}, "seconds": 61.0}),
    ({"strategy": "ddp", "optimizer.lr": "0.01"}, {"status": "done", "best": {"val/psnr": 31.5}, "seconds": 62.0}),
    ({"strategy": "single", "optimizer.lr": "0.001"}, {"status": "failed", "error": f"RankFailed: {FAULT}"}),
]


def write_jobs(folder: Path) -> None:
    for number, (values, record) in enumerate(JOBS):
        (folder / str(number)).mkdir(parents=True)
        overrides = ["data.batch_size=2", *(f"{key}={value}" for key, value in values.items())]
        record = {"memory": {"measured_step": 1234.5}, **record, "overrides": overrides}
        (folder / str(number) / "results.json").write_text(json.dumps(record))


def described(*overrides: str) -> tuple[Path, list[str]]:
    """The folder that a sweep is given, and what varies in it."""
    # Nobody runs any job.
    with suppress(SweepFailed), sweep(list(overrides), compose_sweep("train", list(overrides))) as override:
        folder = Path(values_of([override])["hydra.sweep.dir"])
        found = sweep_of(folder / "0")
    assert found is not None
    assert found[0] == folder
    return folder.relative_to(Path.cwd()), found[1]["varying"]


def test_the_same_sweep_has_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, varying = described("strategy=ddp,fsdp", "trainer.devices=2", "optimizer.lr=1e-4,3e-4")
    assert varying == ["strategy", "optimizer.lr"]
    assert first.parts[:2] == ("runs", "sweeps")
    assert first.name.startswith("strategy-lr-")
    again = described(
        "strategy=ddp,fsdp", "trainer.devices=2", "optimizer.lr=1e-4,3e-4", "hydra.launcher.jobs_at_once=2"
    )
    assert again == (first, varying)
    other, _ = described("strategy=ddp,fsdp", "trainer.devices=4", "optimizer.lr=1e-4,3e-4")
    assert other != first
    assert described("seed=1,2", "hydra.sweep.dir=mine") == (Path("mine"), ["seed"])
    assert described("seed=1,2", "seed=3", "optimizer.lr=1,2")[1] == ["optimizer.lr"]


@pytest.mark.parametrize(("words", "part"), [
    ("optimizer.lr=interval(1,0)", "optimizer.lr=interval(1,0) cannot be searched (The `low` value must be smaller",),
    ("optimizer.lr=tag(log,interval(0,1))", "cannot be searched (The `low` value must be larger than 0"),
    ("optimizer.lr=interval(nan,1)", "optimizer.lr=interval(nan,1) cannot be searched"),
    ("seed=glob(*)", "seed=glob(*) has no value: give at least one"),
    ("+hydra.sweeper.params.seed='interval(3,1)'", "seed=interval(3,1) cannot be searched"),
    ("hydra.sweeper.n_trials=0", "hydra.sweeper.n_trials=0 should be greater than or equal to 1"),
])  # fmt: skip
def test_a_search_that_cannot_run_is_refused_before_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["hydra/sweeper=search", words]
    with pytest.raises(ConfigError) as raised, sweep(overrides, compose_sweep("train", overrides)):
        pass
    assert part in str(raised.value)
    assert not [*tmp_path.iterdir()]


def test_what_a_search_draws_varies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    search = ["hydra/sweeper=search", "optimizer.lr=interval(1e-4,1e-2)", "model.channels=16,32"]
    folder, varying = described(*search)
    assert varying == ["optimizer.lr", "model.channels"]
    assert described(*search, "hydra.sweeper.n_trials=40")[0] == folder  # the same search, only longer
    assert described(*search[:1], "+hydra.sweeper.params.seed='range(0,3)'")[1] == ["seed"]
    with pytest.raises(ConfigError, match=r"set hydra\.sweeper\.direction=minimize"):
        described(*search, "monitor=val/loss")
    described(*search, "metrics=rmse_hu", "monitor=val/rmse_hu", "hydra.sweeper.direction=minimize")


def test_no_sweep_begins_in_a_folder_of_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my sweep").mkdir()
    (tmp_path / "my sweep" / "mine.txt").touch()
    with pytest.raises(ConfigError, match=r"contains mine\.txt already: give a new folder"):
        described("seed=1,2", "hydra.sweep.dir='my sweep'")
    with pytest.raises(ConfigError, match="to resume a sweep, give its own command again"):
        described("seed=1,2", "resume=latest")


def begun(folder: Path, varying: Sequence[str] = (), jobs: dict[str, list[str]] | None = None) -> None:
    """A sweep's folder; without jobs as it is when its first jobs are about to be placed."""
    folder.mkdir(exist_ok=True)
    record = {"overrides": [], "varying": [*varying], "jobs": jobs}
    (folder / "sweep.json").write_text(json.dumps(record))


def test_a_job_runs_where_it_did_before(tmp_path: Path) -> None:
    """A search draws by outcomes, so it may draw other jobs after a failure is fixed."""
    begun(tmp_path)
    jobs = [["lr=1"], ["lr=2", "a=1"], ["lr=2", "a=1"]]  # it may draw the same twice
    places = place_jobs(tmp_path, jobs)
    assert [place.name for place in places] == ["0", "1", "2"]
    for overrides, place in zip(jobs, places, strict=True):
        place.mkdir()
        amend(place, overrides, status="done", error=None)
    begun(tmp_path)
    assert place_jobs(tmp_path, jobs) == places
    begun(tmp_path)
    assert [place.name for place in place_jobs(tmp_path, [["a=1", "lr=2"], ["lr=3"]])] == ["1", "3"]
    assert json.loads((tmp_path / "sweep.json").read_text())["jobs"] == {"1": ["a=1", "lr=2"], "3": ["lr=3"]}


def test_the_table_says_how_each_job_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Jobs are called by what differs."""
    info = {"overrides": [], "varying": ["strategy", "optimizer.lr"]}
    overrides = ["data.batch_size=2", "strategy=ddp", "optimizer.lr=0.0012520653814999472"]
    assert name_of_job(info, overrides) == "strategy=ddp, optimizer.lr=0.001252"  # type: ignore[arg-type]  # a TypedDict
    write_jobs(tmp_path)
    begun(tmp_path, ["strategy", "optimizer.lr"])
    write_report(tmp_path, rows_of(tmp_path))
    assert f"job 2: RankFailed: {FAULT}" in capsys.readouterr().out
    assert (tmp_path / "sweep.md").read_text().splitlines() == [
        "| job | strategy | optimizer.lr | status | val/psnr | seconds | peak MiB |",
        "|---|---|---|---|---|---|---|",
        "| 0 | ddp | 0.001 | done | 30.25 | 61.00 | 1234.50 |",
        "| 1 | ddp | 0.01 | done | 31.50 | 62.00 | 1234.50 |",
        "| 2 | single | 0.001 | failed | – | – | 1234.50 |",
        "",
        f"- job 2: RankFailed: {FAULT}",
    ]
    lines = csv_rows(tmp_path / "sweep.csv")
    assert [line["val/psnr"] for line in lines] == ["30.25", "31.5", ""]
    assert lines[2]["error"] == f"RankFailed: {FAULT}"
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "results.json").write_text("{}")
    begun(tmp_path)  # by a launcher that records no jobs
    assert [(row.status, row.numbers[0]) for row in rows_of(tmp_path)][1::2] == [("done", 31.5), ("not begun", None)]
    begun(tmp_path, ["seed"], {"1": ["seed=1"], "3": ["seed=3"]})
    rows = rows_of(tmp_path)
    assert [(row.name, row.values["seed"], row.status) for row in rows] == [("1", "1", "done"), ("3", "3", "not begun")]
    write_report(tmp_path, rows)
    assert f"means over seeds: python -m qnmixer.compare sweep={tmp_path}" in capsys.readouterr().out


def test_who_failed_is_named_whatever_the_sweeper_raises(tmp_path: Path) -> None:
    write_jobs(tmp_path)
    overrides = ["strategy=ddp,single", f"hydra.sweep.dir={tmp_path}"]
    (tmp_path / "sweep.json").write_text("{}")
    config = compose_sweep("train", overrides)
    with pytest.raises(SweepFailed, match="1 of 3 jobs failed: 2 "), sweep(overrides, config):
        raise ValueError("no trial is completed yet")
    with pytest.raises(Stopped, match="the same command runs"), sweep(overrides, config):
        raise KeyboardInterrupt
    assert (tmp_path / "sweep.csv").exists()


@pytest.mark.parametrize("name", ["../../other/0", "{outside}", "..", ".", "", "0/../0", "link", "\0"])
def test_a_sweep_names_folders_inside_it_only(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "other" / "0"
    sweep_folder = tmp_path / "runs" / "s"
    for folder in (outside, sweep_folder / "0"):
        folder.mkdir(parents=True)
        amend(folder, ["seed=1"], status="done", error=None)
    (sweep_folder / "link").symlink_to(outside)
    begun(sweep_folder, jobs={"0": ["seed=1"], name.format(outside=outside): ["seed=1"]})
    with pytest.raises(DataError, match=r"sweep\.json is damaged, .* is no folder in that of the sweep"):
        jobs_of(sweep_folder)
    begun(sweep_folder, jobs={"0": ["seed=1"], "1": ["seed=2"]})  # one that has not begun
    assert [*jobs_of(sweep_folder)] == [sweep_folder / "0", sweep_folder / "1"]
