"""Slices at their true size, in the scan's field of view."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qnmixer.data.cache import open_cache, to_grid
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.errors import ConfigError
from qnmixer.physics import FanBeamGeometry
from qnmixer.physics.units import FloatArray
from qnmixer.settings.run import section

from .conftest import make_ct


def disc(n: int, mm: float, diameter: float, x: float = 0.0, y: float = 0.0) -> FloatArray:
    """Water in air, [n, n]; the rim's pixels have their share of it. x to the right, y downwards, mm."""
    axis = (np.arange(8 * n) + 0.5) * mm / 8 - n * mm / 2
    inside = (axis[:, None] - y) ** 2 + (axis - x) ** 2 < diameter**2 / 4
    return (inside.reshape(n, 8, n, 8).mean((1, 3)) * 1000 - 1000).astype(np.float32)


def measured(hu: FloatArray, mm: float) -> tuple[float, float, float]:
    """Diameter and centre (x, y) in mm of what is not air, of pixels of mm."""
    share = (hu + 1000.0) / 1000.0
    axis = (np.arange(len(hu)) - (len(hu) - 1) / 2) * mm
    total = share.sum()
    return 2 * np.sqrt(total / np.pi) * mm, (share.sum(0) * axis).sum() / total, (share.sum(1) * axis).sum() / total


@pytest.mark.parametrize("size", [64, 256, 700])
def test_a_disc_keeps_its_millimetres(size: int) -> None:
    image = to_grid(disc(300, 0.6, 120.0, 20.0, -12.0), (0.6, 0.6), size, 250.0)
    assert measured(image, 250.0 / size) == pytest.approx((120.0, 20.0, -12.0), abs=0.06)


def folder(root: Path) -> Path:
    for k, mm in enumerate((0.6, 0.9, 0.9)):
        hu = disc(100, mm, 50.0)
        make_ct(root / f"p{k}" / "a", hu.round(), PixelSpacing=[mm, mm], PatientID=f"P{k}")
    return root


def dicom(root: Path, **keys: Any) -> Any:
    return section("data", "dicom", root=str(root), cache_dir=str(root.with_name("cache")), **keys)


def scan(field_of_view: float) -> FanBeamGeometry:
    return FanBeamGeometry(64, field_of_view / 64, 8, 96, 1.5, 300.0, 100.0)


def test_the_header_decides_where_it_is_asked(tmp_path: Path) -> None:
    root, keys = folder(tmp_path / "root"), {"image_size": 64, "num_workers": 0, "split": "all"}
    data = dicom(root, pixel_size="header", simulation_factor=2, **keys)
    for _ in range(2):  # decoded, then from the cache
        module = SliceDataModule(data, geometry=scan(60.0))
        module.setup()
        part = module.parts["test"]
        sizes = [measured(part.source.load(k), 60.0 / 64)[0] for k in range(3)]
        assert sizes == pytest.approx([50.0] * 3, rel=0.005)
        assert measured(part.fine.load(0), 60.0 / 128)[0] == pytest.approx(50.0, rel=0.005)


@pytest.mark.parametrize("spacing", [None, [0, 0], ["nan", "nan"]])
def test_slices_without_a_size_are_left_out(tmp_path: Path, spacing: Any) -> None:
    root = folder(tmp_path / "root")
    make_ct(root / "odd" / "a", disc(100, 0.9, 50.0).round(), PixelSpacing=spacing)
    cache = open_cache(dicom(root), 64, 60.0)
    assert cache.skipped == [("odd/a", "no pixel size in the file, which data.pixel_size=header needs")]
    assert len(cache) == 3
    with pytest.raises(ConfigError, match=r"data\.pixel_size=header needs the scan"):
        SliceDataModule(dicom(root, pixel_size="header")).setup()
