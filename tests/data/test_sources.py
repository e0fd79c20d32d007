import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.numpy_files import NumpyReader
from qnmixer.errors import DataError, PluginError
from qnmixer.settings.run import section

from .conftest import body_hu

MINE = """
import numpy as np

class Mine:
    def __init__(self, part, value=0.0):
        self.part, self.value = part, value

    def __len__(self):
        return {"train": 4, "val": 2, "test": 1}[self.part]

    def load(self, index):
        return np.full((20, 30), self.value + 100 * index, np.float64)

class Drawn(Mine):
    def __init__(self, part, image_size, value=0.0):
        super().__init__(part, value)
        self.size = image_size

    def load(self, index):
        return np.full((self.size, self.size), float(self.size))

class Flat(Mine):
    def load(self, index):
        return np.zeros(7)

class Named(Mine):
    def load(self, index):
        return np.full((16, 16), np.nan)

    def name(self, index):
        return f"mine {index}"

class Scaled(Mine):
    def load(self, index):
        return np.eye(16)

"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slices_of_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))


def module(target: str, **options: Any) -> SliceDataModule:
    keys = {"_target_": f"slices_of_mine.{target}", "image_size": 16, "num_workers": 0} | options
    return SliceDataModule(section("data", "custom", **keys))


def test_slices_of_any_shape_come_square_and_scaled() -> None:
    data = module("Mine", value=500.0, batch_size=2, simulation_factor=2)
    assert data.describe() == "data=slices_of_mine.Mine, 16 × 16: train 4 slices, val 2 slices, test 1 slices"
    (batch,) = data.val_dataloader()
    assert batch["image"].shape == (2, 1, 16, 16)
    torch.testing.assert_close(batch["image"][:, 0, 8, 8], torch.tensor([0.5, 1600 / 3000]))
    assert batch["image"][0, 0, 0, 8] < 1e-6  # air above and below what is not as high as it is wide
    assert batch["name"] == ["val 0", "val 1"]
    assert batch["fine"].shape == (2, 1, 32, 32)
    np.testing.assert_allclose(batch["fine"][:, 0, 16, 16], batch["image"][:, 0, 8, 8])


def test_a_class_that_takes_the_size_draws_at_it() -> None:
    (batch,) = module("Drawn", simulation_factor=2).test_dataloader()
    torch.testing.assert_close(batch["image"], torch.full((1, 1, 16, 16), 1016 / 3000))
    torch.testing.assert_close(batch["fine"], torch.full((1, 1, 32, 32), 1032 / 3000))


@pytest.mark.parametrize(("target", "message"), [
    ("Flat", r"slices_of_mine\.Flat: test 0 cannot be used \(it is no array"),
    ("Named", r"mine 0 cannot be used \(NaN"),
    ("Scaled", r"test 0 cannot be used \(values from 0 to 1, which are not HU, air −1000 and water 0\)"),
    ("Mine", r"unknown key data\.values: did you mean data\.value\?"),
])  # fmt: skip
def test_what_is_no_slice_is_named(target: str, message: str) -> None:
    with pytest.raises((DataError, PluginError), match=message):
        next(iter(module(target, **({"values": 1} if target == "Mine" else {})).test_dataloader()))


READER = """
import numpy as np
from qnmixer.data.numpy_files import NumpyReader
from qnmixer.data.slices import Slice

class Phase(NumpyReader):
    def __init__(self, phase=0):
        self.phase = phase

    def read(self, root, path):
        for piece in super().read(root, path):
            yield Slice(piece.info, piece.hu + np.float32(10 * self.phase + 1))

class Plain(NumpyReader):
    pass
"""


def test_readers_of_ones_own_share_no_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with our reader that they derive from, nor with themselves, with other arguments or before a change."""
    (tmp_path / "root").mkdir()
    np.save(tmp_path / "root" / "a.npy", body_hu(16, 16))
    code = tmp_path / "reader_of_mine.py"
    code.write_text(READER)

    def tissue(**keys: Any) -> float:
        its = {"root": str(tmp_path / "root"), "split": "all", "image_size": 16, "cache_dir": str(tmp_path / "cache")}
        data = SliceDataModule(section("data", "numpy", num_workers=0, **its, **keys))
        data.setup()
        return float(data.parts["test"].source.load(0)[8, 5])

    mine = {"_target_": "reader_of_mine.Phase"}
    ours = tissue()
    for _ in range(2):  # decoded, then from the cache
        assert [tissue(), tissue(_target_="reader_of_mine.Plain")] == [ours, ours]
        assert [tissue(**mine, phase=phase) - ours for phase in (0, 1, 2)] == [1, 11, 21]
    n_caches = len([*(tmp_path / "cache").glob("*/*.f32")])
    code.write_text(READER.replace("10 *", "100 *"))
    sys.modules.pop("reader_of_mine")
    importlib.invalidate_caches()
    assert tissue(**mine, phase=1) - ours == 101
    assert len([*(tmp_path / "cache").glob("*/*.f32")]) == n_caches + 1  # the version before stays
    with monkeypatch.context() as patch:
        patch.setattr(NumpyReader, "read", lambda *_: pytest.fail("decoded again"))
        assert [tissue(), tissue(**mine, phase=1) - ours] == [ours, 101]
