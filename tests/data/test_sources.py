import importlib
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.numpy_files import NumpyReader
from qnmixer.errors import DataError, PluginError
from qnmixer.settings.run import section

from ..own import MySlices
from .conftest import body_hu


class Drawn(MySlices):
    """Slices of any size."""

    def __init__(self, part: str, image_size: int) -> None:
        super().__init__(part, 2016)
        self.size = image_size

    def load(self, index: int) -> Any:
        return np.full((self.size, self.size), float(self.size))


class Odd(MySlices):
    """Of no use."""

    images: ClassVar = {"flat": np.zeros(7), "nan": np.full((16, 16), np.nan), "unit": np.eye(16)}

    def __init__(self, part: str, kind: str) -> None:
        super().__init__(part, 2016)
        self.kind = kind

    def load(self, index: int) -> Any:
        return self.images[self.kind]

    def name(self, index: int) -> str:
        return f"{self.kind} {index}"


def module(target: str, **options: Any) -> SliceDataModule:
    keys = {"_target_": target, "image_size": 16, "num_workers": 0} | options
    return SliceDataModule(section("data", "custom", **keys))


def test_slices_of_any_shape_come_square_and_scaled() -> None:
    data = module("tests.own.MySlices", year=2516, batch_size=2, simulation_factor=2)
    assert data.describe() == "data=tests.own.MySlices, 16 × 16: train 4 slices, val 2 slices, test 2 slices"
    (batch,) = data.val_dataloader()
    assert batch["image"].shape == (2, 1, 16, 16)
    torch.testing.assert_close(batch["image"][:, 0, 8, 8], torch.tensor([1500 / 3000, 1510 / 3000]))
    assert batch["image"][0, 0, 0, 8] < 1e-6  # air above and below what is not as high as it is wide
    assert batch["name"] == ["val 0", "val 1"]
    assert batch["fine"].shape == (2, 1, 32, 32)
    np.testing.assert_allclose(batch["fine"][:, 0, 16, 16], batch["image"][:, 0, 8, 8])


def test_a_class_that_takes_the_size_draws_at_it() -> None:
    batch = next(iter(module(f"{__name__}.Drawn", simulation_factor=2).test_dataloader()))
    torch.testing.assert_close(batch["image"], torch.full((1, 1, 16, 16), 1016 / 3000))
    torch.testing.assert_close(batch["fine"], torch.full((1, 1, 32, 32), 1032 / 3000))


@pytest.mark.parametrize(("keys", "message"), [
    ({"kind": "flat"}, r"test_sources\.Odd: flat 0 cannot be used \(it is no array"),
    ({"kind": "nan"}, r"nan 0 cannot be used \(NaN"),
    ({"kind": "unit"}, r"unit 0 cannot be used \(values from 0 to 1, which are not HU, air −1000 and water 0\)"),
    ({"kind": "nan", "kinds": 1}, r"unknown key data\.kinds: did you mean data\.kind\?"),
])  # fmt: skip
def test_what_is_no_slice_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, PluginError), match=message):
        next(iter(module(f"{__name__}.Odd", **keys).test_dataloader()))


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
    monkeypatch.syspath_prepend(str(tmp_path))
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
