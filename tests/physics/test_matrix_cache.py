"""Matrices on disk: found again, mapped, rebuilt when damaged, and never in the way."""

import copy
import os
import pickle
import random
import resource
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.limits import within_limits
from torch import Tensor

from qnmixer.physics import FanBeamGeometry, FanBeamProjector, fbp, projector, sparse

GEOMETRY = FanBeamGeometry.paper(16, image_size=32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where matrices are kept, of which small ones are here worth it too; empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sparse, "WORTH_CACHING", 0)
    return tmp_path / "qnmixer" / "matrices"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been built so far."""
    done: list[str] = []

    def counted(build: Callable[..., object]) -> Callable[..., object]:
        return lambda *given: done.append(build.__name__) or build(*given)

    for room, name in ((projector, "_by_rays"), (fbp, "_by_pixels"), (FanBeamProjector, "_power_iteration")):
        monkeypatch.setattr(room, name, counted(getattr(room, name)))
    return done


def results(projector: FanBeamProjector) -> list[Tensor]:
    """A, Aᵀ and FBP of something, the gradient through FBP, which takes the matrix the other way, and both norms."""
    n = projector.geometry.image_size
    x = torch.rand(2, 1, n, n, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = projector(x)
    image = projector.fbp(y)
    (gradient,) = torch.autograd.grad(image.square().sum(), x)
    norms = torch.tensor([projector.operator_norm(), projector.safe_step_size()])
    return [y.detach(), projector.adjoint(y).detach(), image.detach(), gradient, norms]


EXPECTED = results(FanBeamProjector(GEOMETRY))
"""Of matrices that are too small to be on the disk."""


def as_expected(projector: FanBeamProjector) -> bool:
    return all(map(torch.equal, results(projector), EXPECTED))


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_the_second_time_all_is_mapped_and_nothing_changes_the_files(folder: Path, built: list[str]) -> None:
    assert as_expected(FanBeamProjector(GEOMETRY))
    kept = files(folder)
    assert (len(built), len(kept)) == (4, 4)
    projector = FanBeamProjector(GEOMETRY)
    assert as_expected(projector)
    assert len(built) == 4
    mapped = Path("/proc/self/maps").read_text()
    assert sum(str(path) in mapped for path in kept) == 2
    for twin in (copy.deepcopy(projector), pickle.loads(pickle.dumps(projector)), projector.to("cpu")):
        assert as_expected(twin)
    for buffer in projector.buffers():
        buffer.zero_()
    assert files(folder) == kept


def test_what_is_quick_to_build_is_built_once_and_leaves_the_disk_alone(
    folder: Path, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "WORTH_CACHING", 2**40)
    monkeypatch.setattr(sparse, "_small", {})  # without the scans of other tests
    geometry = replace(GEOMETRY, first_angle=0.1)
    expected = results(FanBeamProjector(geometry))
    for buffer in FanBeamProjector(geometry).buffers():
        buffer.zero_()
    assert all(map(torch.equal, results(FanBeamProjector(geometry)), expected))
    assert len(built) == 4
    for view in range(10):
        FanBeamProjector(replace(GEOMETRY, first_angle=0.2 + view / 10))
        assert len(sparse._small) <= 16
        if len(sparse._small) == 16:  # to ask for one of them forgets none
            FanBeamProjector(replace(GEOMETRY, first_angle=0.2 + view / 10))
            assert len(sparse._small) == 16
    assert not files(folder)


def test_another_scan_has_other_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = (
        {}, {"first_angle": 0.1}, {"angle_span": -GEOMETRY.angle_span}, {"source_to_axis": 601.0},
        {"beam": "fan_curved"}, {"detector_offset": 0.25}, {"beam": "parallel"},
    )  # fmt: skip
    for change in changes:
        FanBeamProjector(replace(GEOMETRY, **change))  # type: ignore[arg-type]  # numbers and words
    assert len(files(folder)) == 2 * len(changes)
    FanBeamProjector(replace(GEOMETRY, source_to_axis=np.float64(600), axis_to_detector=290))
    no_source = {"beam": "parallel", "source_to_axis": 0.0, "axis_to_detector": np.nan}
    FanBeamProjector(replace(GEOMETRY, **no_source))
    assert len(files(folder)) == 2 * len(changes)
    monkeypatch.setattr(sparse, "FORMAT", sparse.FORMAT + 1)
    FanBeamProjector(GEOMETRY)
    assert len(files(folder)) == 2 * len(changes) + 2
    assert FanBeamProjector(GEOMETRY, "hann").safe_step_size() > FanBeamProjector(GEOMETRY).safe_step_size()


def test_no_damaged_file_is_taken_for_a_matrix_or_a_norm(folder: Path, built: list[str]) -> None:
    """Flipped bits, zeros, cut, longer, another file's content, nothing, and a pipe, which never ends."""
    results(FanBeamProjector(GEOMETRY))
    rng, good = random.Random(0), files(folder)

    def flipped(content: bytes) -> bytes:
        place = rng.randrange(len(content))
        return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]

    damages = [lambda c: c[:-1], lambda c: c + b"\0", lambda c: b"", lambda c: bytes(len(c)), *[flipped] * 10]
    contents = [{path: damage(content) for path, content in good.items()} for damage in damages]
    for damaged in [*contents, dict(zip(good, reversed(good.values()), strict=True))]:
        for path, content in damaged.items():
            path.write_bytes(content)
        built.clear()
        with within_limits():
            assert as_expected(FanBeamProjector(GEOMETRY))
        assert len(built) == 4
    for path in good:
        path.unlink()
        os.mkfifo(path)
    assert as_expected(FanBeamProjector(GEOMETRY))


@pytest.mark.parametrize("trouble", ["no folder", "full disk"])
def test_a_disk_that_takes_nothing_costs_only_the_caching(
    trouble: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trouble == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    try:
        with pytest.warns(UserWarning, match="no cache on disk .*builds the matrices of the scan again$") as caught:
            assert as_expected(FanBeamProjector(GEOMETRY))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any("\n" in str(warning.message) for warning in caught)
    assert all(size < 50_000 for size in map(len, files(folder).values()))
    assert not list(folder.glob("*.tmp"))


@pytest.mark.filterwarnings("ignore:no cache on disk")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("which", ["folder", "file"])
def test_matrices_that_another_user_may_have_written_are_not_read(folder: Path, built: list[str], which: str) -> None:
    results(FanBeamProjector(GEOMETRY))
    assert folder.stat().st_mode & 0o777 == 0o700
    os.chown(folder if which == "folder" else next(iter(files(folder))), 4711, -1)
    with pytest.warns(UserWarning, match=r"no cache on disk \(it is another user's"):
        assert as_expected(FanBeamProjector(GEOMETRY))
    assert len(built) == 8


def test_processes_at_once_build_once(folder: Path, built: list[str]) -> None:
    """And share the files with this process."""
    children = []
    for _ in range(3):
        if not (child := os.fork()):
            with warnings.catch_warnings(action="error"):
                good = as_expected(FanBeamProjector(GEOMETRY))
            (folder.parent / str(os.getpid())).write_text(" ".join(built))
            os._exit(0 if good else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert sum(len((folder.parent / str(child)).read_text().split()) for child in children) == 4
    assert as_expected(FanBeamProjector(GEOMETRY))
    assert built == []
