"""The content of figures, and the slices that are drawn at each validation."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from qnmixer.engine.build import build_module
from qnmixer.engine.config import Config
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.reports.pictures import Curve, Panel, Row, draw_curves, draw_iterates
from qnmixer.engine.tracking.loggers import build_loggers
from qnmixer.engine.training import callbacks
from qnmixer.engine.training.callbacks import build_callbacks
from qnmixer.engine.training.trainer import build_trainer


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"), float)


def row(n: int, error: float = 0.0, size: int = 32) -> Row:
    truth = torch.zeros(size, size)
    return Row("slice", truth, [Panel(f"x{t}\n20.00 dB", truth + error) for t in range(n)])


def test_a_slice_more_is_a_block_more_and_an_iteration_more_a_column(tmp_path: Path) -> None:
    shapes = []
    for slices, iterates in ((1, 3), (2, 3), (1, 4)):
        draw_iterates(tmp_path / "a.png", [row(iterates)] * slices)
        shapes.append(pixels(tmp_path / "a.png").shape[:2])
    (height, width), higher, wider = shapes
    assert higher == (pytest.approx(2 * height, abs=1), width)
    assert wider == (height, pytest.approx(width + 130 * 1.3, abs=1))


def test_a_strip_shows_each_iterate_over_its_error(tmp_path: Path) -> None:
    """The first iterate is right; the second is off by 200 HU, the brightest of an error map."""
    right, wrong = row(1), row(1, error=200.0)
    both = Row("slice", right.truth, [*right.panels, *wrong.panels])
    draw_iterates(tmp_path / "a.png", [both])
    image = pixels(tmp_path / "a.png").mean(axis=2)
    height = image.shape[0]
    column = [int(130 * (0.3 + 1.3 * (k + 0.5))) for k in range(3)]
    above, below = int(130 * (0.42 + 0.65)), height - int(130 * (0.06 + 0.65))
    assert image[above, column[0]] == image[above, column[2]] < image[above, column[1]]
    assert image[below, column[0]] < 20  # no error is black
    assert image[below, column[1]] > 150
    assert image[below, column[2]] == 255  # the truth has no error map


def test_a_validation_that_is_no_number_is_a_gap_of_its_curve(tmp_path: Path) -> None:
    bad = Curve("bad", [[(1, 1.0, 30.0), (2, 2.0, math.nan), (3, 3.0, 31.0)], [(1, 1.0, math.nan)]])
    for curves in ([bad], [Curve("dead", [[(1, 1.0, math.nan), (2, 2.0, -math.inf)]])]):
        draw_curves(tmp_path / "curves.png", curves, {"TV": 33.0}, "dB")
        assert np.asarray(Image.open(tmp_path / "curves.png")).std() > 10


@pytest.mark.parametrize(("batch_size", "n_pictures"), [(1, 3), (2, 3), (4, 1), (2, 9)])
def test_the_first_slices_are_drawn_in_order_at_every_validation(
    tiny_config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
    n_pictures: int,
) -> None:
    drawn: list[tuple[str, list[str], list[int]]] = []

    def draw(path: Path, rows: Sequence[Row]) -> None:
        drawn.append((path.name, [row.name for row in rows], [len(row.panels) for row in rows]))
        draw_iterates(path, rows)

    monkeypatch.setattr(callbacks, "draw_iterates", draw)
    config = tiny_config(
        "data.n_val=5", f"data.batch_size={batch_size}", f"evaluation.n_pictures={n_pictures}", "trainer.max_steps=4"
    )
    data = SliceDataModule(config.data)
    trainer = build_trainer(config, tmp_path, build_callbacks(config.callbacks), build_loggers(config, tmp_path, []))
    trainer.fit(build_module(config), datamodule=data)
    names = [f"slice {n}" for n in range(min(5, n_pictures))]
    iterates = [config.model.n_iterations + 1] * len(names)
    assert drawn == [(f"iterates_{step:07d}.png", names, iterates) for step in (2, 4)]
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == [name for name, _, _ in drawn]


def test_titles_say_what_validation_measures(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    """The mean PSNR of the last iterates is val/psnr, where all slices are drawn."""
    config = tiny_config("data.n_val=3", "evaluation.n_pictures=3", "trainer.max_steps=2")
    L.seed_everything(0, verbose=False)
    trainer = build_trainer(config, tmp_path, build_callbacks(config.callbacks), build_loggers(config, tmp_path, []))
    rows: list[Row] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks, "draw_iterates", lambda path, found: rows.extend(found))
        trainer.fit(build_module(config), datamodule=SliceDataModule(config.data))
    values = [float(row.panels[-1].title.splitlines()[-1].removesuffix(" dB")) for row in rows]
    assert np.mean(values) == pytest.approx(float(trainer.callback_metrics["val/psnr"]), abs=0.01)
