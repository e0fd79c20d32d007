"""The one reader of what a run leaves behind: results.json, sweep.json and metrics.csv.

A run folder may come from anybody. So sizes are bounded, and what no run writes so is one DataError.
No torch import.
"""

import csv
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qnmixer.engine.config.values import converted
from qnmixer.errors import ConfigError, DataError

_MOST = 2**23
_MOST_ROWS = 2**28
"""Bytes of a record. Those of a long run have a tenth of them."""
_FIX = "give another folder, or write it again"
_NUMBERS = ("samples", "train/samples_per_second", "train/grad_norm_max", "val/psnr")
"""Columns of metrics.csv that others than people read."""


def damaged(path: Path, why: str, fix: str = _FIX) -> DataError:
    """The error for a record that no run wrote so."""
    return DataError(f"{path} is damaged, or another program wrote it ({why}): {fix}")


def read_text(path: Path, most: int = _MOST, fix: str = _FIX) -> str:
    """The text of a record. Raises DataError if it has more bytes than `most`, NUL bytes, or is not UTF-8."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:  # a pipe would never end
        content = stream.read(most + 1)
    if len(content) > most:
        raise damaged(path, f"more than {most >> 20} MiB", fix)
    if b"\0" in content:
        raise damaged(path, "it has NUL bytes", fix)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise damaged(path, "it is not UTF-8", fix) from error


def read_json(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object. Raises DataError if it is none, or if one of its keys has another type.

    kinds: types by key. A key may be missing.
    """
    try:
        record = json.loads(read_text(path))
    except (ValueError, RecursionError):  # the latter: 200,000 brackets
        record = None
    if not isinstance(record, dict):
        raise damaged(path, "it is no JSON object")
    for key in kinds.keys() & record.keys():
        try:
            record[key] = converted(key, record[key], kinds[key])
        except ConfigError as error:  # its message has the value, which may be anything
            raise damaged(path, f"its entry {key}") from error
    return record


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The rows of a metrics.csv, each with all columns, without an incomplete last line; [] if there is no file.

    Raises DataError for a row with other columns, without a step, or with a text for a number.
    """
    fix = "remove that line, or the file: only curves are lost"
    text = read_text(path, _MOST_ROWS, fix) if path.is_file() else ""
    # A kill in the middle of a write leaves half a line.
    reader, rows = csv.reader(io.StringIO(text[: text.rfind("\n") + 1])), []
    try:
        columns = next(reader, ["step"])
        numbers = [name for name in _NUMBERS if name in columns]
        if "step" not in columns or len({*columns}) < len(columns):
            raise ValueError("names of columns")
        for cells in filter(None, reader):
            row = dict(zip(columns, cells, strict=True))
            if not 0 <= int(row["step"]) < 2**62:
                raise ValueError("step")
            for name in numbers:
                float(row[name] or 0)
            rows.append(row)
    except (csv.Error, ValueError) as error:
        raise damaged(path, f"line {reader.line_num}", fix) from error
    return rows
