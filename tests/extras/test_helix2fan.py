"""helix2fan: files as it writes them, from discs whose line integrals are known."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.fan_tiff import open_fan
from qnmixer.errors import ConfigError, DataError
from qnmixer.installed import NotInstalled
from qnmixer.measurement.build import build_geometry
from qnmixer.module.build import build_module
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.reconstruction.reconstruct import reconstruct_input
from qnmixer.reconstruction.reconstruct_config import ReconstructConfig
from qnmixer.reconstruction.sinograms import holds_sinograms
from qnmixer.reconstruction.weights import CHECKPOINT_KEY
from qnmixer.settings.compose import compose
from qnmixer.settings.run import section

from ..conftest import TINY, config_of
from ..sets import discs, image_of, write_helix2fan

tifffile = pytest.importorskip("tifffile")
SIZE, WATER, NAME = 48, 0.0201, "scan_001_flat_fan_projections.tif"
WORDS = [
    *(word for word in TINY if not word.startswith(("geometry.", "data.image_size"))), "data=helix2fan",
    "geometry=helix2fan", "geometry.n_views=16", "geometry.n_detectors=96", "geometry.detector_pitch=9.86",
    f"data.image_size={SIZE}",
]  # fmt: skip
HELIX = 96  # views of a turn in the files


@cache
def scan(*overrides: str) -> FanBeamGeometry:
    return build_geometry(config_of(*WORDS, "data.root=set", *overrides))


def all_views(geometry: FanBeamGeometry, n_views: int = HELIX) -> FanBeamGeometry:
    """Clockwise from 200°, as helix2fan counts."""
    return replace(geometry, n_views=n_views, first_angle=np.radians(200), angle_span=-2 * np.pi)


def write(root: Path, part: str = "train", seeds: tuple[int, ...] = (0, 1), **keys: Any) -> Path:
    path = root / part / NAME
    write_helix2fan(path, all_views(scan()), seeds, water=WATER, **keys)
    return path


def module(root: Path, *overrides: str) -> SliceDataModule:
    its = section("data", "helix2fan", root=str(root), image_size=SIZE, num_workers=0)
    assert not its.own_range
    return SliceDataModule(its, geometry=scan(*overrides))


def test_rays_are_those_of_helix2fans_example(tmp_path: Path) -> None:
    """Its angles + π/2 are θ of torch-radon's kernel. There, with y down, the source is at s·(−sin θ, cos θ)."""
    path = write(tmp_path)
    theta = np.array(json.loads(tifffile.TiffFile(path).pages[0].description)["angles"])[:HELIX] + math.pi / 2
    fan = open_fan(path)
    beta = fan.first_angle + fan.step * np.arange(HELIX)
    np.testing.assert_allclose([np.sin(beta), np.cos(beta)], [-np.sin(theta), np.cos(theta)], atol=1e-9)  # source, bins
    np.testing.assert_array_equal(fan.rows(1, np.array([5, 2])), tifffile.imread(path)[[5, 2], ::-1, 1])


