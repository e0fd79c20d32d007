import os
from pathlib import Path

from qnmixer.files import write_text


def test_a_name_that_is_not_utf8_is_written(tmp_path: Path) -> None:
    write_text(tmp_path / "a.csv", os.fsdecode(b"caf\xe9.npy, 1"))
    assert (tmp_path / "a.csv").read_text() == "caf?.npy, 1"
