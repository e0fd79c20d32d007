import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qnmixer.errors import DataError
from qnmixer.files import atomic_file, check_there, make_free_folder, write_text
from qnmixer.reconstruction.weights import check_weights


def test_a_name_that_is_not_utf8_is_written(tmp_path: Path) -> None:
    write_text(tmp_path / "a.csv", os.fsdecode(b"caf\xe9.npy, 1"))
    assert (tmp_path / "a.csv").read_text() == "caf?.npy, 1"


def test_an_error_of_the_disk_names_the_file(tmp_path: Path) -> None:
    """The system does not, for a file that is open."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "a"
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError) as error, atomic_file(path) as stream:  # noqa: PT011 - its text is not the point
            stream.write(bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.filename == str(path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["nowhere", "a" * 300, "", "b/" * 200, "~nobody_has_this_name/a"])
def test_a_missing_path_is_reported_by_its_key(name: str) -> None:
    with pytest.raises(DataError, match=r"^run=.{0,61} does not exist: give a folder$"):
        check_there("run", name, "a folder")
    for key in ("run", "finetune"):  # no name is not this folder
        with pytest.raises(DataError, match=f"{key}= does not exist: give a run folder"):
            check_weights(key, "")


def test_of_several_that_want_a_folder_each_gets_its_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(make_free_folder, [tmp_path / "runs" / "12-00-00"] * 8)]
    names = {"12-00-00", *(f"12-00-00_{n}" for n in range(1, 8))}
    assert {folder.name for folder in found} == names
    assert {folder.name for folder in (tmp_path / "runs").iterdir()} == names
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_free_folder(tmp_path / "file" / "12-00-00")
