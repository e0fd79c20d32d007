"""LoDoPaB-CT: files of its layout, from discs whose line integrals are known."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.errors import ConfigError, DataError
from qnmixer.installed import NotInstalled
from qnmixer.measurement.build import build_geometry
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.settings.run import section

from ..conftest import config_of
from ..sets import write_lodopab

h5py = pytest.importorskip("h5py")
VIEWS = 20


def config(*overrides: str) -> Any:
    words = "data=lodopab", "geometry=lodopab", "data.root=set", f"geometry.n_views={VIEWS}", "data.image_size=362"
    return config_of("model=fbp", "logger=csv", *words, *overrides)


@cache
def scan(*overrides: str) -> FanBeamGeometry:
    return build_geometry(config(*overrides))


def module(root: Path, *overrides: str, **keys: Any) -> SliceDataModule:
    keys = {"root": str(root), "image_size": 362, "num_workers": 0} | keys
    return SliceDataModule(section("data", "lodopab", **keys), geometry=scan(*overrides))


def misfit(sample: Any) -> float:
    """The norm of A x − y, in norms of y."""
    y = sample["sinogram"]
    return float((FanBeamProjector(scan())(sample["image"][None])[0] - y).norm() / y.norm())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of validation, the others in one each; the last images of each part are longer."""
    root = tmp_path_factory.mktemp("lodopab")
    write_lodopab(root, scan(), {"train": 3, "validation": 5, "test": 1}, per_file=3)
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """The same files, to be spoilt one by one."""
    for file in written.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def test_observations_are_line_integrals_of_the_images(written: Path) -> None:
    """With the angles, the direction of bins and the unit that the set has. Observations are counted, not images."""
    data = module(written)
    sample = data.dataset("val")[4]
    assert [len(data.dataset(part)) for part in ("train", "val", "test")] == [3, 5, 1]
    assert sample["name"] == "validation_001#1"
    assert float(sample["image"].max()) == pytest.approx(0.8, abs=0.5)
    assert sample["sinogram"].shape == (1, VIEWS, 513)
    assert misfit(sample) < 0.005
    hu = sample["hu_offset"] + sample["hu_scale"] * torch.tensor([0.0, 20 / 81.35858, 1.0])
    assert hu.tolist() == pytest.approx([-1001.001, 0.0, 3071.0], abs=0.01)


def test_simulated_sinograms_need_no_observations(root: Path) -> None:
    for file in root.glob("observation_*"):
        file.unlink()
    sample = module(root, sinograms="simulated", image_size=64, simulation_factor=2).dataset("test")[0]
    assert "sinogram" not in sample
    assert (sample["image"].shape, sample["fine"].shape) == ((1, 64, 64), (1, 128, 128))


@pytest.mark.parametrize(("overrides", "says"), [
    (["data.simulation_factor=2"], r"data\.simulation_factor=2 changes images"),
    (["data.hu_max=2000"], r"data\.hu_max=2000.0 is not that of data=lodopab: give 3071"),
    (["data.scaling=minmax", "data.sinograms=simulated"], r"data\.scaling=minmax is not that of data=lodopab"),
])  # fmt: skip
def test_settings_that_do_not_fit(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(*overrides)


ZEROS = np.zeros((3, 1000, 512), np.float32)
Y = np.zeros((1, 1000, 513), np.float32)


@pytest.mark.parametrize(("name", "datasets", "says"), [
    ("observation_train_000", {"data": ZEROS}, r"values \[3, 1000, 512\] in `data`, not \[n, 1000, 513\]"),
    ("observation_train_000", None, r"no whole HDF5 file of LoDoPaB-CT .*: unzip it again"),
    ("ground_truth_test_000", {"data": ZEROS[:0, :362, :362]}, r"test_000\.hdf5 is missing or damaged"),
    ("observation_test_000", {"data": Y * np.nan}, r"test_000#0 cannot be used \(NaN or infinite values"),
])  # fmt: skip
def test_bad_files_are_named(root: Path, name: str, datasets: dict[str, Any] | None, says: str) -> None:
    path = root / f"{name}.hdf5"
    path.unlink()
    if datasets is None:
        path.write_bytes(b"PK\3\4 not unzipped")
    else:
        with h5py.File(path, "w") as stream:
            for key, values in datasets.items():
                stream[key] = values
    with pytest.raises(DataError, match=says):
        module(root).dataset("test")[0]


def test_without_h5py_or_files(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no slices for test"):
        module(tmp_path).dataset("test")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(NotInstalled, match=r'data=lodopab needs h5py.*pip install "qnmixer\[lodopab\]"'):
        module(written).setup()
