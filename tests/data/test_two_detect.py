"""2DeteCT: files of its layout, from discs whose line integrals are known."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.engine.config import parse
from qnmixer.engine.config.compose import compose
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.pairs import views_of
from qnmixer.engine.data.slices import SkipFile
from qnmixer.engine.reconstructor import build_geometry
from qnmixer.errors import ConfigError, DataError
from qnmixer.extras.two_detect import line_integrals
from qnmixer.physics import FanBeamProjector

from ..sets import write_two_detect

tifffile = pytest.importorskip("tifffile")
MOVED, LATER = 2830, 2831
SIZE = 256


def config(root: Path, *overrides: str) -> Any:
    words = "data=two_detect", "geometry=two_detect", f"data.root={root}", "geometry.n_views=12", "data.num_workers=0"
    keys = f"data.image_size={SIZE}", f"data.cache_dir={root.parent / 'cache'}", "logger=csv"
    return parse(compose("train", ["model=fbp", *keys, *words, *overrides]))


def module(root: Path, *overrides: str) -> SliceDataModule:
    its = config(root, *overrides)
    return SliceDataModule(its.data, geometry=build_geometry(its))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw data and references in one root, as archives beside each other."""
    root = tmp_path_factory.mktemp("two_detect") / "set"
    numbers = [MOVED, LATER, 3931, 4490, 4531]
    write_two_detect(root / "slices", root / "slices_RecSeg", build_geometry(config(root)), numbers)
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """The same files, to be spoilt one by one."""
    for file in written.rglob("*.tif"):
        link = tmp_path / "set" / file.relative_to(written)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    return tmp_path / "set"


@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize(("part", "index"), [("train", 0), ("train", 1), ("test", 0)])
def test_sinograms_are_line_integrals_of_the_references(written: Path, part: str, index: int, mode: int) -> None:
    """Before and after the shift of the detector, and with the shifted pixel of the reference corrected."""
    sample = module(written, f"data.mode={mode}").dataset(part)[index]
    projector = FanBeamProjector(build_geometry(config(written)))
    y = sample["sinogram"]
    assert y.shape == (1, 12, 956)
    misfit = [
        float((projector(image[None])[0] - y).norm() / y.norm())
        for image in (sample["image"], *(sample["image"].roll(by, dims) for by in (1, -1) for dims in (1, 2)))
    ]
    assert misfit[0] < 0.01
    assert min(misfit[1:]) > 2 * misfit[0]


@pytest.mark.parametrize(
    ("overrides", "first", "second"),
    [
        (["geometry.angle_span=-6.283185307179586"], 0, 3300),
        (["geometry.first_angle=-0.5235987755982988"], 3300, 0),
        (["geometry.first_angle=6.283185307179586"], 0, 300),
        (["geometry.first_angle=-7.330382858376184", "geometry.angle_span=-3.141592653589793"], 3000, 2850),
    ],
)
def test_a_view_has_many_angles(written: Path, overrides: list[str], first: int, second: int) -> None:
    """Clockwise, or from an angle outside of 0 to 360°: the set has all views of a turn."""
    its = build_geometry(config(written, *overrides))
    views = views_of(its, 0.0, 2 * np.pi / 3600, 3600, "two_detect")
    assert views[:2] == [first, second]
    turned = np.degrees(its.angles()) - np.array(views) / 10
    np.testing.assert_allclose(turned / 360, np.rint(turned / 360), atol=1e-9)


def test_clockwise_sinograms_are_line_integrals_of_the_references(written: Path) -> None:
    overrides = ["geometry.angle_span=-6.283185307179586"]
    sample = module(written, *overrides).dataset("test")[0]
    y = sample["sinogram"]
    projected = FanBeamProjector(build_geometry(config(written, *overrides)))(sample["image"][None])[0]
    assert float((projected - y).norm() / y.norm()) < 0.01


