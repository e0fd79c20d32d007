import errno
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.limits import within_limits
from torch.utils.data import DataLoader

from qnmixer.engine.cli.explain import explain
from qnmixer.engine.data.cache import SliceCache, open_cache
from qnmixer.engine.data.dataset import Part, SliceDataset
from qnmixer.engine.data.dicom import DicomReader
from qnmixer.engine.data.numpy_files import NumpyReader
from qnmixer.engine.data.scaling import build_scaling
from qnmixer.errors import DataError
from qnmixer.files import digest


def dicom(root: Path, cache: Path, size: int = 20) -> SliceCache:
    return open_cache(DicomReader(), root, size, cache_dir=cache)


def only_npy(cache: Path) -> Path:
    (file,) = cache.glob("*/*.npy")
    return file


@pytest.fixture
def folder(make_ct: Any, body_hu: Any, tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for i, z in enumerate((4, 2, 6)):
        make_ct(root / "p" / f"{i}.IMA", body_hu(seed=i), ImagePositionPatient=[0, 0, z])
    return root


def test_slices_are_sorted_by_position_and_resampled(folder: Path, tmp_path: Path) -> None:
    cache = dicom(folder, tmp_path / "cache")
    assert [cache.name(i) for i in range(3)] == ["p/1.IMA", "p/0.IMA", "p/2.IMA"]
    assert cache.load(0).shape == (20, 20)
    assert cache.load(0).mean() == pytest.approx(np.mean(dicom(folder, tmp_path / "c2", 40).load(0)), abs=5)


def test_second_opening_decodes_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = dicom(folder, tmp_path / "cache")
    monkeypatch.setattr(DicomReader, "read", lambda *_: pytest.fail("decoded again"))
    second = dicom(folder, tmp_path / "cache")
    np.testing.assert_array_equal(first.load(1), second.load(1))


def test_changed_sources_are_decoded_again(folder: Path, tmp_path: Path, make_ct: Any, body_hu: Any) -> None:
    assert len(dicom(folder, tmp_path / "cache")) == 3
    make_ct(folder / "p" / "new", body_hu(seed=50), ImagePositionPatient=[0, 0, 9])
    cache = dicom(folder, tmp_path / "cache")
    assert len(cache) == 4
    only_npy(tmp_path / "cache")
    make_ct(folder / "p" / "new", body_hu(seed=90), ImagePositionPatient=[0, 0, 9])
    assert dicom(folder, tmp_path / "cache").load(3)[10, 5] == pytest.approx(130, abs=1)


@pytest.mark.parametrize("damage", ["truncate", "delete", "index", "garbage"])
def test_damaged_cache_is_built_anew(folder: Path, tmp_path: Path, damage: str) -> None:
    whole = dicom(folder, tmp_path / "cache").load(2)
    file = only_npy(tmp_path / "cache")
    if damage == "truncate":
        os.truncate(file, file.stat().st_size - 4)
    elif damage == "delete":
        file.unlink()
    elif damage == "index":
        (file.parent / "index.json").write_text('{"fingerprint": ')
    else:
        file.write_bytes(b"x" * file.stat().st_size)
    np.testing.assert_array_equal(dicom(folder, tmp_path / "cache").load(2), whole)


def test_bad_files_among_good_ones_are_skipped_and_counted(
    folder: Path, make_ct: Any, body_hu: Any, tmp_path: Path
) -> None:
    (folder / "notes.txt").write_text("no DICOM")
    data = (folder / "p/0.IMA").read_bytes()
    (folder / "p/cut.IMA").write_bytes(data[: len(data) // 2])
    make_ct(folder / "p/air", np.full((40, 40), -1000.0))
    make_ct(folder / "p/no_rescale", RescaleSlope=None)
    cache = dicom(folder, tmp_path / "cache")
    assert len(cache) == 3
    assert sorted(name for name, _ in cache.skipped) == ["notes.txt", "p/air", "p/cut.IMA", "p/no_rescale"]
    assert dicom(folder, tmp_path / "cache").skipped == cache.skipped


def test_empty_folder_and_folder_without_ct_say_so(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    with pytest.raises(DataError, match="is empty"):
        dicom(tmp_path / "deep", tmp_path / "cache")
    with pytest.raises(DataError, match="does not exist"):
        dicom(tmp_path / "nowhere", tmp_path / "cache")
    (tmp_path / "deep" / "er" / "a.txt").write_text("hello")
    with pytest.raises(DataError, match=r"no usable slice.*1 not DICOM.*a\.txt.*CT images in DICOM"):
        dicom(tmp_path / "deep", tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_all_without_rescale_names_the_tags(make_ct: Any, tmp_path: Path) -> None:
    make_ct(tmp_path / "r" / "a", RescaleSlope=None)
    with pytest.raises(DataError, match=r"\(0028,1053\) RescaleSlope") as error:
        dicom(tmp_path / "r", tmp_path / "cache")
    assert "\n" not in str(error.value)


def test_non_square_slices_are_padded_with_air(make_ct: Any, body_hu: Any, tmp_path: Path) -> None:
    make_ct(tmp_path / "r" / "a", body_hu(31, 57))
    hu = dicom(tmp_path / "r", tmp_path / "cache", 57).load(0)
    np.testing.assert_array_equal(hu[13:44], body_hu(31, 57))
    assert (hu[:13] == -1000).all()


def test_nan_frame_of_a_stack_is_skipped_the_others_stay(body_hu: Any, tmp_path: Path) -> None:
    stack = np.stack([body_hu(seed=i) for i in range(3)])
    stack[1, 4, 4] = np.nan
    (tmp_path / "r").mkdir()
    np.save(tmp_path / "r" / "a.npy", stack)
    cache = open_cache(NumpyReader(), tmp_path / "r", 40, cache_dir=tmp_path / "cache")
    assert [cache.name(i) for i in range(len(cache))] == ["a.npy#0", "a.npy#2"]
    assert cache.skipped == [("a.npy#1", "NaN or infinite pixels")]


@pytest.mark.parametrize("field_of_view", [None, 40.0])
def test_every_size_keeps_the_same_slices(
    make_ct: Any, body_hu: Any, tmp_path: Path, field_of_view: float | None
) -> None:
    """A simulation on a finer grid takes slices by their number, so all sizes must have the same."""
    line, beside = np.full((64, 64), -1000), np.full((64, 64), -1000)
    line[30:32] = -450  # on a coarse grid it is thinner than air: below −500 HU
    beside[:, :8] = 40  # outside a field of 40 mm
    for name, hu in {"a": body_hu(64, 64), "b": line, "c": beside, "d": body_hu(64, 64)}.items():
        make_ct(tmp_path / "root" / name, hu, PatientID=name, PixelSpacing=[1, 1])
    kept = ["a", "b", "d"] if field_of_view else ["a", "b", "c", "d"]
    for size in (16, 32, 64, 128):
        cache = open_cache(
            DicomReader(), tmp_path / "root", size, cache_dir=tmp_path / "cache", field_of_view=field_of_view
        )
        assert [info.path for info in cache.infos] == kept
        assert np.isfinite([cache.load(index) for index in range(len(cache))]).all()


def test_numpy_files_that_are_no_slices(tmp_path: Path, body_hu: Any) -> None:
    root = tmp_path / "r"
    root.mkdir()
    np.save(root / "names.npy", np.array(["a", "b"]))
    np.save(root / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.save(root / "line.npy", np.arange(9.0))
    (root / "cut.npy").write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(DataError, match="no usable slice"):
        open_cache(NumpyReader(), root, 16, cache_dir=tmp_path / "cache")
    np.save(root / "unit.npy", (body_hu() + 1000) / 3000)
    with pytest.raises(DataError, match="not HU"):
        open_cache(NumpyReader(), root, 16, cache_dir=tmp_path / "cache")


BUILD = """
import sys, time
from pathlib import Path
from qnmixer.engine.data.cache import open_cache
from qnmixer.engine.data.dicom import DicomReader
class Slow(DicomReader):
    def read(self, root, path):
        with open(sys.argv[3], "a") as log: log.write(path + "\\n")
        time.sleep(float(sys.argv[4]))
        return super().read(root, path)
cache = open_cache(Slow(), Path(sys.argv[1]), 20, cache_dir=Path(sys.argv[2]))
print(len(cache), float(cache.load(2).sum()))
"""


def build_elsewhere(folder: Path, cache: Path, log: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(folder), str(cache), str(log), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once_decode_once(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    pair = [build_elsewhere(folder, tmp_path / "cache", log, 0.3) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in pair]
    assert all(process.returncode == 0 for process in pair), outputs
    assert outputs[0][0] == outputs[1][0]
    assert len(log.read_text().splitlines()) == 3


def test_killed_writer_leaves_nothing_that_is_taken_for_whole(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = build_elsewhere(folder, tmp_path / "cache", log, 2.0)
    deadline = time.monotonic() + 30
    while not (log.exists() and len(log.read_text().splitlines()) >= 2):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list((tmp_path / "cache").glob("*/.*.tmp"))
    cache = dicom(folder, tmp_path / "cache")
    assert len(cache) == 3
    assert not list((tmp_path / "cache").glob("*/.*.tmp"))
    assert cache.load(2).shape == (20, 20)


def test_full_disk_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    """A file-size limit of 4 KiB fails in the middle of the second slice, as a full disk does."""
    limit = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    )
    command = [sys.executable, "-c", limit + BUILD, str(folder), str(tmp_path / "cache"), os.devnull, "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert f"[Errno {errno.EFBIG}]" in result.stderr
    assert [path.name for path in (tmp_path / "cache").glob("*/*")] == ["lock"]


def test_cache_inside_the_root_is_not_taken_for_data(folder: Path) -> None:
    dicom(folder, folder / "cache")
    again = dicom(folder, folder / "cache")
    assert len(again) == 3
    assert not again.skipped


def test_names_on_disk_stay_as_they_are() -> None:
    """Of another form, every user would decode, build and measure again."""
    what = ["dicom", {"b": 1, "a": 2.5}]
    assert digest(what) == "40be42d8f05ad2c0"
    assert digest(what, 8, sort_keys=True) == "adfe7168"


def numpy_folder(root: Path, body_hu: Any, count: int = 3) -> Path:
    root.mkdir()
    for number in range(count):
        np.save(root / f"P{number}.npy", body_hu(seed=number))
    return root


def test_a_source_of_the_same_size_and_time_is_decoded_again(body_hu: Any, tmp_path: Path) -> None:
    root = numpy_folder(tmp_path / "root", body_hu)
    open_cache(NumpyReader(), root, 20, cache_dir=tmp_path / "cache")
    before = (root / "P0.npy").stat()
    np.save(root / "P0.npy", body_hu(seed=60))
    os.utime(root / "P0.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
    now = open_cache(NumpyReader(), root, 20, cache_dir=tmp_path / "cache")
    assert now.load(0)[10, 5] == pytest.approx(body_hu(seed=60)[20, 10], abs=1)


def test_no_damaged_byte_is_taken_for_a_slice(body_hu: Any, tmp_path: Path) -> None:
    """A damaged index is built again. Damaged pixels raise an error, and are built again at the next start."""
    root, rng = numpy_folder(tmp_path / "root", body_hu), random.Random(0)

    def opened() -> list[object]:
        cache = open_cache(NumpyReader(), root, 20, cache_dir=tmp_path / "cache")
        return [[cache.load(number).tobytes() for number in range(len(cache))], cache.infos, cache.skipped]

    right, told = opened(), list[str]()
    pixels, index = only_npy(tmp_path / "cache"), next((tmp_path / "cache").glob("*/index.json"))
    good = {path: path.read_bytes() for path in (pixels, index)}
    for number in range(50):
        for path, content in good.items():
            path.write_bytes(content)
        path, first = (pixels, 128) if number % 2 else (index, 0)
        damaged = bytearray(good[path])
        damaged[rng.randrange(first, len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with within_limits():
            try:
                assert opened() == right
            except DataError as error:
                told.append(str(error))
                assert opened() == right
    assert len(told) == 25
    assert all(re.search(r"has changed on the disk at P\d.npy: start again", line) for line in told)
    for path, content in good.items():
        path.write_bytes(content)
    index.write_text(json.dumps(json.loads(good[index]) | {"rows": [0, 0, 0]}))
    assert opened() == right


def test_what_a_worker_finds_damaged_is_one_line(body_hu: Any, tmp_path: Path) -> None:
    root = numpy_folder(tmp_path / "root", body_hu)
    cache = open_cache(NumpyReader(), root, 20, cache_dir=tmp_path / "cache")
    path = only_npy(tmp_path / "cache")
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    dataset = SliceDataset(Part(cache), build_scaling("attenuation", 2000.0))
    with pytest.raises(DataError, match="has changed on the disk") as raised:
        list(DataLoader(dataset, num_workers=1))
    assert "\n" in str(raised.value)
    line = explain(raised.value, "train")
    assert line is not None
    assert line.startswith(str(path))
    assert "\n" not in line


def test_what_a_run_reads_stays_when_another_builds(body_hu: Any, tmp_path: Path) -> None:
    """A worker that starts later opens the file by its name."""
    root = numpy_folder(tmp_path / "root", body_hu)
    first = open_cache(NumpyReader(), root, 20, cache_dir=tmp_path / "cache")
    for number in (7, 8):
        np.save(root / f"P{number}.npy", body_hu(seed=number))
        open_cache(NumpyReader(), root, 20, cache_dir=tmp_path / "cache")
    worker = pickle.loads(pickle.dumps(first))
    np.testing.assert_array_equal(worker.load(0), first.load(0))
    assert len([*(tmp_path / "cache").glob("*/*.npy")]) == 2  # of those that nobody reads only the last is left
    del first, worker
    np.save(root / "P9.npy", body_hu(seed=9))
    open_cache(NumpyReader(), root, 20, cache_dir=tmp_path / "cache")
    only_npy(tmp_path / "cache")


def test_a_file_that_is_cut_under_a_reader_is_reported(body_hu: Any, tmp_path: Path) -> None:
    cache = open_cache(NumpyReader(), numpy_folder(tmp_path / "root", body_hu), 20, cache_dir=tmp_path / "cache")
    os.truncate(only_npy(tmp_path / "cache"), 200)
    with pytest.raises(DataError, match="has changed on the disk"):
        cache.load(2)


@pytest.mark.parametrize("pattern", ["*/*.npy", "*/index.json"])
def test_a_pipe_in_place_of_a_cache_is_not_opened(body_hu: Any, tmp_path: Path, pattern: str) -> None:
    root = numpy_folder(tmp_path / "root", body_hu)
    open_cache(NumpyReader(), root, 20, cache_dir=tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob(pattern)
    path.unlink()
    os.mkfifo(path)
    assert len(open_cache(NumpyReader(), root, 20, cache_dir=tmp_path / "cache")) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("which", ["whole", "one"])
def test_the_cache_of_another_user_that_all_may_write_to_is_not_read(body_hu: Any, tmp_path: Path, which: str) -> None:
    root, cache = numpy_folder(tmp_path / "root", body_hu), tmp_path / "cache"
    open_cache(NumpyReader(), root, 20, cache_dir=cache)
    folder = cache if which == "whole" else only_npy(cache).parent
    os.chown(folder, 4711, -1)
    assert len(open_cache(NumpyReader(), root, 20, cache_dir=cache)) == 3
    folder.chmod(0o777)
    with pytest.raises(DataError, match=r"is another user's, and everybody may write to it.* data\.cache_dir="):
        open_cache(NumpyReader(), root, 20, cache_dir=cache)
