"""metrics.csv: its rows after a kill, after a resume, and when columns are added."""

from pathlib import Path

import pytest

from qnmixer.runs.loggers import MetricsFile
from qnmixer.runs.records import read_metrics


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
