"""metrics.csv: one row for each call that logs metrics, written at once."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

from qnmixer.files import naming, write_text


class MetricsFile(CSVLogger):
    """Lightning's logger, but a killed process loses at most the last row, and a resumed run keeps its rows.

    Lightning's own deletes an earlier file, and while it adds a column there is no file.

    `step` of a row is the number of optimizer steps done by then, like `global_step` in a checkpoint.

    Args:
        folder: the run folder.
        resumed_at: optimizer steps of the checkpoint that the run resumes from. Later rows are dropped. None: a new
            run, which replaces the file.
    """

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        super().__init__(folder, name="", version="")
        self.path, self.resumed_at = folder / "metrics.csv", resumed_at
        self._columns: list[str] | None = None  # of the file; None before the first row

    @property
    def experiment(self) -> Any:
        """This file: Lightning's own writer would delete an earlier one."""
        return self

    @rank_zero_only
    def log_hyperparams(self, params: Any = None) -> None:
        """Do nothing: .hydra/ has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:  # type: ignore[override]  # floats
        """Append a row."""
        row: dict[str, Any] = {"step": step, **metrics}
        if self._columns is None:
            self._rewrite(self.rows_before(), row)
        elif not row.keys() <= set(self._columns):
            self._rewrite(read_metrics(self.path), row)
        else:
            with naming(self.path), self.path.open("a", newline="", encoding="utf-8") as stream:
                stream.write(_lines(self._columns, [row]))

    def save(self) -> None:
        """Do nothing: each row is on the disk already."""

    def last_step(self) -> int:
        """The last step that has a row; 0 without any."""
        return max((int(row["step"]) for row in read_metrics(self.path)), default=0)

    def rows_before(self) -> list[dict[str, str]]:
        """The rows up to the step that the run resumes from; [] for a new run."""
        if self.resumed_at is None:
            return []
        return [row for row in read_metrics(self.path) if int(row["step"]) <= self.resumed_at]

    def _rewrite(self, rows: list[dict[str, str]], new: dict[str, Any]) -> None:
        # Every row of the file has all its columns, so the first one stands for all.
        columns = dict.fromkeys([*(name for row in [*rows[:1], new] for name in row)])
        self._columns = sorted(columns, key=lambda name: name not in ("step", "samples"))
        header = dict(zip(self._columns, self._columns, strict=True))
        write_text(self.path, _lines(self._columns, [header, *rows, new]))


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Rows of a metrics.csv, each with all columns, without an incomplete last line; [] if there is no file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    # A kill in the middle of a write leaves half a line.
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))


def _lines(columns: list[str], rows: list[dict[str, Any]]) -> str:
    stream = io.StringIO()
    csv.DictWriter(stream, columns, lineterminator="\n").writerows(rows)
    return stream.getvalue()
