"""The files of a run: damaged ones are one line within bounds of time and memory; rows of metrics.csv; signatures."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.limits import within_limits

from qnmixer.errors import DataError
from qnmixer.runs.loggers import MetricsFile
from qnmixer.runs.records import is_signed, own_modules, read_metrics, read_results, signed, signed_modules
from qnmixer.runs.run import overrides_of
from qnmixer.runs.sweeps import rows_of

BRACKETS = b"[" * 200_000
SWEEP = {"overrides": [], "varying": [], "jobs": None}


def rows(folder: Path) -> object:
    return MetricsFile(folder, resumed_at=9).kept_rows


@pytest.mark.parametrize(("name", "content", "read"), [
    ("metrics.csv", b"step,a\n1,2\n\0\0\0\n", rows),
    ("metrics.csv", b"step,a\n1,caf\xe9\n", rows),
    ("metrics.csv", b"step,a\n1,2,3\n", rows),
    ("metrics.csv", b"step,a\n1\n", rows),
    ("metrics.csv", b"a,b\n1,2\n", rows),
    ("metrics.csv", b"step,a\n" + b"1" * 5000 + b",2\n", rows),
    ("metrics.csv", b"step,a\n1," + b"x" * 200_000 + b"\n", rows),
    ("results.json", BRACKETS, read_results),
    ("results.json", b"{}" + b" " * 2**24, read_results),
    ("results.json", b'{"overrides": [1, {}]}', overrides_of),
    ("results.json", b'{"status": ["done"]}', read_results),
    ("results.json", b'{"status": "done", "steps": "many"}', read_results),
    ("sweep.json", json.dumps(SWEEP | {"jobs": ["0"]}).encode(), rows_of),
    ("sweep.json", json.dumps(SWEEP | {"jobs": {"0": "seed=1"}}).encode(), rows_of),
], ids=lambda it: it[:40].decode("latin-1") if isinstance(it, bytes) else None)  # fmt: skip
def test_a_damaged_record_is_a_line(tmp_path: Path, name: str, content: bytes, read: Callable[[Path], object]) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with within_limits(), pytest.raises(DataError, match=r"is damaged, or another program wrote it \(.*\): ") as error:
        read(tmp_path)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value)) < len(str(path)) + 250
    assert "\n" not in str(error.value)


# metrics.csv: its rows after a kill, after a resume, and when columns are added


def steps(folder: Path) -> list[int]:
    return [int(row["step"]) for row in read_metrics(folder / "metrics.csv")]


def logged(folder: Path, *numbers: int, resumed_at: int | None = None) -> None:
    file = MetricsFile(folder, resumed_at)
    for step in numbers:
        file.log_metrics({"train/loss": 1 / step}, step)


def test_a_row_is_on_the_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    """Columns are added as they come, and rows keep theirs."""
    file = MetricsFile(tmp_path)
    assert not list(tmp_path.iterdir())
    for step in (1, 2):
        file.log_metrics({"train/loss": 0.5, "samples": 8.0}, step)
        assert steps(tmp_path) == list(range(1, step + 1))
    file.log_metrics({"val/psnr": 30.0}, 2)
    text = "step,samples,train/loss,val/psnr\n1,8.0,0.5,\n2,8.0,0.5,\n2,,,30.0\n"
    assert (tmp_path / "metrics.csv").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint(tmp_path: Path) -> None:
    logged(tmp_path, 1, 2, 3, 4, 5)
    going_on = MetricsFile(tmp_path, resumed_at=3)
    assert going_on.experiment is going_on  # Lightning asks for it, and its own would delete the file
    assert going_on.last_step == 5
    going_on.log_metrics({"train/loss": 0.0, "new": 1.0}, 4)
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [(row["step"], row["train/loss"]) for row in rows] == [
        *((str(n), str(1 / n)) for n in (1, 2, 3)),
        ("4", "0.0"),
    ]
    logged(tmp_path, 1)  # from its beginning
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("torn", ["4,0.", "4", "\n4,", "4,0.25,0.2"], ids=repr)
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: str) -> None:
    logged(tmp_path, 1, 2, 3)
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text().rstrip("\n") + "\n" + torn)
    logged(tmp_path, 9, resumed_at=8)
    assert steps(tmp_path) == [1, 2, 3, 9]
    path.write_text("step,train")  # a torn header is no file
    logged(tmp_path, 1, resumed_at=0)
    assert steps(tmp_path) == [1]


# Signatures


def test_a_key_is_made_once_and_again_if_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    record = signed(["seed=1"])
    assert is_signed(record)
    assert not is_signed(record | {"overrides": ["seed=2"]})
    assert not is_signed({"signature": signed([])["signature"]})  # whose overrides are elsewhere
    assert {path.name for path in (tmp_path / "qnmixer").iterdir()} == {"key", "key.lock"}
    (tmp_path / "qnmixer" / "key").write_bytes(b"")
    assert not is_signed(record)
    assert is_signed(signed(["seed=1"]))


def test_without_a_place_for_a_key_no_run_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    record = signed([])
    assert record["signature"] is None
    assert not is_signed(record)


def test_only_a_run_of_this_user_may_import_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "mine"))
    record = signed(["a", "b"]) | signed_modules(["my_file"])
    for found, expected in (
        (record, ["my_file"]),
        (record | {"modules": ["my_file", "other"]}, []),  # a module that the run has not imported
        (record | {"modules": record["overrides"], "signature_of_modules": record["signature"]}, []),
        ({"modules": ["my_file"], "signature_of_modules": None}, []),
        ({}, []),
    ):
        (tmp_path / "results.json").write_text(json.dumps(found))
        assert own_modules(tmp_path) == expected
    (tmp_path / "results.json").write_text(json.dumps(record))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of_another"))
    assert own_modules(tmp_path) == []
