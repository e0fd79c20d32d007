"""Tables as text: CSV for programs, Markdown for people."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any


def csv_table(rows: Iterable[Sequence[Any]]) -> str:
    """Rows, the headings first, as CSV."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, without a newline at its end."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (headings, *rows)]
    first, *others = (f"| {line} |" for line in lines)
    return "\n".join([first, f"|{'---|' * len(headings)}", *others])