def test_one_bin_is_seen(written: Path) -> None:
    """The same counts are not those of the other side of slice 2830."""
    folder = written / "slices" / f"slice{MOVED:05d}" / "mode2"
    sinogram, dark, *flats = (tifffile.imread(folder / f"{it}.tif") for it in ("sinogram", "dark", "flat1", "flat2"))
    moved, stayed = (line_integrals(sinogram, dark, flats, [0, 300], moved=it) for it in (True, False))
    np.testing.assert_array_equal(moved[:, :-1], stayed[:, 1:])


def test_parts_are_those_of_the_benchmark(written: Path) -> None:
    data = module(written)
    data.setup()
    names = {part: [data.dataset(part)[k]["name"] for k in range(len(data.dataset(part)))] for part in data.parts}
    assert names == {"train": ["slice02830", "slice02831"], "val": ["slice03931"], "test": ["slice04531"]}


def test_two_roots(written: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").symlink_to(written / "slices")
    (tmp_path / "references").symlink_to(written / "slices_RecSeg")
    data = module(tmp_path / "raw", f"data.reference_root={tmp_path / 'references'}")
    assert torch.equal(data.dataset("val")[0]["image"], module(written).dataset("val")[0]["image"])
    with pytest.raises(DataError, match="no slices for val"):
        module(tmp_path / "raw").dataset("val")


def test_a_slice_is_decoded_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = module(root).dataset("train")
    before = data[0]
    (kept,) = (root.parent / "cache").rglob("slice02830-*.bin")
    fresh = module(root)
    fresh.setup()
    with monkeypatch.context() as patched:
        patched.setattr("qnmixer.extras.two_detect._read", lambda _: pytest.fail("decoded again"))
        assert torch.equal(fresh.dataset("train")[0]["sinogram"], before["sinogram"])
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    again = module(root).dataset("train")[0]
    assert torch.equal(again["sinogram"], before["sinogram"])
    assert torch.equal(again["image"], before["image"])
    os.utime(root / "slices" / "slice02830" / "mode2" / "dark.tif")
    assert module(root).dataset("train")[0]["sinogram"].equal(before["sinogram"])
    assert len([*(root.parent / "cache").rglob("slice02830-*.bin")]) == 1


def test_missing_files_are_said_once(root: Path, recwarn: pytest.WarningsRecorder) -> None:
    (root / "slices" / "slice02830" / "mode2" / "flat2.tif").unlink()
    data = module(root)
    assert data.dataset("train")[0]["name"] == "slice02831"
    (line,) = [str(it.message) for it in recwarn.list]
    assert "skipped 1 of its files or frames (1 without mode2/flat2.tif): slice02830" in line


def spoiled(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        values = change(tifffile.imread(folder / name))
        (folder / name).unlink()
        tifffile.imwrite(folder / name, values)

    return spoil


def truncated(folder: Path) -> None:
    content = (folder / "sinogram.tif").read_bytes()
    (folder / "sinogram.tif").unlink()
    (folder / "sinogram.tif").write_bytes(content[: len(content) // 2])


def dead(values: Any) -> Any:
    values[0, 200:204] = 0
    return values


BAD = {
    "unreadable or truncated TIFF": truncated,
    r"\[3601, 1910\] values, not \[3601, 1912\]": spoiled("sinogram.tif", lambda it: it[:, :-2]),
    r"\[721, 1912\] values, not \[3601, 1912\]": spoiled("sinogram.tif", lambda it: it[::5]),
    "dark or flat field beside it has 956 values, not 1912": spoiled("flat1.tif", lambda it: it[:, ::2]),
    "dark.tif beside it is brighter than the flat fields": spoiled("dark.tif", lambda it: it + 60000),
    "2 detector bins see no light in the flat fields, the first is 100 of 956": None,
}


@pytest.mark.parametrize("says", BAD)
def test_a_bad_slice_is_one_line_that_says_how_to_leave_it_out(root: Path, says: str) -> None:
    folder = root / "slices" / "slice03931" / "mode2"
    if (spoil := BAD[says]) is not None:
        spoil(folder)
    else:
        for name in ("flat1.tif", "flat2.tif"):
            spoiled(name, dead)(folder)
    data = module(root, f"data.cache_dir={root.parent / 'other'}")
    with pytest.raises(DataError, match=rf"slice03931.*{says}.*data\.leave_out=\[3931\]") as error:
        data.dataset("val")[0]
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match="no slices for val"):
        module(root, "data.leave_out=[3931]").dataset("val")


def test_counts_that_reach_nothing_stay_finite() -> None:
    sinogram = np.zeros((3601, 1912), np.uint16)
    flat, dark = np.full((1, 1912), 50000, np.uint16), np.full((1, 1912), 200, np.uint16)
    p = line_integrals(sinogram, dark, [flat, flat], [0], moved=False)
    assert p == pytest.approx(np.full((1, 956), -np.log(1e-6)), rel=1e-5)
    with pytest.raises(SkipFile, match="brighter"):
        line_integrals(sinogram, flat, [dark, dark], [0], moved=False)


def test_a_scale_that_does_not_suit_is_said(written: Path, recwarn: pytest.WarningsRecorder) -> None:
    module(written, "data.max_attenuation=0.5").setup()
    (line,) = [str(it.message) for it in recwarn.list]
    assert "training references are at 0.0" in line
    assert "set data.max_attenuation=0.0" in line


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["geometry=paper"],
            r"geometry\.n_detectors=512 is not that of data=two_detect, 956: take geometry=two_detect",
        ),
        (["geometry.detector_offset=-1"], r"geometry\.detector_offset=-1\.0"),
        (["data.augment=true"], r"data\.augment=True changes images"),
        (["data.mode=4"], r"data\.mode=4 is too large"),
    ],
)
def test_settings_that_do_not_fit(written: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(written, *overrides)


def test_no_slices_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no folder slice00001"):
        module(tmp_path).setup()


def test_without_tifffile(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(DataError, match=r'data=two_detect is read by tifffile.*pip install "qnmixer\[two_detect\]"'):
        module(written).setup()


def test_counts_that_astra_projected(root: Path) -> None:
    """The set's own angles and bins are those of ASTRA's fanflat."""
    astra = pytest.importorskip("astra")
    folder, reference = (root / name / "slice03931" / "mode2" for name in ("slices", "slices_RecSeg"))
    image = tifffile.imread(reference / "reconstruction.tif")[1:, 1:] / 0.113797
    image = np.pad(image, ((0, 1), (0, 1)))
    volume = astra.create_vol_geom(1024, 1024, -58.264, 58.264, -58.264, 58.264)
    detector = astra.create_proj_geom("fanflat", 0.1496, 956, 2 * np.pi * np.arange(12) / 12, 431.019989, 97.980499)
    _, p = astra.create_sino(image.astype(np.float32), astra.create_projector("line_fanflat", detector, volume))
    counts = np.full((3601, 956), 200.0)
    counts[:3600:300] += np.exp(-p) * 50000
    for name, values in {
        "sinogram": counts,
        "dark": np.full((1, 956), 200.0),
        "flat1": np.full((1, 956), 50200.0),
    }.items():
        (folder / f"{name}.tif").unlink()
        tifffile.imwrite(folder / f"{name}.tif", np.repeat(values, 2, axis=1).round().astype(np.uint16))
    (folder / "flat2.tif").unlink()
    (folder / "flat2.tif").symlink_to(folder / "flat1.tif")
    sample = module(root, "data.image_size=512").dataset("val")[0]
    projected = FanBeamProjector(build_geometry(config(root, "data.image_size=512")))(sample["image"][None])[0]
    assert float((projected - sample["sinogram"]).norm() / sample["sinogram"].norm()) < 0.005