@pytest.mark.parametrize(
    "overrides", [(), ("geometry.n_views=24", "geometry.angle_span=-6.283185307179586", "geometry.first_angle=1")]
)
def test_a_pair_is_one_object(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """The image is FBP of all views, in HU by the water of the file. Its sinogram has the views of the scan."""
    write(tmp_path)
    sample = module(tmp_path, *overrides).dataset("train")[1]
    assert sample["name"] == "scan_001_flat_fan_projections#1"
    image, y = sample["image"], sample["sinogram"]
    truth = torch.from_numpy(image_of(discs(1, 125.0, 2.5), SIZE, 500.0)) / 3  # water is 1
    assert float((image[0] - truth).norm() / truth.norm()) < 0.1
    operator = FanBeamProjector(scan(*overrides))
    right = float((operator(image[None])[0] - y).norm() / y.norm())
    assert right < 0.03
    mirrored = [float((operator(it[None])[0] - y).norm() / y.norm()) for it in (image.flip(1), image.flip(2))]
    assert min(mirrored) > 0.06
    fan = open_fan(tmp_path / "train" / NAME)
    dense = FanBeamProjector(fan.scan(scan(*overrides), fan.nearest(scan(*overrides).angles()[0])[1]), "hann")
    expected = dense.fbp(torch.from_numpy(fan.rows(1, np.arange(HELIX)))[None, None])[0] / (3 * WATER)
    middle = slice(8, -8), slice(8, -8)  # all views see it
    torch.testing.assert_close(image[0][middle], expected[0][middle].clamp(0, 1), atol=1e-5, rtol=0)


def rewritten(path: Path, values: Any, **options: Any) -> None:
    """The file with the same description and other values."""
    with tifffile.TiffFile(path) as file:
        its = json.loads(file.pages[0].description)
    del its["shape"]
    tifffile.imwrite(path, values, metadata=its, **options)


SKIPPED: dict[str, Callable[[Path], object]] = {
    r"a truncated or compressed TIFF \(Value": lambda path: path.write_bytes(path.read_bytes()[:50000]),
    "a truncated or compressed TIFF": lambda path: rewritten(path, tifffile.imread(path), compression="zlib"),
    r"\[200, 8, 96\] values of float32, not \[96, 96, slices\] of float32; \*_flat_fan": lambda path: rewritten(
        path, np.zeros((200, 8, 96), np.float32)
    ),
    "no geometry of helix2fan in its description": lambda path: tifffile.imwrite(path, np.zeros((9, 9), np.float32)),
    "distances in its description that are none, or": lambda path: write(path.parents[1], hu_factor=math.nan),
    "distances in .*, or angles that are no turn": lambda path: write(path.parents[1], angles=[*range(HELIX)]),
}


@pytest.mark.parametrize("says", SKIPPED)
def test_other_files_are_skipped_with_a_line(tmp_path: Path, says: str) -> None:
    path = write(tmp_path)
    path.with_name("b.tif").write_bytes(path.read_bytes())
    SKIPPED[says](path)
    with pytest.warns(UserWarning, match=rf"train: skipped 1 of its files or frames \(1 {says}.*: {NAME}"):
        assert module(tmp_path).dataset("train")[0]["name"] == "b#0"


def test_slices_without_all_views_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, seeds=(0, 1, 2, 3, 4))
    tifffile.memmap(path)[3:20, :, 0] = 0
    data = module(tmp_path).dataset("train")
    assert [data[k]["name"][-2:] for k in range(len(data))] == ["#1", "#2", "#3", "#4"]
    assert data.part.patients == [0, 0, 0, 0]  # one file


@pytest.mark.parametrize(("overrides", "says"), [
    (["geometry.n_views=14"],
     "view 1 of geometry, at 25.71°, is not one of the 96 measured views: use geometry=helix2fan .*divisor"),
    (["geometry.n_detectors=90", "geometry.source_to_axis=600"],
     "other rays than those of the config: give geometry.n_detectors=96 geometry.source_to_axis=595$"),
    (["geometry.beam=fan_curved"], "give geometry.beam=fan_flat$"),
])  # fmt: skip
def test_another_scan_is_one_line_that_says_what_to_give(tmp_path: Path, overrides: list[str], says: str) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=says):
        module(tmp_path, *overrides).setup()


def test_bad_values_and_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="has no folder train, val or test: make them"):
        module(tmp_path).setup()
    tifffile.memmap(write(tmp_path))[3, 4, 0] = np.nan
    assert module(tmp_path).dataset("train")[1]["sinogram"].isfinite().all()
    with pytest.raises(DataError, match=r"scan_001_flat_fan_projections#0 cannot be used .*NaN or infinite"):
        module(tmp_path).dataset("train")[0]
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(NotInstalled, match="data=helix2fan needs tifffile"):
        module(tmp_path).setup()


def test_a_file_is_reconstructed_as_it_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a network of drawn phantoms too: the file brings its own water and angles."""
    path = write(tmp_path)
    words = [word for word in WORDS if word != "data=helix2fan" and not word.startswith("model.")]
    trained = build_module(config_of(*words, "model=fbp", "data=phantoms"))
    its = {"format": 1, "config": trained.config.plain()}
    torch.save({CHECKPOINT_KEY: its, "state_dict": trained.state_dict()}, tmp_path / "a.ckpt")
    given = [f"run={tmp_path}/a.ckpt", f"input={path.parent}", f"output={tmp_path}/out", "formats=[npy]"]
    reconstruct_input(ReconstructConfig.parse(compose("reconstruct", given)))
    found = np.load(tmp_path / "out" / "scan_001_flat_fan_projections_1_fbp.npy")
    sample = module(tmp_path).dataset("train")[1]
    expected = FanBeamProjector(scan(), "hann").fbp(sample["sinogram"][None])[0, 0].numpy() * 3000 - 1000
    assert np.abs(found - expected).max() < 30  # HU; angles between those of the file are interpolated
    assert "from the run's first view" in capsys.readouterr().err
    with pytest.raises(DataError, match="has angles and bins of its own"):
        reconstruct_input(ReconstructConfig.parse(compose("reconstruct", [*given, f"input={path}", "angle_span=3"])))
    tifffile.imwrite(path, np.zeros((9, 9), np.uint8))  # a picture
    assert not holds_sinograms(
        path.parent, trained.projector.geometry, ReconstructConfig.parse(compose("reconstruct", given))
    )
