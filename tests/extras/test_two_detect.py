"""2DeteCT: files of its layout, from discs whose line integrals are known."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.errors import ConfigError, DataError
from qnmixer.extras.pairs import views_of
from qnmixer.measurement.build import build_geometry
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.settings.run import section

from ..conftest import config_of
from ..sets import write_two_detect

tifffile = pytest.importorskip("tifffile")
pytestmark = pytest.mark.xdist_group("two_detect")  # its files are written once
MOVED, LATER = 2830, 2831
SIZE = 256


@cache
def scan(*overrides: str, size: int = SIZE) -> FanBeamGeometry:
    words = "data=two_detect", "geometry=two_detect", "data.root=set", "geometry.n_views=12", f"data.image_size={size}"
    return build_geometry(config_of("model=fbp", "logger=csv", *words, *overrides))


def module(root: Path, *overrides: str, **keys: Any) -> SliceDataModule:
    keys = {"root": str(root), "image_size": SIZE, "num_workers": 0} | keys
    return SliceDataModule(section("data", "two_detect", **keys), geometry=scan(*overrides, size=keys["image_size"]))


@cache
def projector(geometry: FanBeamGeometry) -> FanBeamProjector:
    return FanBeamProjector(geometry)


def misfit(image: torch.Tensor, y: torch.Tensor, geometry: FanBeamGeometry) -> float:
    """The norm of A x − y, in norms of y."""
    return float((projector(geometry)(image[None])[0] - y).norm() / y.norm())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw data and references in one root, as archives beside each other."""
    root = tmp_path_factory.mktemp("two_detect") / "set"
    write_two_detect(root / "slices", root / "slices_RecSeg", scan(), [MOVED, LATER, 3931, 4490, 4531], modes=[2])
    write_two_detect(root / "slices", root / "slices_RecSeg", scan(), [LATER], modes=[1])
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """The same files, to be spoilt one by one."""
    for file in written.rglob("*.tif"):
        link = tmp_path / "set" / file.relative_to(written)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    return tmp_path / "set"


@pytest.mark.filterwarnings("ignore:.*without mode1/sinogram")
@pytest.mark.parametrize(("part", "name", "mode"), [("train", MOVED, 2), ("train", LATER, 1), ("test", 4531, 2)])
def test_sinograms_are_line_integrals_of_the_references(written: Path, part: str, name: int, mode: int) -> None:
    """Before and after the shift of the detector, and with the shifted pixel of the reference corrected."""
    sample = module(written, mode=mode).dataset(part)[0]
    assert sample["name"] == f"slice{name:05d}"
    image, y = sample["image"], sample["sinogram"]
    assert y.shape == (1, 12, 956)
    right = misfit(image, y, scan())
    assert right < 0.005  # 0.007 with a detector one bin away
    assert min(misfit(image.roll(by, dims), y, scan()) for by in (1, -1) for dims in (1, 2)) > 2 * right


@pytest.mark.parametrize(("overrides", "first", "second"), [
    (["geometry.angle_span=-6.283185307179586"], 0, 3300),
    (["geometry.first_angle=-0.5235987755982988"], 3300, 0),
    (["geometry.first_angle=-1.0471975511965976", "geometry.angle_span=-3.141592653589793"], 3000, 2850),
])  # fmt: skip
def test_a_view_has_many_angles(overrides: list[str], first: int, second: int) -> None:
    """Clockwise, or from an angle outside of 0 to 360°: the set has all views of a turn."""
    views = views_of(scan(*overrides), 0.0, 2 * np.pi / 3600, 3600, "two_detect")
    assert views[:2] == [first, second]
    turned = np.degrees(scan(*overrides).angles()) - np.array(views) / 10
    np.testing.assert_allclose(turned / 360, np.rint(turned / 360), atol=1e-9)


@pytest.mark.parametrize("overrides", [["geometry.n_views=7"], ["geometry.first_angle=0.0001"]])
def test_views_that_were_not_measured(written: Path, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"view \d+ of geometry, at .* is not one of the 3600 measured views: use"):
        module(written, *overrides).setup()


def test_parts_are_those_of_the_benchmark(written: Path) -> None:
    data = module(written)
    data.setup()
    names = {part: [its.source.name(k) for k in range(len(its.source))] for part, its in data.parts.items()}
    assert names == {"train": ["slice02830", "slice02831"], "val": ["slice03931"], "test": ["slice04531"]}


def test_compressed_files_give_the_same(root: Path) -> None:
    before = module(root).dataset("val")[0]
    for file in root.rglob("slice03931/mode2/*.tif"):
        values = tifffile.imread(file)
        file.unlink()
        tifffile.imwrite(file, values, compression="zlib")
    after = module(root).dataset("val")[0]
    assert torch.equal(after["sinogram"], before["sinogram"])
    assert torch.equal(after["image"], before["image"])


def test_missing_files_are_said_once(root: Path, recwarn: pytest.WarningsRecorder) -> None:
    (root / "slices" / "slice02830" / "mode2" / "flat2.tif").unlink()
    assert module(root).dataset("train")[0]["name"] == "slice02831"
    (line,) = [str(it.message) for it in recwarn.list]
    assert "skipped 1 of its files or frames (1 without mode2/flat2.tif): slice02830" in line


BAD: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "files of another size than those of 2DeteCT": (lambda it: it[:, :-2], ["sinogram"]),
    "detector bins without light": (lambda it: it * 0, ["flat1", "flat2"]),
    "an unreadable or truncated sinogram.tif": (lambda it: it, ["sinogram"]),
}


@pytest.mark.parametrize("says", BAD)
def test_a_bad_slice_is_one_line_that_names_it(root: Path, says: str) -> None:
    change, names = BAD[says]
    for path in (root / "slices" / "slice03931" / "mode2" / f"{name}.tif" for name in names):
        values = change(tifffile.imread(path))
        path.unlink()
        tifffile.imwrite(path, values)
    if "truncated" in says:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=rf"slice03931 cannot be used .{says}") as error:
        module(root).dataset("val")[0]
    assert "\n" not in str(error.value)


def test_a_folder_without_slices(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no folder slice00001"):
        module(tmp_path).setup()
