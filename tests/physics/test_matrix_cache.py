"""Matrices on disk: found again, mapped, rebuilt when damaged, and never in the way."""

import copy
import hashlib
import os
import pickle
import random
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.limits import within_limits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qnmixer.physics import FanBeamGeometry, FanBeamProjector, matrix_cache

GEOMETRY = FanBeamGeometry.paper(16, image_size=32)
BUILD = """
import sys
from qnmixer.physics import FanBeamGeometry, FanBeamProjector, matrix_cache
matrix_cache.WORTH_CACHING = 0
build = matrix_cache._build_shown
matrix_cache._build_shown = lambda kind, *rest: print(f"built {kind}", file=sys.stderr) or build(kind, *rest)
print("ready", flush=True)
sys.stdin.readline()
projector = FanBeamProjector(FanBeamGeometry.paper(16, image_size=32))
print(sum(float(buffer.double().sum()) for buffer in projector.buffers()))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where matrices are kept, of which small ones are here worth it too; empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(matrix_cache, "WORTH_CACHING", 0)
    return tmp_path / "qnmixer" / "matrices"


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")  # torch's, once a process
        yield


def results(projector: FanBeamProjector) -> list[Tensor]:
    """A, Aᵀ and FBP of something, and the gradient through FBP, which takes the matrix the other way."""
    n = projector.geometry.image_size
    x = torch.rand(2, 1, n, n, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = projector(x)
    image = projector.fbp(y)
    (gradient,) = torch.autograd.grad(image.square().sum(), x)
    return [y.detach(), projector.adjoint(y).detach(), image.detach(), gradient]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


@pytest.fixture
def expected() -> list[Tensor]:
    """What a projector gives whose matrices were never on disk."""
    assert not matrix_cache.is_worth_caching(GEOMETRY)
    return results(FanBeamProjector(GEOMETRY))


def test_small_matrices_leave_the_disk_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    FanBeamProjector(GEOMETRY).safe_step_size()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_warning")
def test_the_second_time_they_are_mapped(expected: list[Tensor], folder: Path) -> None:
    assert same(results(FanBeamProjector(GEOMETRY)), expected)
    before = {path: path.stat().st_ino for path in folder.glob("*.matrix")}
    assert len(before) == 2
    projector = FanBeamProjector(GEOMETRY)
    assert same(results(projector), expected)
    assert {path: path.stat().st_ino for path in folder.glob("*.matrix")} == before
    mapped = Path("/proc/self/maps").read_text()
    assert all(str(path) in mapped for path in before)


def test_another_scan_has_other_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        GEOMETRY,
        replace(GEOMETRY, first_angle=0.1),
        replace(GEOMETRY, angle_span=-GEOMETRY.angle_span),
        replace(GEOMETRY, source_to_axis=601.0),
        replace(GEOMETRY, beam="fan_curved"),
        replace(GEOMETRY, detector_offset=0.25),
        replace(GEOMETRY, beam="parallel"),
    ]
    for geometry in others:
        FanBeamProjector(geometry)
    assert len(list(folder.glob("*.matrix"))) == 2 * len(others)
    FanBeamProjector(replace(GEOMETRY, source_to_axis=np.float64(600), axis_to_detector=290))
    FanBeamProjector(replace(GEOMETRY, beam="parallel", source_to_axis=1.0))  # it has no source
    assert len(list(folder.glob("*.matrix"))) == 2 * len(others)
    monkeypatch.setattr(FanBeamGeometry, "has_quarter_turn_symmetry", False)
    FanBeamProjector(GEOMETRY)
    assert len(list(folder.glob("*.matrix"))) == 2 * len(others) + 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "header", "length", "other key", "longer"])
def test_damaged_files_are_built_anew(damage: str, expected: list[Tensor], folder: Path) -> None:
    FanBeamProjector(GEOMETRY)
    for path in folder.glob("*.matrix"):
        whole = path.read_bytes()
        path.unlink()
        path.write_bytes(
            {
                "truncated": whole[:-100],
                "empty": b"",
                "header": whole[:40] + b"\0" * 20 + whole[60:],
                "length": whole[:15] + b"\xff" * 8 + whole[23:],
                "other key": whole.replace(b'"format": 2', b'"format": 0', 1),
                "longer": whole + b"\0",
            }[damage]
        )
        assert path.read_bytes() != whole
    assert same(results(FanBeamProjector(GEOMETRY)), expected)
    assert all(path.read_bytes()[:15] == b"qnmixer matrix\n" for path in folder.glob("*.matrix"))
    before = {path: path.stat().st_ino for path in folder.glob("*.matrix")}
    FanBeamProjector(GEOMETRY)
    assert {path: path.stat().st_ino for path in folder.glob("*.matrix")} == before


def test_another_format_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FanBeamProjector(GEOMETRY)
    monkeypatch.setattr(matrix_cache, "FORMAT", matrix_cache.FORMAT + 1)
    FanBeamProjector(GEOMETRY)
    assert len(list(folder.glob("*.matrix"))) == 4


def test_a_folder_that_cannot_be_written_costs_only_the_caching(
    expected: list[Tensor], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        projector = FanBeamProjector(GEOMETRY)
        projector.operator_norm()
    assert same(results(projector), expected)
    assert len(caught) == 1
    assert "Not a directory" in str(caught[0].message)
    assert "\n" not in str(caught[0].message)


def test_a_full_disk_costs_only_the_caching(expected: list[Tensor], folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.warns(UserWarning, match="built again at every start"):
            projector = FanBeamProjector(GEOMETRY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same(results(projector), expected)
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_the_least_recently_used_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (replace(GEOMETRY, first_angle=angle) for angle in (0.1, 0.2, 0.3))
    names: list[set[str]] = []
    kept = FanBeamProjector(first)
    before = results(kept)
    names.append({path.name for path in folder.glob("*.matrix")})
    size = sum(path.stat().st_size for path in folder.glob("*.matrix"))
    FanBeamProjector(second)
    names.append({path.name for path in folder.glob("*.matrix")} - names[0])
    for path in folder.glob("*.matrix"):
        os.utime(path, (1, 2 if path.name in names[0] else 1))
    killed = folder / f".killed.matrix.{'0a' * 16}.tmp"
    killed.touch()
    monkeypatch.setattr(matrix_cache, "LIMIT", int(2.05 * size))
    FanBeamProjector(third)
    left = {path.name for path in folder.iterdir()}
    assert names[0] < left
    assert not names[1] & left
    assert killed.name not in left
    for path in folder.glob("*.matrix"):
        os.utime(path, (1, 1))
    monkeypatch.setattr(matrix_cache, "LIMIT", int(1.05 * size))
    FanBeamProjector(second)
    assert not names[0] & {path.name for path in folder.iterdir()}
    assert same(results(kept), before)  # who has a file mapped keeps it


def test_what_was_used_lately_stays_and_the_new_one_goes(
    expected: list[Tensor], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine may have it mapped over a network."""
    FanBeamProjector(replace(GEOMETRY, first_angle=0.1))
    before = sorted(folder.glob("*.matrix"))
    monkeypatch.setattr(matrix_cache, "LIMIT", sum(path.stat().st_size for path in before))
    assert same(results(FanBeamProjector(GEOMETRY)), expected)
    assert sorted(folder.glob("*.matrix")) == before


