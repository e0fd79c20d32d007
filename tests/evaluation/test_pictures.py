"""The content of figures, and the slices that are drawn at each validation."""

from collections.abc import Callable, Sequence
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
from qnmixer.settings.run import Config
from qnmixer.training import callbacks
from qnmixer.training.callbacks import build_callbacks
from qnmixer.training.steps import build_trainer


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"), float)


def test_a_strip_shows_each_image_over_its_error(tmp_path: Path) -> None:
    """The first method is right; the second is off by 200 HU, the brightest of an error map. The last x_t is shown."""
    truth = torch.zeros(32, 32)
    methods = [MethodImages("right", [truth + 900, truth]), MethodImages("wrong", [truth + 200])]
    draw_slices(tmp_path / "a.png", [SliceImages("slice", truth, methods)])
    image = pixels(tmp_path / "a.png").mean(axis=2)
    column = [int(130 * 2.2 * (k + 0.5)) for k in range(3)]
    above, below = int(130 * (0.5 + 1.1)), int(130 * (0.5 + 2.2 + 0.06 + 1.1))
    assert image[above, column[0]] == image[above, column[1]] < image[above, column[2]]
    assert image[below, column[0]] == 255  # the truth has no error map
    assert image[below, column[1]] < 20  # no error is black
    assert image[below, column[2]] > 150


def test_the_first_slices_are_drawn_in_order_at_every_validation(
    tiny_config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mean PSNR in the titles of the last iterates is val/psnr."""
    drawn: dict[str, Sequence[SliceImages]] = {}

    def draw(path: Path, slices: Sequence[SliceImages]) -> None:
        drawn[path.name] = slices
        draw_slices(path, slices)

    monkeypatch.setattr(callbacks, "draw_slices", draw)
    config = tiny_config("data.n_val=5", "data.batch_size=2", "evaluation.n_pictures=9", "trainer.max_steps=4")
    L.seed_everything(0, verbose=False)
    data = SliceDataModule(config.data)
    trainer = build_trainer(config, tmp_path, build_callbacks(config.callbacks), build_loggers(config, tmp_path, []))
    trainer.fit(build_module(config), datamodule=data)
    assert [*drawn] == ["iterates_0000002.png", "iterates_0000004.png"]
    for slices in drawn.values():
        assert [of.name for of in slices] == [f"slice {n}" for n in range(5)]
        assert {tuple(method.name for method in of.methods) for of in slices} == {("x0", "x1", "x2")}
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == [*drawn]
    values = [float(of.methods[-1].caption.removesuffix(" dB")) for of in slices]
    assert np.mean(values) == pytest.approx(float(trainer.callback_metrics["val/psnr"]), abs=0.01)
