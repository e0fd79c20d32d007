"""The cache of decoded slices: what is kept, when it is built again, and what no damage passes for."""

import gc
import os
import random
import re
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.limits import within_limits

from qnmixer.data.cache import SliceCache, open_cache
from qnmixer.data.dicom import DicomReader
from qnmixer.data.numpy_files import NumpyReader
from qnmixer.data.slices import Slice
from qnmixer.errors import DataError
from qnmixer.settings.run import section

from .conftest import body_hu, item, make_ct


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three files of one slice."""
    (tmp_path / "root").mkdir()
    for number in range(3):
        np.save(tmp_path / "root" / f"P{number}.npy", body_hu(seed=number))
    return tmp_path / "root"


def opened(
    root: Path, size: int = 20, option: str = "numpy", field_of_view: float | None = None, **keys: Any
) -> SliceCache:
    keys = {"root": str(root), "cache_dir": str(root.with_name("cache"))} | keys
    return open_cache(section("data", option, **keys), size, field_of_view)


def only(root: Path, pattern: str = "*.f32") -> Path:
    """The one file of this kind in the cache."""
    (file,) = root.with_name("cache").glob(f"*/{pattern}")
    return file


def test_slices_are_sorted_resampled_and_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    for i, z in enumerate((4, 2, 6)):
        make_ct(root / "p" / f"{i}.IMA", body_hu(31, 57, seed=10 * i), ImagePositionPatient=[0, 0, z])
    cache, whole = opened(root, 20, "dicom"), opened(root, 57, "dicom")
    assert [cache.name(i) for i in range(3)] == ["p/1.IMA", "p/0.IMA", "p/2.IMA"]
    assert cache.load(0).shape == (20, 20)
    np.testing.assert_array_equal(whole.load(2)[13:44], body_hu(31, 57, seed=20))
    assert (whole.load(2)[:13] == -1000).all()  # air, to a square
    monkeypatch.setattr(DicomReader, "read", lambda *_: pytest.fail("decoded again"))
    np.testing.assert_array_equal(opened(root, 20, "dicom").load(1), cache.load(1))


def test_changed_sources_are_decoded_again(root: Path) -> None:
    opened(root)
    np.save(root / "P3.npy", body_hu(seed=50))
    assert len(opened(root)) == 4
    before = (root / "P0.npy").stat()
    np.save(root / "P0.npy", body_hu(seed=60))  # of the same size and time
    os.utime(root / "P0.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert opened(root).load(0)[10, 5] == pytest.approx(100, abs=1)


def test_bad_files_and_frames_among_good_ones_are_skipped_and_named(tmp_path: Path) -> None:
    root = tmp_path / "root"
    make_ct(root / "p/0.IMA")
    (root / "notes.txt").write_text("no DICOM")
    data = (root / "p/0.IMA").read_bytes()
    (root / "p/cut.IMA").write_bytes(data[: len(data) // 2])
    make_ct(root / "p/air", np.full((40, 40), -1000.0))
    frames = np.stack([body_hu(seed=i) for i in range(6)])
    frames[5] = -1000
    dataset = make_ct(root / "p/six", frames)
    groups = dataset.PerFrameFunctionalGroupsSequence
    for frame, words in {0: "ORIGINAL PRIMARY LOCALIZER", 3: "DERIVED PRIMARY AXIAL MAXIMUM"}.items():
        groups[frame].CTImageFrameTypeSequence = [item(FrameType=words.split())]
    groups[2].PixelValueTransformationSequence[0].RescaleSlope = 0
    dataset.save_as(root / "p/six")
    for derived in (False, False, True):  # the second time from the cache, which is inside of the folder
        cache = opened(root, 20, "dicom", cache_dir=str(root / "cache"), derived=derived)
        names, reasons = {cache.name(i) for i in range(len(cache))}, dict(cache.skipped)
        assert names == {"p/0.IMA", "p/six#1", "p/six#4"} | ({"p/six#3"} if derived else set())
        assert {*reasons} | names == {"notes.txt", "p/0.IMA", "p/air", "p/cut.IMA", *(f"p/six#{k}" for k in range(6))}
        assert len(reasons) + len(names) == 10
        assert reasons["p/six#0"] == "a localizer"
        assert reasons.get("p/six#3", "") == ("" if derived else "a derived image (MAXIMUM)")


@pytest.mark.parametrize(("option", "files", "says"), [
    ("dicom", None, r"data\.root=.*root does not exist: give the folder with the slices"),
    ("dicom", {}, "is empty"),
    ("dicom", {str(k): {"ImageType": ["DERIVED", "SECONDARY", "AXIAL", "MIP"], "PatientID": f"P{k}"} for k in range(4)},
     r"4 a derived image \(MIP\)\): 0, 1, 2, …; data\.derived=true takes derived images"),
    ("dicom", {"a.txt": b"hello"}, r"no usable slice.*1 not DICOM.*a\.txt.*give a folder with CT images in DICOM"),
    ("numpy", {"line.npy": np.arange(9.0), "cut.npy": b"\x93NUMPY\x01\x00"}, "no usable slice"),
    ("numpy", {"unit.npy": np.linspace(0, 1, 1600).reshape(40, 40)}, "not HU"),
    ("numpy", {"nan.npy": np.full((40, 40), np.nan)}, "NaN or infinite"),
])  # fmt: skip
def test_folders_of_no_use_say_so(root: Path, option: str, files: dict[str, Any] | None, says: str) -> None:
    for path in root.iterdir():
        path.unlink()
    for name, content in (files or {}).items():
        if isinstance(content, bytes):
            (root / name).write_bytes(content)
        elif isinstance(content, dict):
            make_ct(root / name, **content)
        else:
            np.save(root / name, content)
    if files is None:
        root.rmdir()
    with pytest.raises(DataError, match=says):
        opened(root, 20, option)
    assert not list(root.with_name("cache").rglob("*.f32"))


@pytest.mark.parametrize("field_of_view", [None, 40.0])
def test_every_size_keeps_the_same_slices(tmp_path: Path, field_of_view: float | None) -> None:
    """A simulation on a finer grid takes slices by their number, so all sizes must have the same."""
    line, beside = np.full((64, 64), -1000), np.full((64, 64), -1000)
    line[30:32] = -450  # on a coarse grid it is thinner than air: below −500 HU
    beside[:, :8] = 40  # outside a field of 40 mm
    for name, hu in {"line": line, "beside": beside}.items():
        make_ct(tmp_path / "root" / name, hu, PixelSpacing=[1, 1])
    for size in (16, 128):
        cache = opened(tmp_path / "root", size, "dicom", field_of_view)
        assert [info.path for info in cache.infos] == ["beside", "line"]


def build_elsewhere(root: Path, seconds: float) -> Any:
    """Start a process that opens the cache, logs each file, and takes its time."""
    read = NumpyReader.read

    def slow(reader: NumpyReader, folder: Path, path: str) -> Iterator[Slice]:
        with root.with_name("log").open("a") as stream:
            stream.write(f"{path}\n")
        time.sleep(seconds)
        return read(reader, folder, path)

    def build() -> None:
        NumpyReader.read = slow  # type: ignore[method-assign]
        assert len(opened(root)) == 3

    process = get_context("fork").Process(target=build)
    process.start()
    return process


def test_two_processes_at_once_decode_once(root: Path) -> None:
    pair = [build_elsewhere(root, 0.2) for _ in range(2)]
    for process in pair:
        process.join(60)
    assert [process.exitcode for process in pair] == [0, 0]
    assert len(root.with_name("log").read_text().splitlines()) == 3


def test_a_killed_writer_leaves_nothing_that_is_taken_for_whole(root: Path) -> None:
    process, log, deadline = build_elsewhere(root, 0.5), root.with_name("log"), time.monotonic() + 30
    while not (log.exists() and len(log.read_text().splitlines()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.join()
    assert only(root, ".*.tmp").exists()
    assert len(opened(root)) == 3
    assert not list(root.with_name("cache").glob("*/.*.tmp"))


def test_no_damage_is_taken_for_a_slice(root: Path) -> None:
    """A damaged index is built again. Damaged pixels raise an error, and are built again at the next start."""

    def content() -> list[object]:
        cache = opened(root)
        return [[cache.load(number).tobytes() for number in range(len(cache))], cache.infos, cache.skipped]

    right, told, rng = content(), list[str](), random.Random(0)
    good = {path: path.read_bytes() for path in (only(root), only(root, "*.json"))}
    for number in range(12):
        for path, its in good.items():
            path.write_bytes(its)
        path = [*good][number % 2]
        damaged = bytearray(good[path])
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged if number > 1 else damaged[:-4])
        with within_limits():
            try:
                assert content() == right
            except DataError as error:
                told.append(str(error))
                assert content() == right
    assert len(told) == 5
    assert all(re.search(r"has changed on the disk at P\d.npy: start again", line) for line in told)
    for path in good:
        path.unlink()
        os.mkfifo(path)  # to open it would not end
        assert content() == right


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("which", ["around", "folder", "file"])
def test_a_cache_that_another_user_may_have_written_is_not_read(root: Path, which: str) -> None:
    opened(root)
    folder = only(root).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    changed = {"around": root.with_name("cache"), "folder": folder, "file": only(root)}[which]
    os.chown(changed, 4711, -1)
    if which == "around":  # theirs, but this folder in it is ours
        assert len(opened(root)) == 3
        changed.chmod(0o777)
    with pytest.raises(DataError, match=rf"^{changed} cannot keep slices \(it is another .* data\.cache_dir="):
        opened(root)


@pytest.mark.skipif(os.name != "posix", reason="Windows removes no open file")
@pytest.mark.parametrize("how", ["added", "changed", "removed", "all but the lock"])
def test_a_reader_keeps_the_version_that_it_opened(root: Path, how: str) -> None:
    """Also in a worker that starts later."""
    first = opened(root)
    before = [first.load(i) for i in range(3)]
    pickles = [ForkingPickler.dumps(first) for _ in range(2)]
    for k in range(3):
        if how == "removed":
            (root / f"P{k}.npy").unlink()
            np.save(root / f"Q{k}.npy", body_hu(seed=9 * k))
        else:
            np.save(root / f"P{k + 9 * (how == 'added')}.npy", body_hu(seed=60 + k))
        opened(root)
    assert len([*root.with_name("cache").glob("*/*.f32")]) == 2  # the last version, and the one before
    if how == "all but the lock":
        for file in root.with_name("cache").glob("*/*.*"):
            file.unlink()
    assert not first._file.exists()
    late: list[SliceCache] = [first, *(ForkingPickler.loads(it) for it in pickles)]
    del first
    gc.collect()
    for cache in late:
        for index, hu in enumerate(before):
            np.testing.assert_array_equal(cache.load(index), hu)


def test_a_cache_lets_go_of_its_file(root: Path) -> None:
    opened(root)
    folder = Path(f"/proc/{os.getpid()}/fd")
    if not folder.is_dir():
        pytest.skip("this system does not list open files")
    gc.collect()
    open_files = len([*folder.iterdir()])
    for _ in range(20):
        opened(root).load(0)
    gc.collect()
    assert len([*folder.iterdir()]) <= open_files
