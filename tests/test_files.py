import os
from pathlib import Path

import pytest

from qnmixer.errors import DataError
from qnmixer.files import check_there, write_text
from qnmixer.weights import check_weights


def test_a_name_that_is_not_utf8_is_written(tmp_path: Path) -> None:
    write_text(tmp_path / "a.csv", os.fsdecode(b"caf\xe9.npy, 1"))
    assert (tmp_path / "a.csv").read_text() == "caf?.npy, 1"


@pytest.mark.parametrize("name", ["nowhere", "a" * 300, "", "b/" * 200, "~nobody_has_this_name/a"])
def test_a_missing_path_is_reported_by_its_key(name: str) -> None:
    with pytest.raises(DataError, match=r"^run=.{0,61} does not exist: give a folder$"):
        check_there("run", name, "a folder")


@pytest.mark.parametrize("key", ["run", "finetune"])
def test_no_name_is_not_this_folder(key: str) -> None:
    with pytest.raises(DataError, match=f"{key}= does not exist: give a run folder"):
        check_weights(key, "")
