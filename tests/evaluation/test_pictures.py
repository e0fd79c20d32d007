"""The content of figures, and the slices that are drawn at each validation."""

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.evaluation.pictures import MethodImages, SliceImages, draw_slices
from qnmixer.module.build import build_module
from qnmixer.runs.loggers import build_loggers
from qnmixer.training import callbacks
from qnmixer.training.callbacks import build_callbacks
from qnmixer.training.steps import build_trainer

from ..conftest import tiny_config


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"), float)


WINDOW = [-160.0, 240.0]


def test_a_picture_shows_each_image_a_magnified_part_and_its_error(tmp_path: Path) -> None:
    """The first method is right; the second is off by 200 HU, the brightest of an error map. The last x_t is shown."""
    truth = torch.zeros(32, 32)
    methods = [MethodImages("right", [truth + 900, truth]), MethodImages("wrong", [truth + 200])]
    draw_slices(tmp_path / "a.png", [SliceImages("slice", truth, methods, WINDOW)])
    image = pixels(tmp_path / "a.png").mean(axis=2)
    column = [int(150 * 2.0 * (k + 0.3)) for k in range(3)]
    above, middle, below = (int(150 * (0.5 + 2.0 * (n + 0.7) + 0.06 * n)) for n in range(3))
    assert image[above, column[0]] == image[above, column[1]] < image[above, column[2]] - 20
    assert image[middle, column[0]] == pytest.approx(255 * 160 / 400, abs=2)  # 0 HU in the window
    assert image[middle, column[0]] == image[middle, column[1]]
    assert image[middle, column[2]] == pytest.approx(255 * 360 / 400, abs=2)
    assert image[below, column[0]] == 255  # the truth has no error map
    assert image[below, column[1]] < 20  # no error is black
    assert image[below, column[2]] > 150


def test_the_magnified_part_is_where_the_truth_has_most_detail_of_soft_tissue() -> None:
    """Far larger steps to air, to bone, and of a blurred edge of bone are in other places."""
    truth = torch.full((64, 48), -1000.0)
    truth[8:, :] = 40
    truth[12:24:2, 2:12] = 1000  # ribs
    truth[12:28, 14:20] = torch.linspace(40, 1000, 6)  # the first two values of this edge are of soft tissue
    truth[40:46:2, 30:36] = 70  # faint vessels, 6 × 6 pixels
    rows, columns = SliceImages("", truth, [], WINDOW).region()
    assert (rows.stop - rows.start, columns.stop - columns.start) == (16, 12)
    assert rows.start < 40 < 45 <= rows.stop
    assert columns.start < 30 < 36 <= columns.stop
    in_bone = SliceImages("", truth, [], [300.0, 1100.0]).region()
    assert in_bone[0].start < 24  # the detail of another window is elsewhere
    assert in_bone[1].start < 20


@pytest.mark.parametrize("value", [0.0, -1000.0])
def test_a_slice_without_detail_has_its_middle_magnified(value: float) -> None:
    assert SliceImages("", torch.full((64, 48), value), [], WINDOW).region() == (slice(24, 40), slice(18, 30))


def test_the_frame_is_around_what_is_magnified(tmp_path: Path) -> None:
    """Of a slice whose sides are no multiples of the magnification."""
    truth = torch.full((50, 50), -1000.0)
    truth[9:30, 26:47] = 0
    truth[12:20:2, 30:38] = 100
    slice_ = SliceImages("slice", truth, [MethodImages("right", [truth])], WINDOW)
    rows, columns = slice_.region()
    draw_slices(tmp_path / "a.png", [slice_])
    image = pixels(tmp_path / "a.png")
    orange = (image[..., 0] - image[..., 2] > 100) & (image[..., 1] < 200)
    y, x = np.nonzero(orange[: int(150 * 2.5), : int(150 * 2.0)])
    pixel = 150 * 2.0 / 50
    found = np.array([y.min(), y.max(), x.min(), x.max()]) / pixel - np.array([0.5 / 2.0 * 50] * 2 + [0] * 2)
    assert found == pytest.approx([rows.start, rows.stop, columns.start, columns.stop], abs=0.7)


def test_the_first_slices_are_drawn_in_order_by_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean PSNR in the titles of the last iterates is val/psnr."""
    drawn: dict[str, Sequence[SliceImages]] = {}

    def draw(path: Path, slices: Sequence[SliceImages]) -> None:
        drawn[path.name] = slices
        draw_slices(path, slices)

    monkeypatch.setattr(callbacks, "draw_slices", draw)
    sizes = ["data.n_val=3", "data.batch_size=2", "evaluation.n_pictures=9", "trainer.max_steps=4"]
    config = tiny_config("callbacks=default", *sizes)
    L.seed_everything(0, verbose=False)
    data = SliceDataModule(config.data)
    pictures = build_callbacks(config.callbacks, config.metrics)
    trainer = build_trainer(config, tmp_path, pictures, build_loggers(config, tmp_path, []))
    trainer.fit(build_module(config), datamodule=data)
    assert [*drawn] == ["iterates_0000002.png", "iterates_0000004.png"]
    for slices in drawn.values():
        assert [of.name for of in slices] == [f"slice {n}" for n in range(3)]
        assert {tuple(method.name for method in of.methods) for of in slices} == {("x0", "x1", "x2")}
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == [*drawn]
    values = [float(of.methods[-1].caption.removesuffix(" dB")) for of in slices]
    assert np.mean(values) == pytest.approx(float(trainer.callback_metrics["val/psnr"]), abs=0.01)
