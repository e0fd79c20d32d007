"""Figures of reconstructions: the iterates of one slice, and methods side by side with error maps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from qnmixer.files import atomic_file

DISPLAY_WINDOW = (-1000.0, 700.0)  # HU: lung, soft tissue and bone all told apart
ERROR_LIMIT = 200.0  # HU, the brightest of an error map


@dataclass
class Panel:
    """One image of a figure, in HU, [H, W], and what stands over it."""

    title: str
    hu: Tensor


@dataclass
class Row:
    """One slice: its truth and what was made of it."""

    name: str
    truth: Tensor  # HU, [H, W]
    panels: Sequence[Panel]


def draw_comparison(path: Path, rows: Sequence[Row]) -> None:
    """A row for each slice: truth, each method, then the absolute error of each method. Writes a PNG."""
    n_methods = max(len(row.panels) for row in rows)
    figure = Figure(figsize=(2.2 * (1 + 2 * n_methods) + 1.2, 2.5 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 1 + 2 * n_methods, squeeze=False)
    for line, row in zip(axes, rows, strict=True):
        _show_hu(line[0], row.truth, f"truth\n{_short(row.name)}")
        for k, panel in enumerate(row.panels):
            _show_hu(line[1 + k], panel.hu, panel.title)
            _show_error(line[1 + n_methods + k], panel.hu, row.truth, f"error of\n{panel.title.splitlines()[0]}")
    _add_bar(figure, axes[:, n_methods], DISPLAY_WINDOW, "gray", "HU")
    _add_bar(figure, axes[:, -1], (0.0, ERROR_LIMIT), "inferno", "|error|, HU")
    _save(figure, path)


def draw_iterates(path: Path, row: Row) -> None:
    """x₀ … x_T of one slice over their error maps. Writes a PNG."""
    columns = len(row.panels) + 1
    figure = Figure(figsize=(1.7 * columns + 0.9, 4.0), layout="constrained")
    axes = figure.subplots(2, columns, squeeze=False)
    axes[1][-1].set_axis_off()
    for column, panel in enumerate(row.panels):
        _show_hu(axes[0][column], panel.hu, panel.title)
        _show_error(axes[1][column], panel.hu, row.truth, "")
    _show_hu(axes[0][-1], row.truth, "truth")
    _add_bar(figure, axes[0], DISPLAY_WINDOW, "gray", "HU")
    _add_bar(figure, axes[1], (0.0, ERROR_LIMIT), "inferno", "|error|, HU")
    _save(figure, path)


def _show_hu(axes: Axes, hu: Tensor, title: str) -> None:
    _show(axes, hu, DISPLAY_WINDOW, "gray", title)


def _show_error(axes: Axes, hu: Tensor, truth: Tensor, title: str) -> None:
    _show(axes, (hu - truth).abs(), (0.0, ERROR_LIMIT), "inferno", title)


def _show(axes: Axes, image: Tensor, limits: tuple[float, float], colours: str, title: str) -> None:
    axes.imshow(image.numpy(), cmap=colours, vmin=limits[0], vmax=limits[1], interpolation="nearest")
    axes.set_title(title, fontsize=8)
    axes.set_axis_off()


def _add_bar(figure: Figure, axes: Any, limits: tuple[float, float], colours: str, label: str) -> None:
    figure.colorbar(ScalarMappable(Normalize(*limits), colours), ax=axes, shrink=0.9, aspect=30, label=label)


def _short(name: str, length: int = 28) -> str:
    return name if len(name) <= length else f"…{name[1 - length :]}"


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    with atomic_file(path) as stream:
        figure.savefig(stream, dpi=130, format="png")