@pytest.mark.filterwarnings("ignore:no cache on disk")
def test_without_a_home_nothing_is_kept(expected: list[Tensor], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")  # as pathlib says, for a user that the system lacks

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    projector = FanBeamProjector(GEOMETRY)
    assert same(results(projector), expected)
    assert projector.operator_norm() > 0


def test_another_layout_needs_another_format() -> None:
    """What the matrices of one scan hold; where this fails for good reason, raise FORMAT and write down the new one."""
    projector = FanBeamProjector(GEOMETRY)
    digest = hashlib.sha256()
    stored = ("starts", "pixels", "values", "starts_t", "rays", "values_t")
    for name, buffer in projector.named_buffers():
        if name.rpartition(".")[2] not in stored:
            continue
        # Of the values what rounding leaves alone.
        content = buffer if not buffer.is_floating_point() else buffer.double().sum(0, keepdim=True).round(decimals=1)
        digest.update(content.numpy().tobytes())
    assert (matrix_cache.FORMAT, digest.hexdigest()[:16]) == (2, "e920af00b62fd78b")


def test_use_counts_as_use(folder: Path) -> None:
    FanBeamProjector(GEOMETRY)
    for path in folder.glob("*.matrix"):
        os.utime(path, (1, 1))
    FanBeamProjector(GEOMETRY)
    assert all(path.stat().st_mtime > 1 for path in folder.glob("*.matrix"))


def test_what_is_over_the_limit_alone_is_not_kept(
    expected: list[Tensor], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_cache, "LIMIT", 1000)
    assert same(results(FanBeamProjector(GEOMETRY)), expected)
    assert not list(folder.glob("*.matrix"))


@pytest.mark.usefixtures("no_warning")
def test_mapped_matrices_are_like_others(expected: list[Tensor], folder: Path) -> None:
    FanBeamProjector(GEOMETRY)
    content = {path: path.read_bytes() for path in folder.glob("*.matrix")}
    projector = FanBeamProjector(GEOMETRY)
    for twin in (copy.deepcopy(projector), pickle.loads(pickle.dumps(projector)), projector.to("cpu")):
        assert same(results(twin), expected)
    assert same(results(copy.deepcopy(projector).double().float()), expected)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert projector.fbp(projector(torch.empty(2, 1, 32, 32))).shape == (2, 1, 32, 32)
    child = os.fork()
    if child == 0:
        os._exit(0 if same(results(projector), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    for buffer in projector.buffers():
        buffer.zero_()
    assert {path: path.read_bytes() for path in folder.glob("*.matrix")} == content


def test_processes_at_once_share_one_file(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outcomes = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], outcomes
    built = [line for _, err in outcomes for line in err.splitlines()]
    assert len(built) == len({*built}) == 2, built
    assert len({out for out, _ in outcomes}) == 1
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".matrix", ".matrix"]


def test_norms_are_kept_with_the_matrices(folder: Path) -> None:
    first = FanBeamProjector(GEOMETRY)
    norm, step = first.operator_norm(), first.safe_step_size()
    second = FanBeamProjector(GEOMETRY)
    assert (second.operator_norm(), second.safe_step_size()) == (norm, step)
    kept = {path: path.stat().st_ino for path in folder.glob("*.json")}
    third = FanBeamProjector(GEOMETRY)
    assert (third.operator_norm(), third.safe_step_size()) == (norm, step)
    assert {path: path.stat().st_ino for path in folder.glob("*.json")} == kept
    assert FanBeamProjector(GEOMETRY, "hann").safe_step_size() > step
    for path in folder.glob("*.json"):
        path.write_text(path.read_text()[:20])
    assert FanBeamProjector(GEOMETRY).operator_norm() == norm


def test_no_flipped_bit_is_taken_for_a_matrix(expected: list[Tensor], folder: Path) -> None:
    """Nor an array of zeros, whose length is right."""
    FanBeamProjector(GEOMETRY)
    good = {path: path.read_bytes() for path in folder.glob("*.matrix")}
    rng = random.Random(0)
    for number in range(40):
        for path, content in good.items():
            damaged = bytearray(content)
            if number == 0:
                damaged[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
            else:
                damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
        with within_limits():
            assert same(results(FanBeamProjector(GEOMETRY)), expected)


@pytest.mark.parametrize("value", ["0", "-1", "1e30", "Infinity"])
def test_no_other_number_is_taken_for_a_norm(folder: Path, value: str) -> None:
    assert matrix_cache.load_or_compute("norm", GEOMETRY, lambda: 3.25) == 3.25
    (path,) = folder.glob("*.json")
    path.write_text(path.read_text().replace("3.25", value))
    assert matrix_cache.load_or_compute("norm", GEOMETRY, lambda: 3.25) == 3.25
    assert matrix_cache.load_or_compute("norm", GEOMETRY, lambda: 4.0) == 3.25  # kept again


def test_a_pipe_in_place_of_a_file_is_not_opened(expected: list[Tensor], folder: Path) -> None:
    FanBeamProjector(GEOMETRY).operator_norm()
    for path in [*folder.glob("*.matrix"), *folder.glob("*.json")]:
        path.unlink()
        os.mkfifo(path)
    projector = FanBeamProjector(GEOMETRY)
    assert projector.operator_norm() > 0
    assert all(torch.equal(a, b) for a, b in zip(results(projector), expected, strict=True))


@pytest.mark.filterwarnings("ignore:no cache on disk")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_matrices_of_another_user_that_all_may_write_to_are_not_read(expected: list[Tensor], folder: Path) -> None:
    norm = FanBeamProjector(GEOMETRY).operator_norm()
    for path in folder.glob("*.matrix"):
        os.utime(path, (1, 1))
    os.chown(folder, 4711, -1)
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="another user's, and everybody may write to it"):
        projector = FanBeamProjector(GEOMETRY)
    assert projector.operator_norm() == norm
    assert same(results(projector), expected)
    assert all(path.stat().st_mtime == 1 for path in folder.glob("*.matrix"))  # reading sets it
