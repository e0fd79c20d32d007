"""Figures: the iterates of one slice, methods side by side with error maps, and the curves of their training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from qnmixer.files import atomic_file

DISPLAY_WINDOW = (-1000.0, 700.0)  # HU; lung, soft tissue and bone are all visible
ERROR_LIMIT = 200.0  # HU, the upper end of the error maps
_BODY = -500.0  # HU; a pixel above it is not air


@dataclass
class Panel:
    """One image of a figure, [H, W] in HU, and its title."""

    title: str
    hu: Tensor


@dataclass
class Row:
    """One slice: its truth and its reconstructions."""

    name: str
    truth: Tensor  # HU, [H, W]
    panels: list[Panel]


def draw_comparison(path: Path, rows: Sequence[Row]) -> None:
    """Draw a row for each slice: truth, each method, then the absolute error of each method. Writes a PNG."""
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


@dataclass
class Curve:
    """The quality of a method during its training: for each seed steps, seconds and dB. A level has no steps."""

    name: str
    seeds: list[list[tuple[float, float, float]]]


def draw_curves(path: Path, curves: Sequence[Curve], levels: Mapping[str, float], quantity: str) -> None:
    """Draw dB over steps and over training time: thin lines for seeds, a thick one for their mean. Writes a PNG.

    A validation that is not a finite number is a gap.

    Args:
        path: of the picture.
        curves: of the methods that learn, at least one.
        levels: dB of the others, as {"TV": 35.1}; a level far below the curves stands in the legend only.
        quantity: what the dB are of.
    """
    seeds = [[db for _, _, db in seed if isfinite(db)] for curve in curves for seed in curve.seeds]
    ends = [seed[-1] for seed in seeds if seed] or [0.0]
    top = max([*ends, *(db for seed in seeds for db in seed), *levels.values()])
    near = [db for db in levels.values() if db > min(ends) - 4]
    bottom = min([*ends, *near]) - max(1.0, (top - min([*ends, *near])) / 2)
    longest = max(seed[-1][1] for curve in curves for seed in curve.seeds)
    unit, seconds = ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0) if longest > 120 else ("seconds", 1.0)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, column, scale, label in zip(
        figure.subplots(1, 2, sharey=True), (0, 1), (1.0, seconds), ("steps", f"training time, {unit}"), strict=True
    ):
        for k, curve in enumerate(curves):
            for seed in curve.seeds if len(curve.seeds) > 1 else ():
                axes.plot([it[column] / scale for it in seed], [it[2] for it in seed], color=f"C{k}", lw=0.6, alpha=0.5)
            points = [[fmean(of) for of in zip(*its, strict=True)] for its in zip(*curve.seeds, strict=False)]
            x, y = [it[column] / scale for it in points], [it[2] for it in points]
            axes.plot(x, y, ".-", color=f"C{k}", lw=1.8, label=curve.name)
        for k, (name, db) in enumerate(levels.items()):
            text = f"{name}, {db:.1f} dB" + ("" if db > bottom else ", below")
            axes.axhline(db, color=str(0.55 * (k % 2)), linestyle=("--", ":")[k % 2], lw=1.4, label=text)
        axes.set(xlabel=label, ylim=(bottom, top + 0.05 * (top - bottom)), xlim=(0, None))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel(quantity)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    _save(figure, path)


def draw_methods(path: Path, rows: Sequence[Row]) -> None:
    """Draw slices × methods: images with an enlarged part, and error maps below. Writes a PNG.

    The enlarged part lies inside the body, at the largest error of all methods except the worst.
    """
    size, gap, headings, bar = 1.7, 0.03, 0.5, 0.1  # inches
    n_columns, block = 1 + max(len(row.panels) for row in rows), headings + 2 * size
    width, height = n_columns * size + bar + 0.75, block * len(rows) + 0.1
    figure = Figure(figsize=(width, height))

    def place(x: float, y: float, w: float) -> Axes:
        return figure.add_axes((x / width, y / height, w / width, (size - gap) / height))

    for k, row in enumerate(rows):
        above = height - k * block - headings - size
        below, right = above - size, n_columns * size + gap
        corner = _worst_part([panel.hu for panel in row.panels], row.truth)
        _show_enlarged(place(0, above, size - gap), row.truth, f"truth\n{_short(row.name, 22)}", corner)
        for n, panel in enumerate(row.panels, 1):
            _show_enlarged(place(n * size, above, size - gap), panel.hu, panel.title, corner)
            _show_error(place(n * size, below, size - gap), panel.hu, row.truth, "")
        scale = ScalarMappable(Normalize(*DISPLAY_WINDOW), "gray")
        figure.colorbar(scale, cax=place(right, above, bar), label="HU", ticks=(-500, 0, 500))
        scale = ScalarMappable(Normalize(0.0, ERROR_LIMIT), "inferno")
        figure.colorbar(scale, cax=place(right, below, bar), label="|error|, HU", ticks=(0, 100))
    _save(figure, path)


def _worst_part(images: Sequence[Tensor], truth: Tensor) -> tuple[int, int]:
    """Upper left corner of the part of a slice, a quarter of each side, with the largest error."""
    errors = torch.stack([(image - truth).abs() for image in images]) * (truth > _BODY)
    kept = errors.mean(dim=(1, 2)).argsort()[: max(1, len(images) - 1)]
    size, step = truth.shape[0] // 4, max(1, truth.shape[0] // 32)
    local = avg_pool2d(errors[kept].mean(dim=0)[None], size, step)[0]
    row, column = divmod(int(local.argmax()), local.shape[1])
    return row * step, column * step


def _show_enlarged(axes: Axes, hu: Tensor, title: str, corner: tuple[int, int]) -> None:
    """Draw an image, and a part of it at twice the size in the farthest corner. Both parts have a frame."""
    _show_hu(axes, hu, title)
    (row, column), size = corner, hu.shape[0] // 4
    x, y = (0.0 if 2 * column + size > hu.shape[1] else 0.5), (0.5 if 2 * row + size > hu.shape[0] else 0.0)
    inset = axes.inset_axes((x, y, 0.5, 0.5))
    _show_hu(inset, hu[row : row + size, column : column + size], "")
    for of, box in ((inset, (-0.5, -0.5)), (axes, (column - 0.5, row - 0.5))):
        of.add_patch(Rectangle(box, size, size, fill=False, edgecolor="tab:orange", linewidth=1.0))


def draw_iterates(path: Path, rows: Sequence[Row]) -> None:
    """Draw for each slice a strip of iterates and the truth, above a strip of their error maps. Writes a PNG."""
    size, headings, gap, left, bar, right = 1.3, 0.42, 0.06, 0.3, 0.1, 0.75  # inches
    strip, block = size * (max(len(row.panels) for row in rows) + 1), headings + 2 * size + 2 * gap
    width, height = left + strip + gap + bar + right, block * len(rows)
    figure = Figure(figsize=(width, height))

    def place(x: float, y: float, w: float) -> Axes:
        return figure.add_axes((x / width, y / height, w / width, size / height))

    for k, row in enumerate(rows):
        y = height - k * block - headings - size
        images, errors = [p.hu for p in row.panels], [(p.hu - row.truth).abs() for p in row.panels]
        above, below = place(left, y, strip), place(left, y - gap - size, strip)
        hu = _show_strip(above, [*images, row.truth], DISPLAY_WINDOW, "gray", _short(row.name, 20))
        error = _show_strip(below, [*errors, row.truth * nan], (0.0, ERROR_LIMIT), "inferno", "error")
        titles = [panel.title for panel in row.panels] + ["truth\n"]
        above.set_xticks(*_ticks(row.truth, titles), fontsize=8)
        figure.colorbar(hu, cax=place(left + strip + gap, y, bar), label="HU", ticks=(-500, 0, 500))
        figure.colorbar(error, cax=place(left + strip + gap, y - gap - size, bar), label="|error|, HU", ticks=(0, 100))
    _save(figure, path)


def _show_strip(
    axes: Axes, images: Sequence[Tensor], limits: tuple[float, float], colours: str, label: str
) -> AxesImage:
    """Draw images side by side as one image: many separate drawings would take seconds."""
    array = torch.cat([pad(image, (0, _gap(image)), value=nan) for image in images], dim=1)[:, : -_gap(images[0])]
    drawn = axes.imshow(array.numpy(), cmap=colours, vmin=limits[0], vmax=limits[1], interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.set_ylabel(label, fontsize=8)
    axes.spines[:].set_visible(False)
    return drawn


def _ticks(image: Tensor, titles: Sequence[str]) -> tuple[list[float], Sequence[str]]:
    """The middles of the images in a strip, and their titles."""
    width = image.shape[1]
    return [k * (width + _gap(image)) + width / 2 for k in range(len(titles))], titles


def _gap(image: Tensor) -> int:
    return max(1, image.shape[1] // 32)


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
